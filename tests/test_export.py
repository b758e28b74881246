"""Whole weights written by `save_weights` from any stage, read by Hugging Face, peft and `load_weights`."""

from __future__ import annotations

import json
import logging
import resource
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, tiny_llama
from ranks import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import zerostage
from zerostage import EMA, Precision


def check_file(file: Path, report: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a file, which has nothing but them and a header."""
    state = load_file(file)
    size = sum(tensor.nbytes for tensor in state.values())
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert file.stat().st_size == 8 + header + size
    assert report == {"path": str(file), "tensors": len(state), "bytes": size}
    with safe_open(file, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    assert [path for path in file.parent.iterdir() if "partial" in path.name] == []
    return state


def train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(**batch(rank, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def export(rank: int, n: int, stage: int, folder: str, tie: bool, untie: bool = False) -> dict[str, Any]:
    """Train two steps and save as a Hugging Face folder. `untie`: by hand, before the model is sharded."""
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tie=tie)
    if untie:
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    train(rank, model, optimizer)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage()) if record.levelno == logging.INFO else None
    logger = logging.getLogger("zerostage")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = zerostage.save_weights(model, Path(folder) / "new" / "folder")
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)
    warned = [str(w.message) for w in caught if "tie_word_embeddings" in str(w.message)]
    result = {"report": report, "said": said, "warned": warned, "state": zerostage.full_state_dict(model)}
    with torch.no_grad():
        logits = model.eval()(batch(0, 9)["input_ids"]).logits
    if rank == 0 and not untie:
        model.config.save_pretrained(Path(folder) / "new" / "folder")
        read = AutoModelForCausalLM.from_pretrained(Path(folder) / "new" / "folder", dtype=torch.bfloat16).eval()
        assert read.lm_head.weight is read.model.embed_tokens.weight
        with torch.no_grad():
            assert torch.equal(read(batch(0, 9)["input_ids"]).logits, logits)
    return result


@pytest.mark.parametrize("stage", [0, 3])
def test_A4_tied_weights_are_written_once_and_hugging_face_reads_them(stage: int, tmp_path: Path) -> None:
    first, second = run(export, n=2, stage=stage, folder=str(tmp_path), tie=True)
    folder = tmp_path / "new" / "folder"
    assert first["report"] == second["report"] and not first["warned"] and not second["warned"]
    state = check_file(folder / "model.safetensors", first["report"])
    tiny_llama(tie=True, dtype=torch.bfloat16).save_pretrained(tmp_path / "reference")
    reference = load_file(tmp_path / "reference" / "model.safetensors")
    assert state.keys() == reference.keys() and "lm_head.weight" not in state
    assert all(value.dtype == torch.bfloat16 and torch.equal(value, first["state"][key]) for key, value in state.items())
    assert all(value.shape == reference[key].shape for key, value in state.items())
    size = first["report"]["bytes"]
    assert first["said"] == [f"wrote {len(state)} tensors, {size:,} bytes, to {folder}/model.safetensors"]
    assert second["said"] == []


def test_A4_weights_that_the_config_ties_and_the_model_does_not_are_both_kept(tmp_path: Path) -> None:
    first, second = run(export, n=2, stage=3, folder=str(tmp_path), tie=True, untie=True)
    state = check_file(tmp_path / "new" / "folder" / "model.safetensors", first["report"])
    assert not torch.equal(state["lm_head.weight"], state["model.embed_tokens.weight"])
    assert torch.equal(state["lm_head.weight"], first["state"]["lm_head.weight"])
    (message,) = first["warned"]
    for part in ("tie_word_embeddings=True", "'model.embed_tokens.weight'", "'lm_head.weight'", "both are written"):
        assert part in message and "\n" not in message
    assert second["warned"] == []  # once, by the rank that writes


def wrapped(tie: bool = True) -> nn.Module:
    outer = nn.Module()
    outer.a = nn.Module()
    outer.a.b = tiny_llama(tie=tie)
    outer.forward = lambda **inputs: outer.a.b(**inputs)
    return outer


def save_and_load(rank: int, n: int, folder: str, stage: int) -> dict[str, Any]:
    model = wrapped()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    train(rank, model, optimizer)
    file = Path(folder) / f"stage{stage}.safetensors"
    report = zerostage.save_weights(model, file)
    state = zerostage.full_state_dict(model, rank0_only=False)
    messages = []
    for other_stage in (0, 3):
        with torch.device("meta"):
            other = wrapped()
        zerostage.shard(other, stage=other_stage)
        zerostage.load_weights(other, file)
        loaded = zerostage.full_state_dict(other, rank0_only=False)
        assert loaded.keys() == state.keys() and all(torch.equal(loaded[key], value) for key, value in state.items())
        assert torch.equal(other(**batch(rank, 9)).logits, model(**batch(rank, 9)).logits)
        lacking = Path(folder) / f"lacking{stage}{other_stage}.safetensors"
        if rank == 0:
            tensors = load_file(file)
            del tensors["a.b.model.layers.1.mlp.up_proj.weight"]
            save_file(tensors, lacking)
        torch.distributed.barrier()
        with pytest.raises(KeyError) as caught:
            zerostage.load_weights(other, lacking)
        messages.append(str(caught.value))
    return {"report": report, "messages": messages}


def test_A5_tied_weights_under_a_prefix_are_saved_and_loaded_at_every_stage(tmp_path: Path) -> None:
    for stage in (0, 3):
        results = run(save_and_load, n=2, folder=str(tmp_path), stage=stage)
        state = check_file(tmp_path / f"stage{stage}.safetensors", results[0]["report"])
        assert "a.b.model.embed_tokens.weight" in state and "a.b.lm_head.weight" not in state
        for result in results:
            assert all("'a.b.model.layers.1.mlp.up_proj.weight' is not in the files" in m for m in result["messages"])


class Adapted(nn.Module):
    """Frozen layers with low-rank adapters beside them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.ModuleList(nn.Linear(9, 9) for _ in range(3)).requires_grad_(False)
        self.a = nn.ParameterList(nn.Parameter(torch.randn(2, 9)) for _ in range(3))
        self.b = nn.ParameterList(nn.Parameter(torch.randn(9, 2)) for _ in range(3))
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for base, a, b in zip(self.base, self.a, self.b):
            x = torch.tanh(base(x) + x @ a.t() @ b.t() * self.scale)
        return x


def adapters(rank: int, n: int, stage: int, folder: str) -> dict[str, Any]:
    model = Adapted()
    optimizer = torch.optim.AdamW([*model.a, *model.b], lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage)
    model(torch.randn(4, 9)).square().mean().backward()
    optimizer.step()
    model.b[2].requires_grad_(False)
    report = zerostage.save_weights(model, Path(folder) / "adapters.safetensors", trainable_only=True)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter of the model requires gradients"):
        zerostage.save_weights(model, Path(folder) / "nothing.safetensors", trainable_only=True)
    return {"report": report, "state": zerostage.full_state_dict(model)}


def test_B4_the_trainable_part_alone(tmp_path: Path) -> None:
    for stage in (0, 2, 3):
        result = run(adapters, n=2, stage=stage, folder=str(tmp_path))[0]
        state = check_file(tmp_path / "adapters.safetensors", result["report"])
        shapes = {f"a.{i}": (2, 9) for i in range(3)} | {f"b.{i}": (9, 2) for i in range(2)}
        assert {key: tuple(value.shape) for key, value in state.items()} == shapes
        assert all(torch.equal(value, result["state"][key]) for key, value in state.items())
        assert result["report"]["bytes"] == 4 * 5 * 18
        assert not (tmp_path / "nothing.safetensors").exists()


def with_peft(rank: int, n: int, stage: int, folder: str) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = get_peft_model(tiny_llama(), config)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage)
    train(rank, model, optimizer)
    trainable = sorted(name for name, p in model.named_parameters() if p.requires_grad)
    report = zerostage.save_weights(model, Path(folder) / "lora.safetensors", trainable_only=True)
    adapter, part = (
        get_peft_model_state_dict(model, state_dict=zerostage.full_state_dict(model, rank0_only=False, trainable_only=only))
        for only in (False, True)
    )
    assert part.keys() == adapter.keys() and all(torch.equal(part[key], value) for key, value in adapter.items())
    fresh = get_peft_model(tiny_llama(), config)
    set_peft_model_state_dict(fresh, adapter)
    equal = torch.equal(fresh(**batch(0, 9)).logits, model(**batch(0, 9)).logits)
    return {"report": report, "trainable": trainable, "adapter": adapter, "equal": equal}


def test_B4_peft_takes_its_adapters_from_the_whole_state(tmp_path: Path) -> None:
    for stage in (1, 3):
        results = run(with_peft, n=2, stage=stage, folder=str(tmp_path))
        state = check_file(tmp_path / "lora.safetensors", results[0]["report"])
        assert sorted(state) == results[0]["trainable"] and len(state) == 2 * 2 * 2
        assert all(result["equal"] for result in results)
        assert {key.replace(".default", "") for key in state} == results[0]["adapter"].keys()


class Mixed(nn.Module):
    """All kinds of dtypes and sizes, a module with buffers that is registered twice, odd layouts."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.half = nn.Linear(5, 3, dtype=torch.bfloat16)
        self.norm = nn.BatchNorm1d(3)
        self.again = self.norm
        self.packed = nn.Parameter(torch.arange(10, dtype=torch.uint8), requires_grad=False)
        self.empty, self.scalar = nn.Parameter(torch.empty(3, 0)), nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.kernel = nn.Parameter(torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1))
        self.register_buffer("nothing", torch.empty(2, 0))
        self.register_buffer("turned", torch.arange(6.0).view(2, 3).t())
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("secret", torch.ones(2), persistent=False)


def mixed(rank: int, n: int, stage: int, folder: str) -> dict[str, Any]:
    model = Mixed()
    with torch.no_grad():
        model.norm(torch.randn(4, 3))  # rank 0's statistics count
    zerostage.shard(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]), stage=stage)
    state = {name: tensor.clone() for name, tensor in zerostage.full_state_dict(model, rank0_only=False).items()}
    report = zerostage.save_weights(model, folder)
    other = Mixed(seed=1)
    with torch.no_grad():
        other.norm(torch.randn(4, 3))
    zerostage.shard(other, stage=3 - stage)
    zerostage.load_weights(other, folder)
    found = zerostage.full_state_dict(other, rank0_only=False)
    assert found.keys() == state.keys() and all(torch.equal(found[key], value) for key, value in state.items())
    return {"state": state, "report": report}


def test_J4_dtypes_buffers_and_odd_layouts_come_back_as_they_were(tmp_path: Path) -> None:
    plain = Mixed()
    for stage in (0, 3):
        result = run(mixed, n=2, stage=stage, folder=str(tmp_path))[0]
        assert result["state"].keys() == plain.state_dict().keys()
        state = check_file(tmp_path / "model.safetensors", result["report"])
        assert state.keys() == plain.state_dict().keys() - {"again.weight", "again.bias"}
        for key, value in state.items():
            expected = plain.state_dict()[key]
            assert value.dtype == expected.dtype and value.shape == expected.shape and value.is_contiguous(), key
            if "running" not in key and "tracked" not in key:
                assert torch.equal(value, expected), key
        assert state["norm.num_batches_tracked"] == 1


def average(rank: int, n: int, stage: int, folder: str) -> dict[str, Any]:
    model = tiny_llama(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage)
    ema = EMA(model, decay=0.5)
    train(rank, model, optimizer)
    ema.update()
    with ema.applied():
        report = zerostage.save_weights(model, folder)
        state = zerostage.full_state_dict(model)
    return {"report": report, "state": state, "own": zerostage.full_state_dict(model)}


def test_X1_the_average_is_exported(tmp_path: Path) -> None:
    result = run(average, n=3, stage=3, folder=str(tmp_path))[0]
    state = check_file(tmp_path / "model.safetensors", result["report"])
    assert state.keys() == result["state"].keys()
    for key, value in state.items():
        assert value.dtype == torch.bfloat16 and torch.equal(value, result["state"][key])
    assert not torch.equal(state["lm_head.weight"], result["own"]["lm_head.weight"])


def failing(rank: int, n: int, folder: str) -> list[str]:
    model = tiny_llama()
    zerostage.shard(model, stage=3)
    messages = []

    def refused(path: Path) -> None:
        with pytest.raises(OSError) as caught:
            zerostage.save_weights(model, path)
        messages.append(str(caught.value))

    refused(Path(folder) / "file" / "deeper")
    refused(Path(folder) / "taken.safetensors")
    if rank == 0:  # the disk is full after 20 kB: only the rank that writes finds out
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    refused(Path(folder))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    zerostage.save_weights(model, Path(folder) / "after.safetensors")
    return messages


def test_what_goes_wrong_while_writing_is_told_to_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "taken.safetensors").mkdir()
    old = tiny_llama(seed=1).state_dict()
    save_file(old, tmp_path / "model.safetensors")
    first, second = run(failing, n=2, folder=str(tmp_path), timeout=30)
    assert first == second
    for message, part in zip(first, ("file/deeper", "taken.safetensors", "model.safetensors")):
        assert message.startswith("save_weights: rank 0 could not write ") and part in message and "\n" not in message
    assert "File too large" in first[2]
    kept = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(kept[key], value) for key, value in old.items())  # the file of before is whole
    assert [path for path in tmp_path.rglob("*partial*")] == []
    assert load_file(tmp_path / "after.safetensors").keys() == old.keys()


def overwrite(rank: int, n: int, folder: str) -> list[bool]:
    model = tiny_llama(seed=2)
    zerostage.shard(model, stage=3)
    zerostage.save_weights(model, folder)
    other = tiny_llama()
    zerostage.shard(other, stage=3)
    zerostage.load_weights(other, folder)
    states = [zerostage.full_state_dict(m, rank0_only=False) for m in (model, other)]
    return [torch.equal(value, states[1][key]) for key, value in states[0].items()]


def test_older_files_in_the_folder_are_not_read_for_the_new_one(tmp_path: Path) -> None:
    tiny_llama(seed=1).save_pretrained(tmp_path, max_shard_size="20kB")
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > 1
    for equal in run(overwrite, n=2, folder=str(tmp_path)):
        assert all(equal)


def test_only_a_sharded_model_is_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="call zerostage.shard"):
        zerostage.save_weights(tiny_llama(), tmp_path)


FAMILIES = ["gpt2", "t5", "bert", "gemma"]


def families(rank: int, n: int, folder: str) -> None:
    from test_huggingface import build

    for name in FAMILIES:
        model = build(name)
        zerostage.shard(model, stage=3)
        zerostage.save_weights(model, Path(folder) / name)


def test_A4_the_keys_are_those_of_hugging_face_for_other_families_with_ties(tmp_path: Path) -> None:
    from test_huggingface import build

    run(families, n=2, folder=str(tmp_path))
    for name in FAMILIES:
        model = build(name)
        model.save_pretrained(tmp_path / "reference" / name)
        reference = load_file(tmp_path / "reference" / name / "model.safetensors")
        state = load_file(tmp_path / name / "model.safetensors")
        assert len(reference) < len(model.state_dict())
        assert state.keys() == reference.keys(), name
        assert all(torch.equal(state[key], value) for key, value in reference.items()), name
