"""One rank raises, dies, or runs out of batches: the others end soon, and say which rank was first and why."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import failing
import pytest
import torch
from ranks import Failure, processes, run
from torch import nn

import zerostage
from zerostage import collectives, notes

WHERE = ["forward", "backward", "data", "save", "kill", "end"]
JOBS = [(n, 3, bad, where) for n, bad in ((2, 1), (4, 2)) for where in WHERE]
JOBS += [(n, stage, bad, where) for n, stage, bad in ((3, 0, 1), (2, 2, 0)) for where in ("backward", "kill", "end")]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def one_rank(rank: int, n: int, port: int, where: str, stage: int, bad: int, folder: str) -> None:
    out = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n), BAD=str(bad), STAGE=str(stage))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    failing.main(where)


def job(where: str, n: int, stage: int, bad: int, folder: Path) -> tuple[list[int], list[str]]:
    """Exit codes and what was printed, by rank, of ranks that multiprocessing starts."""
    port, context = free_port(), processes()
    ranks = [context.Process(target=one_rank, args=(r, n, port, where, stage, bad, str(folder))) for r in range(n)]
    for process in ranks:
        process.start()
    ranks[bad].join(90)
    deadline = time.monotonic() + 30
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
    for rank in late:
        ranks[rank].kill()
    said = [(folder / str(rank)).read_text() for rank in range(n)]
    assert not late, f"ranks {late} had not ended 30 s after rank {bad}:\n" + "\n".join(said)
    return [process.exitcode for process in ranks], said


@pytest.mark.parametrize("n, stage, bad, where", JOBS)
def test_K1_the_others_end_and_name_the_first(n: int, stage: int, bad: int, where: str, tmp_path: Path) -> None:
    codes, said = job(where, n, stage, bad, tmp_path)
    assert codes[bad] == {"kill": -9, "end": 0}.get(where, 1)
    for rank in range(n):
        if rank == bad:
            assert where in ("kill", "end") or "ValueError: boom" in said[rank]
            continue
        assert codes[rank] == 1
        last = said[rank].strip().splitlines()[-1]
        assert last.startswith(f"zerostage.notes.PeerError: rank {rank} cannot go on: rank {bad}"), said[rank]
        if where == "kill":
            # where rank 0 is killed, the job's store and what might be noted there end with it
            assert "ended without a word (after 2 optimizer steps)" in last or bad == 0 and "rank 0 ended" in last
        elif where == "end":
            assert "program came to its end (after 3 optimizer steps). Every rank must run the same number" in last
        else:
            steps = 3 if where == "save" else 2
            assert f"failed first (after {steps} optimizer steps): ValueError: boom" in last


@pytest.mark.parametrize("where", ["backward", "kill"])
def test_K1_under_torchrun(where: str) -> None:
    environment = {**os.environ, "BAD": "1", "STAGE": "3", "OMP_NUM_THREADS": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    began = time.monotonic()
    done = subprocess.run(
        [*torchrun, "--rdzv-endpoint", "localhost:0", failing.__file__, where], capture_output=True, text=True, env=environment
    )
    assert time.monotonic() - began < 60 and done.returncode == 1  # the imports count, too
    assert "local_rank: 1" in done.stderr
    if where == "backward":
        assert "ValueError: boom" in done.stderr


def stays_alive(rank: int, n: int, where: str) -> str:
    """Rank 1 catches its exception and does something else for long."""
    notes.RECOVERY, collectives.STALL = 2.0, 0.5  # for sooner than in a real run; these processes are not kept
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=3)
    for step in range(3):
        if rank == 1 and step == 1:
            if where == "forward":
                handle = model[2].register_forward_hook(failing.explode)
            else:
                handle = model[1].weight.register_hook(failing.explode)
        try:
            model(torch.ones(2, 8)).sum().backward()
        except ValueError:
            handle.remove()
            time.sleep(5)
            return "slept"
        optimizer.step()
    return "done"


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_K1_a_rank_that_caught_its_exception_and_does_not_come_back(where: str) -> None:
    slept, failure = run(stays_alive, n=2, where=where, expect_failure=True, keep=False)[::-1]
    assert slept == "slept"
    assert isinstance(failure, Failure) and failure.kind == "PeerError" and failure.seconds < 5
    why = "ValueError: boom (in a forward)" if where == "forward" else "an exception in its backward"
    assert failure.message.startswith(f"rank 0 cannot go on: rank 1 failed first (after 1 optimizer steps): {why}")


def comes_back(rank: int, n: int, stage: int) -> dict[str, torch.Tensor]:
    """Both ranks catch an exception of a forward in one step and train on."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(model, optimizer, stage=stage)
    for step in range(4):
        handle = model[2].register_forward_hook(failing.explode) if step == 1 else None
        try:
            model(torch.full((2, 8), 1.0 + rank)).square().mean().backward()
        except ValueError:
            handle.remove()
            continue
        optimizer.step()
        optimizer.zero_grad()
    assert not any(engine_notes_raised(model))
    return zerostage.full_state_dict(model, rank0_only=False)


def engine_notes_raised(model: nn.Module) -> list[str]:
    from zerostage.engine import engine_of

    mine = engine_of(model).world.notes
    return [mine._read(mine._exception(rank)) for rank in range(mine.size)]


def test_a_step_that_all_ranks_caught_is_as_if_it_had_not_been() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (sum(model(torch.full((2, 8), 1.0 + r)).square().mean() for r in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    for stage in (0, 3):
        for state in run(comes_back, n=2, stage=stage):
            for name, value in model.state_dict().items():
                assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (stage, name)  # the mean's order


def broken_before_ours(rank: int, n: int) -> str:
    """A hook of the user's that raises before the engine's own has had its turn."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    zerostage.shard(model, stage=3)
    for module in (model, model[1]):
        handle = module.register_forward_pre_hook(failing.explode, prepend=True)
        with pytest.raises(ValueError, match="boom"):
            model(torch.ones(2, 8))
        handle.remove()
    model(torch.ones(2, 8)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        model[0].weight.sum()
    return str(caught.value)


def test_a_forward_that_never_began_does_not_count() -> None:
    for message in run(broken_before_ours, n=2):
        assert "'0.weight' is divided over 2 ranks" in message
