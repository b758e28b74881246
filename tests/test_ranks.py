"""The harness itself: what a test sees when ranks return, raise, hang or die."""

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist
from models import batch, features, joined_batch, joined_features, mlp, tiny_llama
from ranks import Failure, RankFailure, alone, run


def who(rank, n, **kwargs):
    total = torch.tensor([float(rank)])
    dist.all_reduce(total)
    assert dist.get_world_size() == n and dist.get_rank() == rank and torch.get_num_threads() == 1
    return rank, total.item(), os.getpid(), kwargs


def raises_on_one(rank, n):
    print(f"rank {rank} prints this")
    print(f"and rank {rank} this", file=sys.stderr)
    if rank == 1:
        expected, found = 3, 4
        assert expected == found, "the numbers differ"
    dist.barrier()


def raises_everywhere(rank, n):
    dist.barrier()
    raise ValueError(f"bad value on rank {rank}")


def raises_without_closing(rank, n):
    if rank == 0:
        raise KeyError("missing")
    time.sleep(60)


def hangs(rank, n):
    if rank == 2:
        wait_for_nobody()
    dist.barrier()


def wait_for_nobody():
    time.sleep(60)


def dies(rank, n):
    if rank == 0:
        os._exit(7)
    dist.barrier()


def crashes(rank, n):
    import ctypes

    if rank == 1:
        ctypes.string_at(0)
    dist.barrier()


def draws(rank, n):
    return torch.randn(3), torch.randn(2, requires_grad=True).bfloat16()


def spoils(rank, n):
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    return torch.zeros(1).dtype


def without_group(rank, n):
    return dist.is_initialized(), "WORLD_SIZE" in os.environ, rank, n


def unpicklable(rank, n):
    return lambda: rank


def steps(rank, n):
    """A DistributedDataParallel step, so that a call leaves the most that calls leave behind."""
    model = torch.nn.parallel.DistributedDataParallel(mlp())
    x, y = features(rank, 0)
    torch.nn.functional.mse_loss(model(x), y).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_results_come_in_rank_order(n):
    results = run(who, n=n, lr=0.1, tensor=torch.ones(2))
    assert [r[0] for r in results] == list(range(n))
    assert all(r[1] == n * (n - 1) / 2 for r in results)
    assert results[0][3]["lr"] == 0.1 and torch.equal(results[-1][3]["tensor"], torch.ones(2))


def test_processes_are_reused_and_shared_between_sizes():
    first, second = run(who, n=3), run(who, n=2)
    assert [r[2] for r in first][:2] == [r[2] for r in second]
    assert os.getpid() not in [r[2] for r in first]


def test_processes_can_be_given_up():
    before = run(who, n=2, keep=False)
    assert not {r[2] for r in before} & {r[2] for r in run(who, n=2)}


def test_twenty_calls_are_cheap():
    run(who, n=4)
    started = time.monotonic()
    for _ in range(20):
        run(who, n=4)
    seconds = time.monotonic() - started
    print(f"20 calls on 4 ranks: {1000 * seconds / 20:.0f} ms each")
    assert seconds < 10


def test_every_call_starts_from_the_same_seed_and_state():
    assert run(spoils, n=2) == [torch.float64] * 2
    first, second = run(draws, n=2), run(draws, n=2)
    for values in (*first, *second):
        assert torch.equal(values[0], first[0][0]) and values[0].dtype == torch.float32
        assert torch.equal(values[1], first[0][1]) and values[1].requires_grad


def test_raising_rank_fails_with_its_traceback_and_output():
    with pytest.raises(RankFailure) as info:
        run(raises_on_one, n=3)
    text = str(info.value)
    assert info.value.failures[0].rank == 1 and "rank 1 first" in text
    assert "the numbers differ" in text and "assert 3 == 4" in text
    assert "in raises_on_one" in text and "/ranks.py" not in text
    assert "rank 1 prints this" in text and "and rank 2 this" in text
    assert [r[0] for r in run(who, n=3)] == [0, 1, 2]


def test_other_ranks_that_never_report_show_where_they_are():
    started = time.monotonic()
    with pytest.raises(RankFailure) as info:
        run(raises_without_closing, n=2)
    assert time.monotonic() - started < 15
    assert [f.kind for f in info.value.failures] == ["KeyError", "Unfinished"]
    assert "in raises_without_closing" in info.value.failures[1].details


def test_expected_failures_are_returned_and_ranks_kept():
    before = [r[2] for r in run(who, n=2)]
    results = run(raises_everywhere, n=2, expect_failure=True)
    assert [(f.rank, f.kind, f.message) for f in results] == [(r, "ValueError", f"bad value on rank {r}") for r in (0, 1)]
    assert [r[2] for r in run(who, n=2)] == before
    assert run(draws, n=1, expect_failure=True)[0][0].shape == (3,)


@pytest.mark.parametrize("expect_failure", [False, True])
def test_hanging_rank_fails_with_stacks(expect_failure):
    started = time.monotonic()
    with pytest.raises(RankFailure) as info:
        run(hangs, n=3, timeout=2, expect_failure=expect_failure)
    assert time.monotonic() - started < 15
    stacks = {f.rank: f.details for f in info.value.failures}
    assert "in wait_for_nobody" in stacks[2] and "wait_for_nobody" not in stacks[0]
    assert "in barrier" in stacks[0] and "did not return within 2 s" in str(info.value)
    assert [r[0] for r in run(who, n=3)] == [0, 1, 2]


def test_dying_rank_is_named_and_replaced():
    with pytest.raises(RankFailure, match="rank 0 first") as info:
        run(dies, n=3)
    assert info.value.failures[0].message == "the process ended with exit code 7"
    results = run(dies, n=3, expect_failure=True)
    assert [r.kind for r in results][0] == "Died" and all(isinstance(r, Failure) for r in results)
    assert [r[0] for r in run(who, n=3)] == [0, 1, 2]


def test_crash_shows_the_python_line():
    with pytest.raises(RankFailure) as info:
        run(crashes, n=2)
    assert "exit code -11" in str(info.value) and "in crashes" in str(info.value)


def test_without_group():
    assert run(without_group, n=1, group=False) == [(False, False, 0, 1)]
    assert run(without_group, n=2) == [(True, True, 0, 2), (True, True, 1, 2)]
    assert alone(without_group) == (False, False, 0, 1)


def test_misuse_is_refused():
    with pytest.raises(TypeError, match="module-level"):
        run(lambda rank, n: None, n=1)
    with pytest.raises(ValueError, match="n is 9"):
        run(who, n=9)
    with pytest.raises(RankFailure, match="pickle"):
        run(unpicklable, n=1)


def test_calls_with_ddp_leave_nothing_behind():
    first = run(steps, n=2)
    x, y = joined_features(2, 0)
    model = mlp()
    torch.nn.functional.mse_loss(model(x), y).backward()
    for parameter, gradient in zip(model.parameters(), first[0]):
        torch.testing.assert_close(parameter.grad, gradient)
    for n in (3, 2, 4):
        assert len(run(steps, n=n)) == n


def test_models_and_batches_are_deterministic():
    torch.manual_seed(5)
    one, two = tiny_llama(tie=True), tiny_llama(tie=True)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values()))
    assert one.lm_head.weight is one.model.embed_tokens.weight
    assert tiny_llama(layers=3, dtype=torch.bfloat16).lm_head.weight.dtype == torch.bfloat16
    joined = joined_batch(3, step=1)
    assert torch.equal(joined["input_ids"][2:4], batch(1, 1)["input_ids"])
    losses = [one(**batch(rank, 1)).loss for rank in range(3)]
    torch.testing.assert_close(one(**joined).loss, torch.stack(losses).mean())
