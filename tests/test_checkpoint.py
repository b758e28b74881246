"""Save at any partition, load at any other: every bit that training needs, and nothing changed by saving."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import Everything, build, differences, held, optimizer_of, train, whole
from models import features, mlp
from ranks import run
from torch import nn

import zerostage
from zerostage import Partition


def partitions(n: int) -> dict[str, Partition]:
    """Every partition on n ranks that is another one."""
    found = {f"stage {stage}": Partition.from_stage(stage, n) for stage in range(4 if n > 1 else 1)}
    if n == 4:
        found |= {"hybrid": Partition.hybrid(2), "node-local weights": Partition.node_local_weights(4, 2), "mixed": Partition(4, 2, 1)}
    return found


def saving(rank: int, n: int, path: str) -> dict[str, Any]:
    results = {}
    for name, partition in partitions(n).items():
        model, optimizer = build(partition)
        train(model, optimizer, rank, range(2))
        optimizer.param_groups[2]["lr"] = 0.0125
        before = held(model)
        saved = zerostage.save(f"{path}/{n} {name}", model, optimizer, extra={"samples": 12 * n})
        buffers = {key: buffer.clone() for key, buffer in model.named_buffers()}
        unchanged = not differences(before, whole([held(model)])) and saved.bytes > 0
        train(model, optimizer, rank, range(2, 4))
        results[name] = before, buffers, unchanged, zerostage.full_state_dict(model, rank0_only=False)
        zerostage.close(model)
    return results


def loading(rank: int, n: int, path: str, saved: dict[str, Any]) -> list[str]:
    wrong = []
    for target, partition in partitions(n).items():
        model, optimizer = build(partition)
        for source, (expected, buffers) in saved.items():
            for parameter in model.parameters():
                optimizer.state.pop(parameter, None)
            for group in optimizer.param_groups:
                group["lr"] = 77.0
            extra = zerostage.load(f"{path}/{source}", model, optimizer)
            where = f"{source} at {n} {target}: "
            wrong += [where + name for name in differences(held(model), expected)]
            names = {name for name, term in expected if term == "step"}
            here = {name for name, parameter in model.named_parameters() if parameter in optimizer.state}
            wrong += [where + f"state of {name}" for name in here - names]
            if [group["lr"] for group in optimizer.param_groups] != [1e-2, 3.0, 0.0125]:
                wrong.append(where + "learning rates")
            ranks = int(source[0])
            own = buffers[rank] if ranks == n else buffers[0]
            wrong += [where + name for name, buffer in model.named_buffers() if not torch.equal(buffer, own[name])]
            if extra != {"samples": 12 * ranks}:
                wrong.append(where + "extra")
        zerostage.close(model)
    return wrong


def going_on(rank: int, n: int, path: str, stages: list[str], ends: dict[str, Any]) -> list[str]:
    wrong = []
    for name in stages:
        model, optimizer = build(partitions(n)[name])
        zerostage.load(f"{path}/{n} {name}", model, optimizer)
        train(model, optimizer, rank, range(2, 4))
        state = zerostage.full_state_dict(model, rank0_only=False)
        own = ends[name][rank]  # BatchNorm's statistics are each rank's own
        wrong += [f"{name}: {key}" for key, value in state.items() if not torch.equal(value, own[key])]
        zerostage.close(model)
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> tuple[str, dict[str, Any], dict[int, Any]]:
    path = str(tmp_path_factory.mktemp("checkpoints"))
    expected, ends = {}, {}
    for n in (1, 2, 3, 4):
        results = run(saving, n=n, path=path)
        for name in results[0]:
            assert all(rank[name][2] for rank in results), (n, name)
            expected[f"{n} {name}"] = whole([rank[name][0] for rank in results]), [rank[name][1] for rank in results]
        ends[n] = {name: [rank[name][3] for rank in results] for name in results[0]}
    return path, expected, ends


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_H1_H3_C4_J4_L5_every_partition_loads_at_every_other(saved: Any, n: int) -> None:
    path, expected, _ = saved
    some = next(iter(expected.values()))[0]
    assert {term for _, term in some} == {"weights", "master", "exp_avg", "exp_avg_sq", "step"}
    assert ("ghost", "exp_avg") not in some and ("scale", "exp_avg") in some and some["codes", "weights"].dtype == torch.uint8
    assert run(loading, n=n, path=path, saved=expected) == [[]] * n


def test_a_run_that_was_saved_and_loaded_goes_on_as_the_one_that_was_not(saved: Any) -> None:
    path, _, ends = saved
    for n in (1, 3):
        assert run(going_on, n=n, path=path, stages=list(partitions(n)), ends=ends[n]) == [[]] * n


def growing(rank: int, n: int, path: str, sizes: tuple[int, ...], save: bool) -> Any:
    model = nn.Module()
    for number, size in enumerate(sizes):
        model.register_parameter(f"w{number}", nn.Parameter(torch.arange(size, dtype=torch.float32) + number))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3)
    if save:
        zerostage.save(path, model, optimizer)
    else:
        with zerostage.gathered(model, write=True):
            for parameter in model.parameters():
                parameter.data.zero_()
        zerostage.load(path, model, optimizer)
    return zerostage.full_state_dict(model)


def test_H2_L3_ranks_that_own_nothing(tmp_path: Path) -> None:
    for sizes, before, after in (((3,), 1, 4), ((7,), 2, 3), ((5, 7, 13), 4, 2), ((1,), 4, 1)):
        path = str(tmp_path / f"{sizes} {before}")
        one = run(growing, n=before, path=path, sizes=sizes, save=True)[0]
        other = run(growing, n=after, path=path, sizes=sizes, save=False)[0]
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def at_step_0(rank: int, n: int, path: str) -> bool:
    ends = []
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        for saves in (False, True):
            model = mlp()
            optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.1)
            zerostage.shard(model, optimizer, stage=2)
            if saves:
                zerostage.save(f"{path}/{kind.__name__}", model, optimizer)
                assert not optimizer.state
            for step in range(2):
                x, y = features(rank, step)
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                if saves:
                    zerostage.save(f"{path}/{kind.__name__} {step}", model, optimizer, asynchronous=step == 1)
            ends.append(zerostage.full_state_dict(model, rank0_only=False))
            zerostage.close(model)
        zerostage.shard(model := mlp(), optimizer := kind(model.parameters(), lr=1e-2, weight_decay=0.1), stage=3)
        zerostage.load(f"{path}/{kind.__name__}", model, optimizer)
        assert not optimizer.state
        zerostage.close(model)
    return all(torch.equal(a[name], b[name]) for a, b in (ends[:2], ends[2:]) for name in a)


def test_H14_saving_changes_nothing_also_before_the_first_step(tmp_path: Path) -> None:
    assert run(at_step_0, n=2, path=str(tmp_path)) == [True, True]


def later_changes(rank: int, n: int, path: str) -> list[str]:
    model, optimizer = build(Partition.from_stage(2, n))
    train(model, optimizer, rank, range(1))
    before, numbers = held(model), {"losses": [1.0]}
    under_way = zerostage.save(path, model, optimizer, extra=numbers, asynchronous=True)
    numbers["losses"].append(2.0)
    train(model, optimizer, rank, range(1, 4))
    under_way.wait()
    assert under_way.done and under_way.bytes == sum(file.stat().st_size for file in Path(path).iterdir())
    assert zerostage.load(path, model, optimizer) == {"losses": [1.0]}
    everyone: list[Any] = [None] * n
    torch.distributed.all_gather_object(everyone, before)
    return differences(held(model), whole(everyone))


def test_what_changes_after_an_asynchronous_save_does_not_reach_the_file(tmp_path: Path) -> None:
    assert run(later_changes, n=2, path=str(tmp_path / "c")) == [[], []]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.dropout = mlp(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(self.dropout(x)) + torch.rand(()) * random.random()


def noise(rank: int, n: int, path: str, saves: bool) -> Any:
    random.seed(rank)
    torch.manual_seed(rank)
    model = Noisy()
    zerostage.shard(model, optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3)

    def steps(count: range) -> None:
        for step in count:
            x, y = features(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    if saves:
        steps(range(2))
        zerostage.save(path, model, optimizer, extra={"mine": rank, "schedule": torch.optim.lr_scheduler.StepLR(optimizer, 5)})
        extra = None
    else:
        extra = zerostage.load(path, model, optimizer)
    steps(range(2, 4))
    return zerostage.full_state_dict(model), extra, torch.rand(1).item()


def test_H15_random_states_exact_on_as_many_ranks_and_derived_on_others(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    saved, resumed, more = run(noise, n=2, path=path, saves=True), run(noise, n=2, path=path, saves=False), run(noise, n=3, path=path, saves=False)
    assert all(torch.equal(saved[0][0][name], resumed[0][0][name]) for name in saved[0][0])
    assert [drawn for *_, drawn in saved] == [drawn for *_, drawn in resumed]
    assert [extra["mine"] for _, extra, _ in resumed] == [0, 1] and resumed[0][1]["schedule"]["step_size"] == 5
    assert [extra["mine"] for _, extra, _ in more] == [0, 0, 0]
    assert len({drawn for *_, drawn in more}) == 3


def averaged(rank: int, n: int, path: str, saves: bool) -> Any:
    model, optimizer = build(Partition.from_stage(3, n))
    if saves:
        train(model, optimizer, rank, range(1))
    slow, fast = zerostage.EMA(model, 0.9), zerostage.EMA(model, 0.5)
    if saves:
        for step in range(1, 3):
            train(model, optimizer, rank, range(step, step + 1))
            slow.update()
            fast.update()
        zerostage.save(path, model, optimizer)
    else:
        zerostage.load(path, model, optimizer)
    shown = []
    for average in (slow, fast):
        with average.applied():
            shown.append(zerostage.full_state_dict(model))
    return shown


def test_X1_averages_are_saved_and_loaded(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    one, other = run(averaged, n=3, path=path, saves=True)[0], run(averaged, n=2, path=path, saves=False)[0]
    weights = [name for name, _ in Everything().named_parameters()]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(one, other) for name in weights)
    assert not torch.equal(one[0]["scale"], one[1]["scale"])


def never_rounded(rank: int, n: int, path: str) -> list[float]:
    weights = []
    for stage in range(4):
        model = nn.Sequential(nn.LayerNorm(4))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        zerostage.shard(model, optimizer, stage=stage, precision=zerostage.Precision())
        for step in range(10):
            model(torch.ones(2, 4, dtype=torch.bfloat16) * torch.tensor([1, 2, 3, 4.0]).bfloat16())
            (model[0].weight.sum() if stage < 3 else _sum(model)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 4:
                zerostage.save(f"{path}/{stage}", model, optimizer)
                zerostage.load(f"{path}/{stage}", model, optimizer)
        weights.append(float(zerostage.full_state_dict(model, rank0_only=False)["0.weight"][0]))
        zerostage.close(model)
    return weights


def _sum(model: nn.Module) -> torch.Tensor:
    with zerostage.gathered(model):
        return model[0].weight.sum()


def test_J2_masters_come_back_and_are_not_made_from_rounded_weights(tmp_path: Path) -> None:
    # ten steps of 1e-3 from 1 are 0.99; rounded to bf16 after five of them it would be 0.9911, and 0.9922 in the end
    rounded = float(torch.tensor(0.99).bfloat16())
    assert run(never_rounded, n=2, path=str(tmp_path)) == [[rounded] * 4] * 2


def other_dtypes(rank: int, n: int, path: str) -> list[str]:
    wrong, fp32, mixed = [], zerostage.Precision.full(), zerostage.Precision()
    for name, one, other in (("down", fp32, mixed), ("up", mixed, fp32)):
        model = mlp()
        zerostage.shard(model, optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2), stage=1, precision=one)
        x, y = features(rank, 0)
        nn.functional.mse_loss(model(x.to(one.weights)).float(), y).backward()
        optimizer.step()
        zerostage.save(f"{path}/{name}", model, optimizer)
        everyone: list[Any] = [None] * n
        torch.distributed.all_gather_object(everyone, held(model))
        zerostage.close(model)
        expected = whole(everyone)
        values = {key[0]: value for key, value in expected.items() if key[1] == ("weights" if one is fp32 else "master")}
        expected |= {(key, "master"): value for key, value in values.items()}
        expected |= {(key, "weights"): value.to(other.weights) for key, value in values.items()}
        model = mlp()
        zerostage.shard(model, optimizer := torch.optim.AdamW(model.parameters(), lr=1e-2), stage=3, precision=other, units=[model[2]])
        zerostage.load(f"{path}/{name}", model, optimizer)
        wrong += differences(held(model), expected)
        zerostage.close(model)
    return wrong


def test_another_precision_and_other_units_take_the_widest_values(tmp_path: Path) -> None:
    assert run(other_dtypes, n=2, path=str(tmp_path)) == [[], []]


def refused(rank: int, n: int, path: str) -> dict[str, str]:
    model, optimizer = build(Partition.from_stage(3, n))
    train(model, optimizer, rank, range(1))
    zerostage.save(f"{path}/whole", model, optimizer)
    zerostage.save(f"{path}/weights", model)
    before, said = held(model), {}

    def attempt(name: str, work: Any) -> None:
        try:
            work()
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error.args[0] if isinstance(error, KeyError) else error}"

    attempt("no state", lambda: zerostage.load(f"{path}/weights", model, optimizer))
    attempt("nothing", lambda: zerostage.load(f"{path}/nowhere", model, optimizer))
    attempt("no folder", lambda: zerostage.save(__file__, model, optimizer))
    attempt("extra", lambda: zerostage.save(f"{path}/x", model, optimizer, extra={"fine": 1, "model": Path("a") if rank == 1 else 2}))
    attempt("average", lambda: zerostage.save(f"{path}/x", model, optimizer, extra={"ema": zerostage.EMA(model)}))
    assert not differences(before, whole([held(model)]))
    zerostage.close(model)

    def other(change: Any, kind: Any = torch.optim.AdamW, grouped: bool = True) -> None:
        model = Everything()
        change(model)
        optimizer = optimizer_of(model) if grouped else kind([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        zerostage.shard(model, optimizer, stage=3)
        try:
            zerostage.load(f"{path}/whole", model, optimizer)
        finally:
            zerostage.close(model)

    attempt("missing", lambda: other(lambda model: setattr(model, "scalf", nn.Parameter(torch.ones(2)))))
    attempt("left", lambda: other(lambda model: delattr(model.blocks[1], "fixed")))
    attempt("shape", lambda: other(lambda model: setattr(model.blocks[0], "first", nn.Linear(9, 13))))
    attempt("optimizer", lambda: other(lambda model: None, torch.optim.SGD, grouped=False))
    attempt("groups", lambda: other(lambda model: None, grouped=False))
    return said


def test_what_does_not_fit_is_refused_in_a_line_and_changes_nothing(tmp_path: Path) -> None:
    said, other = run(refused, n=2, path=str(tmp_path))
    assert "has no optimizer state: call zerostage.load(path, model)" in said["no state"]
    assert said["nothing"].startswith("FileNotFoundError: no checkpoint at")
    assert "exists and is not a checkpoint" in said["no folder"]
    assert "rank 1" in said["extra"] and "extra['model']" in said["extra"] and "extra['model']" in other["extra"]
    assert "leave it out of `extra`" in said["average"]
    assert said["missing"].startswith("KeyError: 'scalf' is not in a checkpoint of 2 ranks at stage 3; the closest name there is 'scale'")
    assert "blocks.1.fixed" in said["left"]
    assert "'blocks.0.first.weight' has shape (13, 8) in a checkpoint of 2 ranks at stage 3 and (13, 9) in the model" in said["shape"]
    assert "saved with AdamW and the optimizer is SGD" in said["optimizer"]
    assert "different lr, weight_decay" in said["groups"] or "different weight_decay" in said["groups"]
    assert all(len(text.splitlines()) == 1 for text in (*said.values(), *other.values())) and said.keys() == other.keys()
