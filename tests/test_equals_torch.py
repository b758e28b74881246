"""Against plain torch: one process on the joined batch, and DistributedDataParallel, both in fp32.

Tolerance 1e-6: the mean over ranks is summed in another order than the mean over the joined
batch, and fused and plain AdamW round differently in the last place. Adam divides a
gradient by its own size, so that rounding noise in a gradient of almost nothing moves a
weight by a share of the learning rate: it is 1e-4 here. Lion takes the sign, which noise
can flip, so it runs in fp64.
"""

from __future__ import annotations

import copy
from typing import Any, Callable

import pytest
import torch
from models import batch, features, joined_batch, joined_features, mlp, tiny_llama
from ranks import run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zerostage

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd lr 1": lambda groups: torch.optim.SGD(groups, lr=1.0),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-4, weight_decay=0.1, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-4, foreach=True, amsgrad=True),
    "adam amsgrad": lambda groups: torch.optim.Adam(groups, lr=1e-4, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-4, momentum=0.5),
    "lion": lambda groups: Lion(groups, lr=1e-4),
}


class Lion(torch.optim.Optimizer):
    """A user's own elementwise optimizer (Chen et al., 2023)."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, dict(lr=lr, betas=betas))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.sign(torch.lerp(p.grad, momentum, group["betas"][0])))
                momentum.lerp_(p.grad, 1 - group["betas"][1])


def model_for(optimizer: str) -> nn.Module:
    return tiny_llama(dtype=torch.float64 if optimizer == "lion" else torch.float32)


def plain(optimizer: str, n: int, steps: int) -> dict[str, torch.Tensor]:
    model = model_for(optimizer)
    driver = OPTIMIZERS[optimizer](model.parameters())
    for step in range(steps):
        model(**joined_batch(n, step)).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        driver.step()
        driver.zero_grad()
    return model.state_dict()


def sharded(rank: int, n: int, optimizer: str, stage: int, steps: int) -> dict[str, torch.Tensor]:
    model = model_for(optimizer)
    driver = OPTIMIZERS[optimizer](model.parameters())
    zerostage.shard(model, driver, stage=stage)
    for step in range(steps):
        model(**batch(rank, step)).loss.backward()
        zerostage.clip_grad_norm_(model, 1.0)
        driver.step()
        driver.zero_grad()
    return zerostage.full_state_dict(model)


def all_stages(rank: int, n: int, optimizers: list[str], steps: int) -> dict:
    return {(o, stage): sharded(rank, n, o, stage, steps) for o in optimizers for stage in range(4)}


def assert_close(state: dict[str, torch.Tensor], oracle: dict[str, torch.Tensor], what: Any) -> None:
    for name, value in oracle.items():
        worst = (state[name] - value).abs().max().item()
        assert worst <= 1e-6, f"{what}: {name} is off by {worst}"


@pytest.mark.parametrize("n", [1, 2, 3])
def test_one_process_on_the_joined_batch(n: int) -> None:
    optimizers = ["sgd lr 1", "adamw"] if n != 2 else list(OPTIMIZERS)
    results = run(all_stages, n=n, timeout=240, optimizers=optimizers, steps=3)[0]
    for optimizer in optimizers:
        oracle = plain(optimizer, n, 3)
        for stage in range(4):
            assert_close(results[optimizer, stage], oracle, (optimizer, stage))


def beside_ddp(rank: int, n: int, steps: int) -> dict[str, dict[str, torch.Tensor]]:
    model = tiny_llama()
    wrapped = DistributedDataParallel(model)
    driver = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for step in range(steps):
        wrapped(**batch(rank, step)).loss.backward()
        driver.step()
        driver.zero_grad()
    results = {"ddp": copy.deepcopy(model.state_dict())}
    for stage in range(4):
        model = tiny_llama()
        driver = torch.optim.AdamW(model.parameters(), lr=1e-4)
        zerostage.shard(model, driver, stage=stage)
        for step in range(steps):
            model(**batch(rank, step)).loss.backward()
            driver.step()
            driver.zero_grad()
        results[f"stage {stage}"] = zerostage.full_state_dict(model)
    return results


def test_distributed_data_parallel() -> None:
    results = run(beside_ddp, n=3, timeout=240, steps=5)[0]
    for stage in range(4):
        assert_close(results[f"stage {stage}"], results["ddp"], f"stage {stage}")


def groups_and_scheduler(rank: int, n: int, stage: int | None) -> dict[str, Any]:
    model = mlp(8, 16, 16, 4)
    named = dict(model.named_parameters())
    groups = [
        {"params": [], "lr": 9.0},
        {"params": [p for name, p in named.items() if name.endswith("weight")], "weight_decay": 0.1, "lr": 1e-2},
        {"params": [], "lr": 7.0},
        {"params": [named["0.bias"], named["2.bias"]], "weight_decay": 0.0, "lr": 0.0},
    ]
    driver = torch.optim.AdamW(groups, lr=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(driver, [lambda s: 1.0, lambda s: 0.5**s, lambda s: 3.0, lambda s: 1.0])
    if stage is not None:
        zerostage.shard(model, driver, stage=stage)
    rates = []
    for step in range(4):
        if step == 2:
            driver.add_param_group({"params": [named["4.bias"]], "lr": 1e-2})
            scheduler = torch.optim.lr_scheduler.LambdaLR(driver, [lambda s: 1.0] * 5)
        x, y = joined_features(n, step) if stage is None else features(rank, step)
        nn.functional.mse_loss(model(x), y).backward()
        driver.step()
        driver.zero_grad()
        scheduler.step()
        rates.append([group["lr"] for group in driver.param_groups])
    state = model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)
    return {"state": state, "rates": rates}


def test_M1_M2_M3_groups_hold_for_each_element_and_schedulers_drive_them() -> None:
    oracle = groups_and_scheduler(0, 3, None)
    start = mlp(8, 16, 16, 4).state_dict()
    for stage in range(4):
        for result in run(groups_and_scheduler, n=3, stage=stage):
            assert_close(result["state"], oracle["state"], stage)
            assert result["rates"] == oracle["rates"]
            assert torch.equal(result["state"]["0.bias"], start["0.bias"])  # lr 0: bit-unchanged


def scheduler_made_before(rank: int, n: int) -> list[str]:
    import warnings

    model = mlp()
    driver = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(driver, 1, 0.5)
    zerostage.shard(model, driver, stage=2)
    before = zerostage.full_state_dict(model, rank0_only=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            x, y = features(rank, step)
            nn.functional.mse_loss(model(x), y).backward()
            driver.step()
            scheduler.step()
    assert driver.param_groups[0]["lr"] == 0.25
    after = zerostage.full_state_dict(model, rank0_only=False)
    assert all(not torch.equal(before[k], after[k]) for k in before)
    return [str(w.message) for w in caught if "lr_scheduler" in str(w.message)]


def test_a_scheduler_made_before_sharding_keeps_working() -> None:
    assert run(scheduler_made_before, n=2) == [[], []]


def optimizer_state_round_trip(rank: int, n: int, stage: int) -> dict[str, torch.Tensor]:
    def start() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = tiny_llama(dtype=torch.bfloat16)
        driver = torch.optim.AdamW(model.parameters(), lr=1e-2)
        zerostage.shard(model, driver, stage=stage)
        return model, driver

    def go_on(model: nn.Module, driver: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(**batch(rank, step)).loss.backward()
            driver.step()
            driver.zero_grad()

    one, first = start()
    go_on(one, first, range(3))
    saved = copy.deepcopy(first.state_dict())
    for state in saved["state"].values():
        assert state["exp_avg"].dtype == torch.float32 and int(state["step"]) == 3
    two, second = start()
    second.load_state_dict(saved)
    for index, state in second.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, saved["state"][index][name]), (index, name)
    # a state that has been loaded is the one that steps
    second.state_dict()["state"][0]["exp_avg"] if 0 in saved["state"] else None
    go_on(two, second, range(1))
    assert all(int(state["step"]) == 4 for state in second.state_dict()["state"].values())
    return {}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_state_dict_of_the_optimizer(stage: int) -> None:
    run(optimizer_state_round_trip, n=2, stage=stage)


class Vectors(nn.Module):
    """Sizes with which, on two ranks, a rank's part of `long` is as long as `long` itself and is not the same."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.long = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.linspace(-1, 1, 128))

    def forward(self, step: int) -> torch.Tensor:
        weighted = self.long * torch.arange(128).roll(step) / 128
        return weighted.square().sum() + self.matrix.square().sum()


def state_from_torch(rank: int, n: int, way: str, stage: int = 3) -> dict[str, torch.Tensor]:
    """Two steps of plain torch and two sharded ones, which take over or load the optimizer's state."""

    def go_on(model: nn.Module, driver: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            model(step).backward()
            driver.step()
            driver.zero_grad()

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = Vectors()
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    model, driver = build()
    go_on(model, driver, range(2))
    if way == "load":
        weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(driver.state_dict())
        model, driver = build()
        model.load_state_dict(weights)
    if way != "plain":
        zerostage.shard(model, driver, stage=stage)
    if way == "load":
        driver.load_state_dict(state)
    go_on(model, driver, range(2, 4))
    return model.state_dict() if way == "plain" else zerostage.full_state_dict(model, rank0_only=False)


def test_state_of_plain_torch_is_taken_over_and_loaded() -> None:
    oracle = state_from_torch(0, 1, "plain")
    for way in ("take over", "load"):
        for stage in (0, 1, 3):
            for result in run(state_from_torch, n=2, way=way, stage=stage):
                assert_close(result, oracle, (way, stage))


class LambLike(torch.optim.Optimizer):
    """Scales each parameter's update by that parameter's norm."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * p.norm() / p.grad.norm() * p.grad)


class NeedsMatrices(LambLike):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                assert p.ndim >= 2, "orthogonalisation needs a matrix"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (LambLike, "depends on the other elements"),
        (NeedsMatrices, "orthogonalisation needs a matrix"),
        (torch.optim.Adafactor, "Adafactor cannot run on divided parameters"),
        (torch.optim.LBFGS, "LBFGS cannot run on divided parameters"),
    ],
)
def test_J6_optimizers_that_look_across_elements_are_refused(kind: type, reason: str) -> None:
    for stage in (1, 2, 3):
        model = mlp()
        with pytest.raises(ValueError, match=reason):
            zerostage.shard(model, kind(model.parameters()), stage=stage)


def test_closure() -> None:
    model, oracle = mlp(), mlp()
    driver, plain_driver = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, oracle))
    zerostage.shard(model, driver, stage=3)
    x, y = features(0, 0)

    def closure(m: nn.Module, o: torch.optim.Optimizer) -> Callable[[], torch.Tensor]:
        def evaluate() -> torch.Tensor:
            o.zero_grad()
            loss = nn.functional.mse_loss(m(x), y)
            loss.backward()
            return loss

        return evaluate

    loss = driver.step(closure(model, driver))
    assert torch.equal(loss, plain_driver.step(closure(oracle, plain_driver)))
    assert_close(zerostage.full_state_dict(model), oracle.state_dict(), "closure")
