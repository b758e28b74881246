"""A model built on the meta device takes its weights from safetensors, each rank its own slices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models import batch, tiny_llama
from ranks import run
from safetensors.torch import load_file, save_file

import zerostage
from zerostage import Precision


def on_meta(tie: bool = False) -> torch.nn.Module:
    with torch.device("meta"):
        return tiny_llama(tie=tie)


def load_and_step(rank: int, n: int, folder: str, stage: int, tie: bool = False) -> dict:
    model = on_meta(tie)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    try:
        model(**batch(rank, 0))
        raise AssertionError("a forward without values must be refused")
    except RuntimeError as error:
        refusal = str(error)
    zerostage.load_weights(model, folder)
    loaded = zerostage.full_state_dict(model, rank0_only=False)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model(**batch(rank, 0)).loss.backward()
    optimizer.step()
    return {
        "refusal": refusal,
        "loaded": loaded,
        "buffers": buffers,
        "stepped": zerostage.full_state_dict(model, rank0_only=False),
        "held": zerostage.memory(model, optimizer).measured["weights"],
    }


def compare_with_memory(rank: int, n: int, stage: int) -> dict:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    model(**batch(rank, 0)).loss.backward()
    optimizer.step()
    return zerostage.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("stage", [0, 3])
def test_meta_model_loads_its_slices(tmp_path: Path, stage: int) -> None:
    source = tiny_llama()
    source.save_pretrained(tmp_path, max_shard_size="20kB")  # several files and an index
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    results = run(load_and_step, n=3, folder=str(tmp_path), stage=stage)
    stepped = run(compare_with_memory, n=3, stage=stage)
    for result in results:
        assert "load_weights" in result["refusal"]
        for name, value in source.state_dict().items():
            assert torch.equal(result["loaded"][name], value.bfloat16()), name
        for name, value in source.named_buffers():
            assert torch.equal(result["buffers"][name], value), name
        for name, value in stepped[0].items():  # the masters took the file's fp32 values, not rounded ones
            assert torch.equal(result["stepped"][name], value), name


def test_tied_weights_load_from_one_name(tmp_path: Path) -> None:
    source = tiny_llama(tie=True)
    source.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    for result in run(load_and_step, n=2, folder=str(tmp_path), stage=3, tie=True):
        assert torch.equal(result["loaded"]["lm_head.weight"], source.lm_head.weight.bfloat16())


def load_and_tie(rank: int, n: int, folder: str) -> list[dict]:
    found = []
    for stage in (0, 3):
        model = on_meta(tie=True)
        zerostage.shard(model, stage=stage)
        zerostage.load_weights(model, folder)
        found.append(zerostage.full_state_dict(model, rank0_only=False))
    return found


def test_A6_tied_in_the_config_and_twice_the_same_in_the_file(tmp_path: Path) -> None:
    source = tiny_llama()
    source.lm_head.weight.data.copy_(source.model.embed_tokens.weight.data)
    save_file(dict(source.state_dict()), tmp_path / "model.safetensors")
    for by_stage in run(load_and_tie, n=2, folder=str(tmp_path)):
        for state in by_stage:
            assert all(torch.equal(state[name], value) for name, value in source.state_dict().items())


class Few(torch.nn.Module):
    """Three elements, in two parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (torch.nn.Parameter(torch.randn(size)) for size in (1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x + self.one) * self.two.sum()).square().mean()


def few(rank: int, n: int, folder: str) -> list[dict]:
    found = []
    for stage in range(4):
        with torch.device("meta"):
            model = Few()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        zerostage.shard(model, optimizer, stage=stage)
        zerostage.load_weights(model, folder)
        model(torch.full((3,), rank + 1.0)).backward()
        norm = zerostage.clip_grad_norm_(model, 0.5)
        optimizer.step()
        found.append(zerostage.full_state_dict(model, rank0_only=False) | {"norm": norm})
        zerostage.close(model)
    return found


def test_L3_fewer_elements_than_ranks_on_the_meta_device(tmp_path: Path) -> None:
    plain = Few()
    save_file(dict(plain.state_dict()), tmp_path / "model.safetensors")
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    torch.stack([plain(torch.full((3,), rank + 1.0)) for rank in range(4)]).mean().backward()
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    assert norm > 0.5
    for by_stage in run(few, n=4, folder=str(tmp_path)):
        for state in by_stage:
            # 1e-6: the mean over ranks is summed in another order
            torch.testing.assert_close(state, dict(plain.state_dict()) | {"norm": norm}, rtol=1e-6, atol=1e-6)


def load_failing(rank: int, n: int, folder: str, tie: bool = False, stage: int = 3) -> str:
    model = on_meta(tie)
    zerostage.shard(model, stage=stage)
    with pytest.raises((KeyError, ValueError, FileNotFoundError)) as caught:
        zerostage.load_weights(model, folder)
    return str(caught.value)


def test_a_missing_weight_is_named(tmp_path: Path) -> None:
    state = dict(tiny_llama().state_dict())
    state["model.layers.1.mlp.up_proj.weights"] = state.pop("model.layers.1.mlp.up_proj.weight")
    save_file(state, tmp_path / "model.safetensors")
    for message in run(load_failing, n=2, folder=str(tmp_path)):
        assert "'model.layers.1.mlp.up_proj.weight' is not in the files" in message
        assert "closest name there is 'model.layers.1.mlp.up_proj.weights'" in message


def test_another_shape_is_named(tmp_path: Path) -> None:
    state = dict(tiny_llama().state_dict()) | {"model.norm.weight": torch.ones(31)}
    save_file(state, tmp_path / "model.safetensors")
    for message in run(load_failing, n=2, folder=str(tmp_path)):
        assert "'model.norm.weight' has shape (31,) in the files, (32,) in the model" in message


def test_A6_tied_in_the_config_and_different_in_the_file(tmp_path: Path) -> None:
    state = dict(tiny_llama().state_dict())
    save_file(state, tmp_path / "model.safetensors")
    for stage in (0, 3):
        for message in run(load_failing, n=2, folder=str(tmp_path), tie=True, stage=stage):
            assert "model.embed_tokens.weight" in message and "lm_head.weight" in message and "different values" in message


def test_an_empty_folder(tmp_path: Path) -> None:
    for message in run(load_failing, n=2, folder=str(tmp_path)):
        assert "has no .safetensors file" in message
