"""Checkpoints of DeepSpeed's engines are read bit for bit, and a run that moves here goes on as it would have there."""

from __future__ import annotations

import functools
import math
import shutil

import pytest
import torch
from deepspeed_checkpoints import CASES, RAN, READ, STATES, UNIVERSAL, Model, engines, optimizer_of
from models import features
from ranks import run
from torch import nn

import zerostage
from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.deepspeed import DeepSpeedSource, recognises
from zerostage.checkpoint.source import Piece


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder with DeepSpeed's checkpoints, and what its engines had."""
    folder = tmp_path_factory.mktemp("deepspeed")
    return folder, run(engines, n=2, folder=str(folder), keep=False, timeout=120)[0]


def value(source, term, name, parts=1):
    """The term of one parameter, read in some parts."""
    shape = source.parameters[name].shape
    numel = math.prod(shape)
    out = torch.full((numel,), torch.nan, dtype=source.parameters[name].terms[term])
    ends = [numel * part // parts for part in range(parts + 1)]
    source.read(term, [Piece(name, a, b, out[a:b]) for a, b in zip(ends, ends[1:])])
    return out.view(shape)


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("name", READ + [f"{name} universal" for name in UNIVERSAL])
def test_all_is_read_bit_for_bit(saved, name):
    folder, seen = saved
    case = name.removesuffix(" universal")
    universal = case != name
    path = folder / case
    found = seen[case]
    precision, zero = CASES[case]
    # With it the engine gives values of another parameter than was asked for: the same run without it is the reference.
    values = seen["stage 2"] if case == "round robin" else found
    assert recognises(path) and recognises(path / "global_step3")
    source = DeepSpeedSource(path / "global_step3_universal" if universal else path)
    kind = "universal DeepSpeed" if universal else "DeepSpeed"
    assert source.what.startswith(f"a {kind} checkpoint of 2 ranks at stage {zero['stage']} (global_step3")

    reference = Model()
    assert source.names == [name for name, _ in reference.named_parameters()]
    assert source.parameters.keys() - set(source.names) == {"again.weight"}
    assert source.parameters["again.weight"] is source.parameters["middle.weight"]
    low = torch.bfloat16 if precision else torch.float32
    for parameter, shape in found["shapes"].items():
        stored = source.parameters[parameter]
        assert stored.shape == shape and stored.trainable and stored.source == low and stored.states == list(STATES)
        assert ("weights" in stored.terms) == (bool(precision) and zero["stage"] < 3)
        for term in ("master", *STATES):
            for parts in (1, 2, 5):
                assert equal(value(source, term, parameter, parts), values[term][parameter]), (term, parameter)
        if "weights" in stored.terms:
            assert equal(value(source, "weights", parameter), values["master"][parameter].bfloat16())
        assert equal(stored.scalars["step"], torch.tensor(3.0)) and len(stored.scalars) == 1
    for parameter in {*found["shapes"], "again.weight"} if "script" in found else ():
        assert equal(value(source, "master", parameter, 3), found["script"][parameter])
    assert equal(value(source, "master", "again.weight"), values["master"]["middle.weight"])
    fixed = source.parameters["fixed.weight"]
    assert fixed.terms == {"weights": low} and not fixed.trainable and not fixed.scalars
    assert equal(value(source, "weights", "fixed.weight", 4), reference.fixed.weight.detach().to(low))
    assert equal(source.buffers()["scale"], reference.scale) and equal(source.buffers()["count"], reference.count)
    assert source.extra() == {"seen": {"by": [1, 2]}, "global_steps": 3, "global_samples": 6, "skipped_steps": 0}
    assert RAN == []
    if case == "fp32 elastic":  # DeepSpeed stores no groups then
        assert source.groups is None and source.optimizer == ""
        return
    assert source.optimizer == "AdamW"
    matrices, vectors = source.groups
    assert (matrices["weight_decay"], vectors["weight_decay"], matrices["lr"], vectors["lr"]) == (0.1, 0.0, 1e-2, 3e-3)
    assert sorted(matrices["names"]) == ["first.weight", "last.weight", "middle.weight"] and "params" not in matrices
    assert sorted(vectors["names"]) == ["again.bias", "first.bias", "last.bias", "middle.bias"]


def go_on(rank, n, folder, cases):
    """The weights as loaded from each of the checkpoints at some stage, and after three more steps."""
    found = {}
    for name, stage in cases:
        model = Model()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = optimizer_of(model)
        zerostage.shard(model, optimizer, stage=stage)
        extra = zerostage.load(f"{folder}/{name}", model, optimizer)
        assert extra["global_steps"] == 3 and [group["lr"] for group in optimizer.param_groups] == [1e-2, 3e-3]
        loaded = zerostage.full_state_dict(model, rank0_only=False)
        for number in range(3, 6):
            x, y = features(rank, number, inputs=7, outputs=5)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[name, stage] = loaded, zerostage.full_state_dict(model, rank0_only=False)
        zerostage.close(model)
    return found


def test_a_run_moves_here_and_goes_on(saved):
    folder, seen = saved
    cases = [(name, 3) for name in (*READ, "stage 3/global_step3_universal")] + [("fp32 stage 2", 2), ("fp32 stage 3", 1)]
    for found in run(go_on, n=2, folder=str(folder), cases=cases):
        for (name, _), (loaded, after) in found.items():
            case = name.split("/")[0]
            masters = seen["stage 2" if case == "round robin" else case]["master"]
            for parameter, master in masters.items():
                assert equal(loaded[parameter], master), (name, parameter)
            assert equal(loaded["again.weight"], masters["middle.weight"])
            low = torch.bfloat16 if CASES[case][0] else torch.float32
            assert equal(loaded["fixed.weight"], Model().fixed.weight.detach().to(low).float())
            for parameter, value in seen[case].get("on", {}).items():
                # Not bit for bit: what lies at the end of a rank's partition is computed without vectors there.
                torch.testing.assert_close(after[parameter], value, rtol=0, atol=1e-7)
                assert (after[parameter] - masters[parameter]).abs().max() > 1e-3


# -- What is not read ------------------------------------------------------------------------


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of a case's checkpoint: its own folder."""

    def make(name):
        shutil.copytree(saved[0] / name, tmp_path / "run", dirs_exist_ok=True)
        return tmp_path / "run" / "global_step3"

    return make


@pytest.mark.parametrize(
    "case, file",
    [
        ("stage 1", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        ("stage 1", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"),
        ("stage 2", "mp_rank_00_model_states.pt"),
        ("stage 3", "zero_pp_rank_1_mp_rank_00_model_states.pt"),
        ("fp32 stage 3", "zero_pp_rank_1_mp_rank_00_optim_states.pt"),
    ],
)
def test_a_missing_or_truncated_file_is_named(copy, case, file):
    path = copy(case) / file
    content = path.read_bytes()
    path.write_bytes(content[:-8])
    with pytest.raises(DamagedError, match=f"{file} is truncated, altered"):
        DeepSpeedSource(path.parent)
    path.unlink()
    with pytest.raises(DamagedError, match=f"{file} is missing"):
        DeepSpeedSource(path.parent)


def test_a_missing_file_of_a_universal_checkpoint_is_named(copy):
    path = copy("stage 3").with_name("global_step3_universal")
    for file in ("zero/middle.bias/exp_avg.pt", "zero/middle.weight/fp32.pt"):
        (path / file).unlink()
        with pytest.raises(DamagedError, match=f"{file} is missing"):
            DeepSpeedSource(path)


def test_a_universal_checkpoint_that_is_mixed_up_is_refused(saved):
    """DeepSpeed's conversion takes no account of round_robin_gradients: it gives parameters the values of others."""
    with pytest.raises(ValueError, match="the values of other parameters .*round_robin_gradients: give the folder"):
        DeepSpeedSource(saved[0] / "round robin/global_step3_universal")


def test_files_of_two_runs_are_refused(saved, copy):
    path = copy("stage 1")
    shutil.copy(saved[0] / "stage 3/global_step3" / (name := "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"), path)
    with pytest.raises(ValueError, match=f"{name} is of another run than bf16_zero_pp_rank_0"):
        DeepSpeedSource(path)
    shutil.copy(path / name, path / name.removeprefix("bf16_"))
    with pytest.raises(ValueError, match="has the files of two runs"):
        DeepSpeedSource(path)


@pytest.mark.parametrize(
    "file, what",
    [
        ("mp_rank_01_model_states.pt", "tensor-parallel"),
        ("bf16_zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor-parallel"),
        ("layer_00-model_00-model_states.pt", "pipeline-parallel"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixture-of-experts"),
    ],
)
def test_other_kinds_are_refused_by_name(copy, file, what):
    path = copy("stage 1")
    (path / file).touch()
    with pytest.raises(ValueError, match=f"is a {what} checkpoint \\(it has {file}\\)"):
        DeepSpeedSource(path)


def test_stage_0_and_what_is_none(saved, copy, tmp_path):
    with pytest.raises(ValueError, match="global_step3 is a checkpoint without ZeRO \\(stage 0\\)"):
        DeepSpeedSource(saved[0] / "fp32 stage 0")
    assert not recognises(tmp_path / "nothing") and not recognises(tmp_path)
    (tmp_path / "latest").write_text("step 3")  # another program's
    assert not recognises(tmp_path)
    with pytest.raises(ValueError, match="is no DeepSpeed checkpoint"):
        DeepSpeedSource(tmp_path)
    path = copy("stage 1")
    path.rename(path.with_name("elsewhere"))
    assert recognises(path.parent)
    with pytest.raises(FileNotFoundError, match="names global_step3 as its latest checkpoint, which is missing"):
        DeepSpeedSource(path.parent)


# -- Forms that do not come from a CPU of two ranks ------------------------------------------


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("mode, kind", [(True, "AdamW"), (False, "Adam")])
def test_fused_adam_on_three_ranks(tmp_path, zipped, mode, kind):
    """A step that the group has, padding within a group, a rank with padding alone, and torch's older form of file."""
    shapes = {"a": (3,), "b": (2, 2), "c": (1,)}
    numels, paddings = [3, 4, 1], [1, 0, 0]
    flat = torch.arange(1.0, 13.0)  # a at 0 to 3, b at 4 to 8, c at 8: nine elements, in partitions of six
    save = functools.partial(torch.save, _use_new_zipfile_serialization=zipped)
    for rank in range(3):
        lean = flat[:9][6 * rank : 6 * rank + 6].clone()
        whole = torch.cat([lean, torch.zeros(6 - lean.numel())])
        state = {"exp_avg": -whole, "exp_avg_sq": whole**2}
        group = {"lr": 1e-3, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        base = {"state": {0: state}, "param_groups": [{**group, "step": 7, "params": [0]}]}
        held = {
            "base_optimizer_state": base, "single_partition_of_fp32_groups": [lean], "group_paddings": [6 - lean.numel()],
            "param_alignment_paddings": [paddings], "partition_count": [3], "zero_stage": 2,
        }  # fmt: skip
        save({"optimizer_state_dict": held}, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": mode}}
    module = {name: torch.zeros(shape, dtype=torch.float16) for name, shape in shapes.items()}
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": [sizes], "ds_config": {"optimizer": optimizer}}
    save(model, tmp_path / "mp_rank_00_model_states.pt")
    source = DeepSpeedSource(tmp_path)
    assert source.optimizer == kind and source.groups == [{**group, "names": ["a", "b", "c"]}]
    start = 0
    for (name, shape), numel, padding in zip(shapes.items(), numels, paddings):
        expected = flat[start : start + numel].view(shape)
        for parts in (1, numel):
            assert equal(value(source, "master", name, parts), expected)
            assert equal(value(source, "exp_avg", name, parts), -expected)
            assert equal(value(source, "exp_avg_sq", name, parts), expected**2)
        assert equal(source.parameters[name].scalars["step"], torch.tensor(7.0))
        assert source.parameters[name].source == torch.float16 and source.parameters[name].terms["weights"] == torch.float16
        start += numel + padding
    with pytest.raises(ValueError, match="'a' has 3 elements"):
        source.read("master", [Piece("a", 0, 4, torch.empty(4))])
    with pytest.raises(KeyError, match="has no momentum of 'a'"):
        source.read("momentum", [Piece("a", 0, 1, torch.empty(1))])
