"""Checkpoints of torch.distributed.checkpoint are read bit for bit, and an FSDP2 run goes on here as it would have there."""

from __future__ import annotations

import functools
import logging
import math
import pickle
import random
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from models import features
from ranks import run
from torch import nn

import zerostage
from zerostage.checkpoint import rectangle
from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.dcp import DCPSource, recognises
from zerostage.checkpoint.source import Piece

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

STATES = ("exp_avg", "exp_avg_sq")
RAN: list[str] = []


class Code:
    """A class that is not to be made from a file."""

    def __reduce__(self):
        return RAN.append, ("run",)


class Model(nn.Module):
    """Odd sizes, a tie, a parameter of one element and one of three dimensions, a frozen one, buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle = nn.Linear(8, 13), nn.Linear(13, 13)
        self.again, self.last = nn.Linear(13, 13), nn.Linear(13, 4)
        self.again.weight = self.middle.weight
        self.one = nn.Parameter(torch.randn(1))
        self.cube = nn.Parameter(torch.randn(5, 3, 4))
        self.fixed = nn.Parameter(torch.randn(7), requires_grad=False)
        self.register_buffer("mean", torch.randn(3, 3))
        self.register_buffer("count", torch.tensor(3))

    def forward(self, x):
        x = torch.tanh(self.again(torch.tanh(self.middle(torch.tanh(self.first(x))))))
        return self.last(x) * self.one + self.cube.sum(dim=(0, 1)) + self.fixed.sum() + self.mean.sum()


def optimizer_of(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0, "lr": 3e-3},
    ]
    # The fused kernel rounds the last elements of a tensor, and so of a shard, otherwise than the others.
    return torch.optim.AdamW(groups, lr=1e-2, fused=False)


def train(model, optimizer, rank, steps):
    for step in steps:
        x, y = features(rank, step)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(value):
    value = value.detach()
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def fsdp(rank, n, path, kind):
    """Train two steps and save; returns all that was in training, whole, the groups, and the weights two steps later."""
    from torch.distributed.checkpoint import state_dict as sd
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    model = Model()
    frozen = {model.fixed}
    shape, names = ((2, 2), ("replicate", "shard")) if kind == "hybrid" else ((n,), ("shard",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    place = (lambda p: Shard(1) if p.dim() > 1 and p.shape[1] % n == 0 else None) if kind == "dim 1" else None
    fully_shard(model.first, mesh=mesh, shard_placement_fn=place)
    fully_shard(model, mesh=mesh, shard_placement_fn=place, ignored_params=frozen if kind == "dim 1" else None)
    optimizer = optimizer_of(model)
    train(model, optimizer, rank, range(2))
    for name, parameter in model.named_parameters():
        if parameter in optimizer.state:
            optimizer.state[parameter]["step"] += {"one": 5, "cube": 9}.get(name, 0)
    weights, states = sd.get_state_dict(model, optimizer)
    flat = sd.get_optimizer_state_dict(model, optimizer, options=sd.StateDictOptions(flatten_optimizer_state_dict=True))
    seen = {"step": torch.tensor(7), "epochs": [1, 2], "rng": torch.arange(5, dtype=torch.uint8), "by": {"a": (1, 2)}}
    forms = {"nested": {"model": weights, "optimizer": states, "train_state": seen, "best": 0.5}}
    if kind == "dim 0" and n == 3:
        averaged = {name: value * 2 for name, value in weights.items() if value.is_floating_point()}
        forms |= {
            "recipe": {"app": {"model": weights, "optim": flat}, "ema": averaged},
            "titan": {**weights, "optimizer": flat, "train_state": {"step": torch.tensor(7)}, "dataloader": {"rank_0": b"bytes"}},
            "plain": weights,
            "weights": {"model": weights, "ema": averaged},
            "numbers": {"net": weights, "optim": optimizer.state_dict()},
            "two": {"net": weights, "ema": averaged},
        }
    for name, state in forms.items():
        dcp.save(state, checkpoint_id=f"{path}/{name}")
    found = {("weights", name): whole(value) for name, value in weights.items()}
    for name, terms in states["state"].items():
        found |= {(term, name): whole(value) for term, value in terms.items()}
    train(model, optimizer, rank, range(2, 4))
    later = {name: whole(value) for name, value in model.state_dict().items()}
    return found, [{**group, "names": group["params"]} for group in states["param_groups"]], later


CASES = {"two": (2, "dim 0"), "three": (3, "dim 0"), "columns": (2, "dim 1"), "hybrid": (4, "hybrid")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dcp")


@pytest.fixture(scope="module")
def saved(folder):
    """By case what was in training: {(term, name): tensor}, groups, weights two steps later."""
    return functools.cache(lambda case: run(fsdp, n=CASES[case][0], path=str(folder / case), kind=CASES[case][1])[0])


def read(source, term, name, start=0, stop=None, dtype=None):
    stored = source.parameters[name]
    stop = math.prod(stored.shape) if stop is None else stop
    out = torch.full((stop - start,), 77, dtype=dtype or stored.terms[term])
    source.read(term, [Piece(name, start, stop, out)])
    return out


def same(a, b):
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and a.flatten().view(torch.uint8).equal(b.flatten().view(torch.uint8))


def wrong(source, found):
    """What is not as it was in training, whole and by parts."""
    generator, missed = random.Random(0), []
    pieces = {}
    for (term, name), expected in found.items():
        if term == "step":
            missed += [] if same(source.parameters[name].scalars["step"], expected) else [f"step of {name}"]
            continue
        if source.parameters[name].shape != tuple(expected.shape) or source.parameters[name].terms[term] != expected.dtype:
            missed.append(f"shape or dtype of {term} of {name}")
            continue
        if not same(read(source, term, name).view(expected.shape), expected):
            missed.append(f"{term} of {name}")
        flat = expected.flatten()
        for _ in range(6):
            start, stop = sorted(generator.randint(0, flat.numel()) for _ in range(2))
            pieces.setdefault(term, []).append((Piece(name, start, stop, torch.empty_like(flat[start:stop])), flat[start:stop]))
    for term, all_of_it in pieces.items():
        source.read(term, [piece for piece, _ in all_of_it])
        missed += [f"{term} of {p.name} [{p.start}, {p.stop})" for p, expected in all_of_it if not same(p.out, expected)]
    return missed


@pytest.mark.parametrize("case", CASES)
def test_fsdp2_checkpoint_is_read_bit_for_bit(case, folder, saved):
    found, groups, _ = saved(case)
    path = folder / case / "nested"
    assert recognises(path) and not recognises(folder)
    source = DCPSource(path)
    assert not wrong(source, found)
    assert {name for term, name in found if term == "weights"} == set(source.parameters) == set(source.names)
    assert source.names == [name for term, name in found if term == "weights"]
    assert source.optimizer == "" and str(CASES[case][0]) in source.what
    for stored, group in zip(source.groups, groups, strict=True):
        assert stored == {key: value for key, value in group.items() if key != "params"}
    cube, fixed = source.parameters["cube"], source.parameters["fixed"]
    assert cube.states == list(STATES) and cube.trainable and cube.scalars["step"] == 11
    assert fixed.states == [] and fixed.scalars == {} and not fixed.trainable
    buffers = source.buffers()
    assert all(same(buffers[name], found["weights", name]) for name in ("mean", "count"))
    extra = source.extra()
    assert extra.keys() == {"train_state", "best"} and extra["best"] == 0.5
    seen = extra["train_state"]
    assert seen["step"] == 7 and seen["epochs"] == [1, 2] and seen["by"] == {"a": (1, 2)} and seen["rng"].equal(torch.arange(5))


def test_every_form_of_state_dict(folder, saved, caplog):
    found, groups, _ = saved("three")
    path = folder / "three"
    for form in ("recipe", "titan"):
        source = DCPSource(path / form)
        assert not wrong(source, found), form
        # Of two groups with the same hyperparameters flattening leaves one; here they differ.
        assert {frozenset(group["names"]) for group in source.groups} == {frozenset(group["names"]) for group in groups}
        lr = {name: group["lr"] for group in source.groups for name in group["names"]}
        assert lr["one"] == 3e-3 and lr["cube"] == 1e-2
    assert source.extra() == {"train_state": {"step": torch.tensor(7)}, "dataloader": {"rank_0": b"bytes"}}
    assert DCPSource(path / "recipe").extra().keys() == {"ema"}
    weights = {key: value for key, value in found.items() if key[0] == "weights"}
    for form, model in (("plain", None), ("weights", None), ("two", "net")):
        source = DCPSource(path / form, model=model)
        assert not wrong(source, weights) and source.optimizer is None and source.groups is None
        assert all(stored.trainable and not stored.states for stored in source.parameters.values())
    average = DCPSource(path / "two", model="ema")
    assert same(read(average, "weights", "cube").view(5, 3, 4), found["weights", "cube"] * 2)
    with pytest.raises(ValueError, match=r"several models \(ema, net\)"):
        DCPSource(path / "two")
    with pytest.raises(ValueError, match="no model under 'nothing'"):
        DCPSource(path / "two", model="nothing")
    with caplog.at_level(logging.WARNING, "zerostage"):
        source = DCPSource(path / "numbers")
    assert not wrong(source, weights) and source.optimizer is None and "get_optimizer_state_dict" in caplog.text


def test_one_process_ddp_names_and_values_that_are_not_read(tmp_path, caplog):
    model = Model()
    state = {"model": {f"module.{name}": value for name, value in model.state_dict().items()}, "bad": {"code": Code(), "good": 1}}
    state["model"]["module.strided"] = torch.randn(6, 9).t()
    state["model"]["module._orig_mod.half"] = torch.randn(4, 5).bfloat16()
    state["big"] = {"a": torch.zeros(9 << 20, dtype=torch.float64)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    RAN.clear()
    source = DCPSource(tmp_path)
    for name in source.names:
        key = "module._orig_mod.half" if name == "half" else f"module.{name}"
        expected = state["model"][key]
        assert same(read(source, "weights", name).view(expected.shape), expected), name
        assert source.parameters[f"module.{name}"] is source.parameters[name]
    half = state["model"]["module._orig_mod.half"].flatten()
    assert read(source, "weights", "half", 3, 7, torch.float64).equal(half[3:7].double())
    with caplog.at_level(logging.WARNING, "zerostage"):
        assert source.extra() == {"bad": {"good": 1}}
    assert not RAN and "bad.code" in caplog.text and "'big'" in caplog.text
    for term, piece, kind in (
        ("weights", Piece("nothing", 0, 1, torch.empty(1)), KeyError),
        ("exp_avg", Piece("one", 0, 1, torch.empty(1)), KeyError),
        ("weights", Piece("one", 0, 2, torch.empty(2)), ValueError),
        ("weights", Piece("cube", 0, 2, torch.empty(3)), ValueError),
    ):
        with pytest.raises(kind, match=piece.name):
            source.read(term, [piece])


def test_optimizers_of_other_kinds(tmp_path):
    """Two optimizers, states without a tensor, a scalar parameter, lists in lists, DDP's names in the optimizer too."""
    state = {
        "module.a": {"step": torch.tensor(2.0), "exp_avg": torch.tensor(3.0)},
        "module.b.0": {"momentum_buffer": None, "rows": torch.ones(2), "n": 4},
    }
    parts = [
        {"state": {name: state[name]}, "param_groups": [{"lr": lr, "params": [name]}]} for name, lr in zip(state, (0.1, 0.2))
    ]
    weights = {"module.a": torch.tensor(1.0), "module.b.0": torch.ones(2, 3), "module.empty": torch.empty(0, 3)}
    nested = [{"x": torch.ones(1)}, [torch.zeros(2), 5]]
    dcp.save({"net": weights, "optimizers": parts, "nested": nested}, checkpoint_id=tmp_path, no_dist=True)
    source = DCPSource(tmp_path)
    assert source.names == ["a", "b.0", "empty"] and source.optimizer == ""
    assert source.parameters["a"].states == ["exp_avg"] and source.parameters["a"].scalars == {"step": torch.tensor(2.0)}
    assert read(source, "exp_avg", "a").tolist() == [3.0]
    scalars = source.parameters["b.0"].scalars
    assert scalars["momentum_buffer"] is None and scalars["n"] == 4 and scalars["rows"].equal(torch.ones(2))
    assert source.groups == [{"names": ["module.a", "a"], "lr": 0.1}, {"names": ["module.b.0", "b.0"], "lr": 0.2}]
    assert read(source, "weights", "empty").shape == (0,) and source.buffers()["empty"].shape == (0, 3)
    first, (second, third) = source.extra()["nested"]
    assert first == {"x": torch.ones(1)} and second.tolist() == [0, 0] and third == 5


def test_only_what_is_asked_for_is_read(tmp_path, monkeypatch):
    """A part of a long tensor costs its bytes and not the tensor's; pieces that share a chunk read it once."""
    from zerostage.checkpoint import dcp_item

    values = torch.randn(50_000, 20)
    dcp.save({"model": {"long": values}}, checkpoint_id=tmp_path, no_dist=True)
    source, sizes = DCPSource(tmp_path), []
    exactly = dcp_item._read_exactly
    monkeypatch.setattr(dcp_item, "_read_exactly", lambda data, room: (sizes.append(len(room)), exactly(data, room)))
    outs = [torch.empty(1000), torch.empty(30)]
    source.read("weights", [Piece("long", 500_010, 501_010, outs[0]), Piece("long", 501_000, 501_030, outs[1])])
    assert outs[0].equal(values.flatten()[500_010:501_010]) and outs[1].equal(values.flatten()[501_000:501_030])
    assert sizes == [52 * 20 * 4]  # rows 25,000 to 25,051


def test_damage_is_named(folder, saved, tmp_path):
    saved("two")

    def copied(name):
        shutil.copytree(folder / "two" / "nested", tmp_path / name)
        return tmp_path / name, tmp_path / name / "__1_0.distcp"

    path, file = copied("missing")
    file.unlink()
    with pytest.raises(DamagedError, match="__1_0.distcp is missing"):
        DCPSource(path)
    path, file = copied("truncated")
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DamagedError, match=r"__1_0.distcp is truncated: it has [\d,]+ of [\d,]+ bytes"):
        DCPSource(path)
    path, file = copied("zeroed")
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(DamagedError, match=r"__1_0.distcp is damaged at bytes .* which hold"):
        source = DCPSource(path)
        read(source, "weights", "cube")
    path, _ = copied("metadata")
    whole_file = (path / ".metadata").read_bytes()
    for data in (b"", whole_file[: len(whole_file) // 2], b"\x80" + bytes(100), pickle.dumps({"a": 1}), pickle.dumps(Code())):
        (path / ".metadata").write_bytes(data)
        RAN.clear()
        with pytest.raises(DamagedError, match=r"\.metadata is damaged"):
            DCPSource(path)
        assert not RAN
    generator = random.Random(0)
    for _ in range(40):  # any byte: named, or harmless
        data = bytearray(whole_file)
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        (path / ".metadata").write_bytes(data)
        try:
            DCPSource(path)
        except (DamagedError, ValueError) as error:
            assert str(path) in str(error)
    (path / "manifest.json").write_text("{}")
    assert not recognises(path)


def test_rectangles_against_intervals():
    """Against indexing, for random shapes of 0 to 4 dimensions."""
    generator = random.Random(0)
    for _ in range(800):
        shape = tuple(generator.choice([1, 2, 3, 5]) for _ in range(generator.randint(0, 4)))
        offsets = tuple(generator.randrange(size) for size in shape)
        sizes = tuple(generator.randint(1, size - offset) for size, offset in zip(shape, offsets))
        start, stop = sorted(generator.randint(0, math.prod(shape)) for _ in range(2))
        full = torch.arange(1, math.prod(shape) + 1).view(shape)
        inside = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes))
        expected = torch.zeros_like(full)
        expected[inside] = full[inside]
        expected, out = expected.flatten()[start:stop], torch.zeros(stop - start, dtype=torch.long)
        rectangle.copy(out, start, stop, full[inside], offsets, shape)
        assert out.equal(expected), (shape, offsets, sizes, start, stop)
        assert rectangle.overlap(offsets, sizes, shape, start, stop) == expected.count_nonzero()
        if shape and expected.any():
            low, high = rectangle.rows(offsets, sizes, shape, start, stop)
            rectangle.copy(out.zero_(), start, stop, full[inside][low:high], (offsets[0] + low, *offsets[1:]), shape)
            assert out.equal(expected)


def going_on(rank, n, path):
    """At each stage load and train two steps; what differs between stages is nothing."""
    results = []
    for stage in range(4):
        model = Model()
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        optimizer = optimizer_of(model)
        zerostage.shard(model, optimizer, stage=stage)
        optimizer.param_groups[1]["lr"] = 77.0
        extra = zerostage.load(path, model, optimizer)
        loaded = zerostage.full_state_dict(model, rank0_only=False)
        train(model, optimizer, rank, range(2, 4))
        result = zerostage.full_state_dict(model, rank0_only=False)
        results.append((extra["best"], optimizer.param_groups[1]["lr"], loaded, result))
        zerostage.close(model)
    return results


@pytest.mark.parametrize("case", ["two", "columns"])
def test_a_run_that_moves_here_goes_on_as_with_fsdp2(case, folder, saved):
    found, _, later = saved(case)
    for best, lr, loaded, result in run(going_on, n=2, path=str(folder / case / "nested"))[1]:
        assert best == 0.5 and lr == 3e-3
        assert all(same(loaded[name], value) for (term, name), value in found.items() if term == "weights")
        assert not [name for name, value in later.items() if not same(result[name], value)]
