"""How models fall into units."""

from __future__ import annotations

import pytest
import torch
from models import mlp, tiny_llama
from torch import nn

from zerostage.division import divide


def names(model: nn.Module, units: list | None = None) -> dict[str, list[str]]:
    divisions = divide(model, units)
    parameters = [parameter for division in divisions for parameter in division.parameters]
    assert len(parameters) == len(set(parameters)) == len(list(model.parameters()))
    assert all(division.modules for division in divisions)
    return {division.name: [n[0] for n in division.names] for division in divisions}


def test_blocks_embedding_and_head_are_units_and_the_rest_is_the_root_s() -> None:
    units = names(tiny_llama(layers=3, vocab=512))
    assert list(units) == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.layers.2", "root", "lm_head"]
    assert units["root"] == ["model.norm.weight"] and units["lm_head"] == ["lm_head.weight"]
    assert len(units["model.layers.1"]) == 9


def test_A2_tied_weights_are_one_parameter_with_both_its_users() -> None:
    model = tiny_llama(layers=2, vocab=512, tie=True)
    shared = next(d for d in divide(model) if d.name.endswith("(shared)"))
    assert shared.names == [("model.embed_tokens.weight", "lm_head.weight")] and shared.resident
    assert shared.modules == [model.model.embed_tokens, model.lm_head]


def test_small_embeddings_join_the_root() -> None:
    assert "model.embed_tokens.weight" in names(tiny_llama(layers=4, vocab=16))["root"]


def test_a_parameter_shared_between_blocks_is_a_unit_with_all_its_users() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[3].weight = model[0].weight
    by_name = {d.name: d for d in divide(model)}
    assert by_name["0 (shared)"].names == [("0.weight", "3.weight")]
    assert by_name["0 (shared)"].modules == [model[0], model[3]]
    assert by_name["3"].names == [("3.bias",)]


def test_a_model_without_repeated_layers() -> None:
    assert set(names(mlp(8, 16, 4))) == {"0", "2"}  # two large layers
    assert set(names(nn.Linear(3, 3))) == {"root"}


def test_inner_lists_do_not_split_their_block() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(expert(x) for expert in self.experts)

    model = nn.Module()
    model.layers = nn.ModuleList(Block() for _ in range(2))
    assert list(names(model)) == ["layers.0", "layers.1"]


def test_the_parts_of_blocks_that_have_no_forward_are_units() -> None:
    model = nn.Module()
    model.layers = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4), nn.Tanh(), mlp(4, 8, 4)]) for _ in range(2))
    assert list(names(model)) == ["layers.0.0", "layers.0.2", "layers.1.0", "layers.1.2"]


def test_chosen_units() -> None:
    model = tiny_llama(layers=2)
    assert set(names(model, ["model.layers.0", model.lm_head])) == {"model.layers.0", "lm_head", "root"}
    assert set(names(model, [type(model.model.layers[0])])) == {"model.layers.0", "model.layers.1", "root"}
    nested = names(model, ["model.layers.0", "model.layers.0.mlp"])
    assert len(nested["model.layers.0.mlp"]) == 3 and len(nested["model.layers.0"]) == 6
    assert set(names(model, [])) == {"root"}
    for wrong in ("model.layer.0", nn.Conv1d, nn.Linear(2, 2)):
        with pytest.raises(ValueError, match="the model has no module"):
            divide(model, [wrong])


def test_a_module_registered_twice_has_all_its_names() -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 2)
    model.b = model.a
    (division,) = divide(model)
    assert ("a.weight", "b.weight") in division.names
