"""Several micro-batches a step, and losses weighted by token: one average, taken once, however the batch is split."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import features, mlp
from ranks import run
from torch import nn

import zerostage
from zerostage import Precision
from zerostage.engine import engine_of
from zerostage.train import data
from zerostage.train import losses as losses_of_the_trainer

ROWS = 16  # of every step's batch over all ranks and micro-batches


def rows_of(rank: int, n: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One rank's rows of a batch that is the same for every number of ranks."""
    return tuple(part.chunk(n)[rank] for part in features(0, step, rows=ROWS))


def start(precision: Precision | None, stage: int | None, rate: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mlp(8, 16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage, precision=precision)
    return model, optimizer


def backward(model: nn.Module, x: torch.Tensor, y: torch.Tensor, accumulation: int) -> None:
    for part, target in zip(x.chunk(accumulation), y.chunk(accumulation)):
        output = model(part.to(next(model.parameters()).dtype))
        (F.mse_loss(output.float(), target) / accumulation).backward()


def one_update(rank: int, n: int) -> dict[tuple[int, int], dict[str, torch.Tensor]]:
    found = {}
    for stage in range(4):
        for accumulation in (1, 2, 4):
            model, optimizer = start(None, stage, rate=1.0)
            backward(model, *rows_of(rank, n, 0), accumulation)
            norm = zerostage.clip_grad_norm_(model, float("inf"))
            optimizer.step()
            found[stage, accumulation] = zerostage.full_state_dict(model, rank0_only=False) | {"norm": norm}
            zerostage.close(model)
    return found


def test_E2_norm_and_update_are_those_of_the_global_batch() -> None:
    model, optimizer = start(None, None, rate=1.0)
    backward(model, *rows_of(0, 1, 0), 1)
    norm = nn.utils.get_total_norm([p.grad for p in model.parameters()])
    optimizer.step()
    oracle = dict(model.state_dict()) | {"norm": norm}
    for n in (1, 2, 4):
        for found in run(one_update, n=n):
            for (stage, accumulation), state in found.items():
                # 1e-6: the mean over micro-batches and ranks is summed in another order
                what = f"stage {stage}, {n} ranks, {accumulation} micro-batches: "
                torch.testing.assert_close(state, oracle, atol=1e-6, rtol=0, msg=lambda m: what + m)
                assert all(torch.equal(value, found[0, accumulation][key]) for key, value in state.items())


def curves(rank: int, n: int, precision: Precision | None, cells: list[tuple[int, int]]) -> dict[Any, Any]:
    found = {}
    for stage, accumulation in cells:
        model, optimizer = start(precision, stage, rate=0.1)
        for step in range(20):
            backward(model, *rows_of(rank, n, step), accumulation)
            optimizer.step()
            optimizer.zero_grad()
        state = zerostage.full_state_dict(model, rank0_only=False)
        if stage == 0 and precision:
            state["masters"] = torch.cat([flat.master for flat in engine_of(model).flats])
        found[stage, accumulation] = state
        zerostage.close(model)
    return found


def test_E5_stages_and_accumulations_train_alike() -> None:
    model, optimizer = start(None, None, rate=0.1)
    for step in range(20):
        backward(model, *rows_of(0, 1, step), 1)
        optimizer.step()
        optimizer.zero_grad()
    cells = [(stage, accumulation) for stage in range(4) for accumulation in (1, 2, 4, 8)]
    for found in run(curves, n=2, precision=None, cells=cells, timeout=120):
        for key, state in found.items():
            torch.testing.assert_close(state, dict(model.state_dict()), atol=1e-6, rtol=0, msg=lambda m: f"{key}: {m}")
    wide = Precision(gradients=torch.float32)  # the accumulators
    for found in run(curves, n=2, precision=wide, cells=[(0, 1), (0, 8), (3, 8)], timeout=120):
        assert all(torch.equal(value, found[0, 8][key]) for key, value in found[3, 8].items())
        apart = (found[0, 8]["masters"] - found[0, 1]["masters"]).abs().max()
        assert apart < 1e-3, apart  # bf16 forwards of other numbers of rows


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        return self.weight * factor


def three_and_one(rank: int, n: int, weighted: bool) -> list[float]:
    tokens = torch.tensor([[1.0, 1.0, 1.0], [5.0]][rank])  # the gradient of each token's loss
    found = []
    for stage in range(4):
        model = Scalar()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        zerostage.shard(model, optimizer, stage=stage)
        losses = model(tokens)
        (losses.sum() * (n / 4) if weighted else losses.mean()).backward()
        optimizer.step()
        found.append(-zerostage.full_state_dict(model, rank0_only=False)["weight"].item())
    return found


def test_E1_every_valid_token_has_the_same_weight() -> None:
    assert run(three_and_one, n=2, weighted=True) == [[2.0] * 4] * 2
    assert run(three_and_one, n=2, weighted=False) == [[3.0] * 4] * 2  # the mean of the ranks' means, if that is asked for


class Words(nn.Module):
    """Tokens to logits, in the form in which the trainer calls a language model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.middle, self.head = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(torch.tanh(self.middle(self.embed(input_ids)))))


VALID = (5, 0, 3, 1, 6, 2, 0, 0)  # labels of each of a step's samples; the last of four ranks has none


def samples(step: int, indices: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(step)
    tokens, labels = (torch.randint(32, (8, 6), generator=generator) for _ in range(2))
    for row, valid in enumerate(VALID):
        labels[row, valid:] = data.IGNORED
    return tokens[list(indices)].numpy(), labels[list(indices)].numpy()


def by_tokens(rank: int, n: int, micro_batch: int, stages: tuple[int | None, ...]) -> dict[Any, Any]:
    found = {}
    for stage in stages:
        model = Words()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if stage is not None:
            zerostage.shard(model, optimizer, stage=stage)
        losses = []
        for step in range(3):
            if stage is None:
                tokens, labels = map(torch.from_numpy, samples(step, range(8)))
                logits = model(tokens, use_cache=False).logits
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=data.IGNORED)
                loss.backward()
                losses.append(loss.item())
            else:
                shares = data.rank_share(list(range(8)), rank, n, micro_batch)
                micro_batches = [samples(step, share) for share in shares]
                trainer = SimpleNamespace(model=model, world=engine_of(model).world, device=torch.device("cpu"))
                valid, _ = losses_of_the_trainer.agree(trainer.world, micro_batches, stop=False)
                losses.append(losses_of_the_trainer.accumulate(trainer, micro_batches, valid))
            optimizer.step()
            optimizer.zero_grad()
        state = dict(model.state_dict()) if stage is None else zerostage.full_state_dict(model, rank0_only=False)
        found[stage] = state | {"losses": torch.tensor(losses)}
    return found


@pytest.mark.parametrize(("n", "micro_batch"), [(1, 8), (2, 4), (4, 2), (2, 2)])
def test_E1_the_trainer_weights_tokens_alike_for_every_split(n: int, micro_batch: int) -> None:
    oracle = by_tokens(0, 1, 8, (None,))[None]
    for found in run(by_tokens, n=n, micro_batch=micro_batch, stages=(0, 1, 2, 3)):
        for stage, state in found.items():
            torch.testing.assert_close(state, oracle, atol=1e-6, rtol=0, msg=lambda m: f"stage {stage}: {m}")
