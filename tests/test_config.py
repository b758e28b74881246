"""The settings of a run: defaults, TOML, flags, and what is said about mistakes."""

import pytest

from zerostage.mistakes import InputError, closest
from zerostage.train.config import TrainConfig, derive_batch, flag, load

BASE = {"model": "m", "data": ["d.txt"]}


def toml(tmp_path, text):
    path = tmp_path / "run.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def refused(path=None, flags=None, environ=None):
    with pytest.raises(InputError) as caught:
        derive_batch(load(path, {**BASE, **(flags or {})}, environ))
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    lines = ['model = "m"', 'data = "one.txt"', "steps = 7", "learning-rate = 1e-3", "activation_checkpointing = true"]
    path = toml(tmp_path, "\n".join(lines))
    config = load(path, {"steps": "9"})
    assert (config.steps, config.learning_rate, config.data, config.seed) == (9, 1e-3, ["one.txt"], 0)
    assert config.activation_checkpointing is True
    assert config.source("steps") == "the flag --steps"
    assert config.source("learning_rate") == f"the config file {path}"
    assert config.source("seed") == "the default"


def test_every_field_is_described_and_has_a_flag():
    for name, field in TrainConfig.model_fields.items():
        assert field.description, name
        assert flag(name) == "--" + name.replace("_", "-")


@pytest.mark.parametrize(
    "line, expected",
    [
        ("micro_bach = 2", ["micro_bach", "did you mean micro_batch?", "run.toml"]),
        ('precision = "bf61"', ["precision", "'bf61'", "'bf16' or 'fp32'", "did you mean bf16?", "run.toml"]),
        ("stage = 4", ["stage", "4", "0, 1, 2 or 3"]),
        ("steps = -1", ["steps", "-1", "0 or more"]),
        ("micro_batch = 0", ["micro_batch", "1 or more"]),
        ('steps = "many"', ["steps", "'many'", "whole number"]),
        ("steps = 2.5", ["steps", "2.5", "whole number"]),
        ("learning_rate = nan", ["learning_rate", "nan"]),
        ("learning_rate = 0", ["learning_rate", "more than 0"]),
        ('learning_rate = "fast"', ["learning_rate", "'fast'", "a number"]),
        ("eval_fraction = 1.0", ["eval_fraction", "less than 1"]),
        ("data = 3", ["data", "list of file names"]),
        ("[training]\nsteps = 1", ["[training]", "table", "flat"]),
        ("steps = ", ["not valid TOML"]),
        ("steps = 3\nepochs = 2", ["steps is 3", "epochs is 2", "give one"]),
    ],
)
def test_a_mistake_in_the_file_is_one_line_that_names_it(tmp_path, line, expected):
    with pytest.raises(InputError) as caught:
        load(toml(tmp_path, ("" if line.startswith("data") else 'data = ["d"]\n') + 'model = "m"\n' + line), {})
    message = str(caught.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_missing_fields_and_files_say_what_to_give(tmp_path):
    with pytest.raises(InputError, match="model is missing: give --model"):
        load(None, {"data": ["d"]})
    with pytest.raises(InputError, match="data is missing: give --data"):
        load(None, {"model": "m"})
    with pytest.raises(InputError, match="no-such.toml does not exist"):
        load("no-such.toml", {})


@pytest.mark.parametrize(
    "given, expected",
    [
        ({}, (1, 1, 4)),
        ({"micro_batch": 2}, (2, 1, 8)),
        ({"accumulation": 3}, (1, 3, 12)),
        ({"global_batch": 8}, (1, 2, 8)),
        ({"micro_batch": 2, "accumulation": 3}, (2, 3, 24)),
        ({"micro_batch": 2, "global_batch": 16}, (2, 2, 16)),
        ({"accumulation": 2, "global_batch": 24}, (3, 2, 24)),
        ({"micro_batch": 2, "accumulation": 2, "global_batch": 16}, (2, 2, 16)),
    ],
)
def test_K4_the_three_batch_sizes_follow_from_each_other(given, expected):
    config = derive_batch(load(None, {**BASE, "ranks": 4, **given}))
    assert (config.micro_batch, config.accumulation, config.global_batch) == expected
    config = derive_batch(load(None, {**BASE, "global_batch": 8, "micro_batch": 2}, {"WORLD_SIZE": "2"}))
    assert config.accumulation == 2


def test_K4_batch_sizes_that_disagree_are_all_listed_with_their_sources(tmp_path):
    path = toml(tmp_path, "accumulation = 4\n")
    message = refused(path, {"global_batch": "32", "micro_batch": "3"}, {"WORLD_SIZE": "2"})
    assert "global_batch 32 (the flag --global-batch)" in message
    assert "micro_batch 3 (the flag --micro-batch)" in message
    assert f"accumulation 4 (the config file {path})" in message
    assert "ranks 2 (the environment's WORLD_SIZE)" in message


def test_a_global_batch_that_the_ranks_do_not_divide_is_refused():
    message = refused(flags={"global_batch": 6, "ranks": 4})
    assert "global_batch 6" in message and "ranks 4 (the flag --ranks)" in message
    assert "accumulation" not in message.split("but ")[1]  # it was not given, so it is no part of the conflict
    assert "ranks 1 (the default)" in refused(flags={"global_batch": 5, "micro_batch": 2})


@pytest.mark.parametrize("field, value", [("checkpoint_every", 5), ("keep_last", 3), ("test_save", True), ("max_restarts", 1)])
def test_what_needs_a_folder_for_checkpoints_is_refused_without_one(field, value):
    message = refused(flags={field: value})
    assert message.startswith(f"{field} is {value} (the flag --") and message.endswith("give --checkpoints")
    assert getattr(load(None, {**BASE, field: value, "checkpoints": "runs/x"}), field) == value
    assert not load(None, {**BASE, field: 0}).checkpoints  # switched off is nothing that is missing


def test_ranks_must_be_those_of_the_job():
    assert load(None, BASE, {"WORLD_SIZE": "4"}).ranks == 4
    assert load(None, {**BASE, "ranks": "4"}, {"WORLD_SIZE": "4"}).ranks == 4
    assert "ranks is 2 (the flag --ranks)" in refused(flags={"ranks": "2"}, environ={"WORLD_SIZE": "4"})


def test_closest_is_silent_when_nothing_is_near():
    assert closest("xyzzy", ["stage", "steps"]) == ""
    assert closest("stag", ["stage", "steps"]) == "; did you mean stage?"
