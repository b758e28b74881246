"""The traffic of a step of each real engine on real ranks, against the exact account and against known factors."""

import json
import os
import sys
import threading

import pytest
import test_audit
import torch
import torch.distributed as dist
from models import batch, mlp, tiny_llama
from ranks import alone, run
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import MixedPrecision

import zerostage
from zerostage import Partition, Precision
from zerostage.sends import counting
from zerostage.traffic_audit import audit_traffic


def trainer(model, optimizer, rank, micro=1, autocast=False, clip=False):
    def step(number):
        for part in range(micro):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(**batch(rank, number, micro=part)).loss
            loss.backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def whole_size(**shape):
    return sum(p.numel() for p in tiny_llama(**shape).parameters())


# -- zerostage: to the byte ------------------------------------------------------------------


def own(rank, n, cases):
    found = []
    for stage, partition, precision, frozen, micro in cases:
        model = tiny_llama()
        for p in model.model.embed_tokens.parameters() if frozen else ():
            p.requires_grad_(False)
        made = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        options = {"precision": Precision()} if precision else {}
        zerostage.shard(model, made, stage, partition=partition and Partition(*partition), **options)
        step = trainer(model, made, rank, micro)
        for number in range(2):
            step(number)
        traffic = zerostage.traffic(model)
        traffic.reset()
        audit = audit_traffic(model, lambda: step(2))
        assert audit.bytes.get("all-gather", 0) == traffic.bytes["all_gather"]
        assert audit.bytes.get("reduce-scatter", 0) == traffic.bytes["reduce_scatter"]
        assert set(audit.bytes) <= {"all-gather", "reduce-scatter"}
        assert traffic.expected(micro) == {name.replace("-", "_"): sent for name, sent in audit.bytes.items()}
        if n == 2:  # then an all-reduce sends what it is given, as the account counts it
            assert audit.agreement_bytes == traffic.bytes["agreement"] > 0
        assert audit.agreement_calls > 0 and audit.notes == []
        json.dumps(audit.to_json())
        found.append(audit)
        zerostage.close(model)
    return found


def test_zerostage_to_the_byte_at_every_stage():
    cases = [(stage, None, precision, False, 1) for precision in (False, True) for stage in range(4)]
    for found in run(own, n=2, cases=cases):
        for (stage, _, precision, *_), audit in zip(cases, found):
            assert audit.stages == ((3,) if stage == 3 else (0, 1, 2)) and audit.differs == []
            assert audit.dtype == ("bfloat16" if precision else "float32")
            assert audit.textbook == {0: 2.0, 1: 2.0, 2: 2.0, 3: 3.0}
            assert audit.parameters == whole_size()
            padding = 1.01  # of norms of 32 elements to 64
            assert audit.textbook[stage] <= audit.total < padding * audit.textbook[stage]
            assert audit.configured_stage == stage
            line = f"a step sends {audit.total:.2f} model sizes per rank on 2 ranks, the pattern of stage"
            assert str(audit).startswith(line)


def test_zerostage_hybrids_frozen_weights_and_micro_batches():
    hybrids = [(None, (2, 2, 2), True, False, 1), (None, (4, 2, 2), False, False, 1)]
    cases = [*hybrids, (3, None, True, True, 1), (3, None, False, False, 3)]
    for found in run(own, n=4, cases=cases):
        hybrid, mixed, frozen, several = found
        assert hybrid.stages == mixed.stages == ()
        assert hybrid.differs[0].startswith(f"A hybrid's traffic: that of {Partition(2, 2, 2)}")
        # whether the optimizer is divided over replicas too cannot be seen here
        alike = [str(Partition(o, g, 2)) for o, g in ((2, 2), (4, 2), (4, 4))]
        assert mixed.differs == [f"A hybrid's traffic: that of {' or '.join(alike)}."]
        assert hybrid.rows[0].collective == "all-gather" and hybrid.rows[0].dtype == "bfloat16"
        assert frozen.stages == (3,) and frozen.differs == []
        assert frozen.textbook[3] == pytest.approx(3 - 64 * 32 / frozen.parameters)
        assert several.stages == (3,) and several.differs == ["It is that of 3 micro-batches."]
        assert several.total == pytest.approx(9, rel=0.03)


# -- Other engines: their known factors ------------------------------------------------------


def others(rank, n, cases, steps=3, clip=False):
    found = []
    for wrap, options, autocast in cases:
        model, optimizer = getattr(test_audit, wrap)(tiny_llama(), **options)
        step = trainer(model, optimizer, rank, autocast=autocast, clip=clip)
        for number in range(steps):
            step(number)
        found.append(audit_traffic(model, lambda: step(steps)))
    return found


def test_the_factors_of_torch_engines():
    cases = [
        ("ddp", {}, False),
        ("ddp", {}, True),
        ("zero_redundancy", {}, False),
        ("fsdp", {"strategy": "SHARD_GRAD_OP"}, False),
        ("fsdp", {"strategy": "FULL_SHARD"}, False),
        ("fsdp", {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)}, False),
        ("fsdp2", {"reshard": False}, False),
        ("fsdp2", {"reshard": True}, False),
        ("fsdp2", {"reshard": None}, True),
    ]
    results = run(others, n=2, cases=cases)
    assert [audit.bytes for audit in results[0]] == [audit.bytes for audit in results[1]]
    single, autocast, redundant, grad_op, full, mixed, kept, reshard, automatic = results[0]
    size, root = whole_size(), (2 * 64 * 32 + 32) / whole_size()
    assert all(audit.parameters == size and audit.notes == [] for audit in results[0])

    assert single.bytes == {"all-reduce": 4 * size} and single.model_sizes == {"all-reduce": 2.0}
    assert (single.stages, single.differs, single.dtype) == ((0,), [], "float32")

    # the same bytes are 4 model sizes of what the model computes in
    assert autocast.bytes == single.bytes and autocast.model_sizes == {"all-reduce": 4.0} and autocast.dtype == "bfloat16"
    assert autocast.stages == (0,)
    assert autocast.differs == ["all-reduce carries float32, 2 times the bytes of bfloat16 an element."]

    assert redundant.model_sizes == {"all-reduce": 2.0, "broadcast": pytest.approx(1.0)} and redundant.stages == (1, 2)
    assert redundant.differs == ["Gradients are all-reduced: 2.00 model sizes of elements, where a reduce-scatter sends 1.00."]

    for audit in (grad_op, kept):
        assert audit.stages == (2,) or set(audit.stages) == {0, 1, 2}
        assert audit.total == pytest.approx(2.0, rel=0.01) and set(audit.stages) == {0, 1, 2} and audit.differs == []
        assert audit.model_sizes == {"all-gather": pytest.approx(1.0, rel=0.01), "reduce-scatter": pytest.approx(1.0, rel=0.01)}

    assert reshard.stages == (3,) and reshard.total == pytest.approx(3.0, rel=0.01) and reshard.differs == []
    # the root unit is gathered once
    for audit in (full, mixed, automatic):
        assert audit.total == pytest.approx((3 - root) * (2 if audit is automatic else 1), rel=0.01)
        assert audit.stages == (3,) and f"{root:.1%} of the weights" in audit.differs[0]
    assert mixed.dtype == "bfloat16" and 2 * mixed.bytes["all-gather"] == full.bytes["all-gather"]


def test_a_hybrid_of_fsdp_on_four_ranks():
    cases = [("fsdp", {"strategy": "HYBRID_SHARD", "nodes": 2}, False), ("fsdp2", {"reshard": True, "nodes": 2}, False)]
    for found in run(others, n=4, cases=cases):
        first, second = found
        for audit in found:
            print(audit)
            assert audit.stages == () and audit.differs[0] == f"A hybrid's traffic: that of {Partition(2, 2, 2)}."
        assert "gathered once" in first.differs[1] and second.differs[1:] == []
        assert {row.collective: row.ranks for row in second.rows} == {"all-gather": 2, "reduce-scatter": 2, "all-reduce": 2}
        size = whole_size()
        assert first.bytes["reduce-scatter"] == first.bytes["all-reduce"] == pytest.approx(4 * size / 2, rel=0.01)


def test_norms_and_objects_are_agreement():
    for (audit,) in run(others, n=2, cases=[("fsdp2", {"reshard": True}, False)], clip=True):
        assert audit.total == pytest.approx(3.0, rel=0.01) and audit.stages == (3,)
        assert audit.agreement_calls > 0 and 0 < audit.agreement_bytes < 200


# -- The counter -----------------------------------------------------------------------------


def each_collective(rank, n):
    import torch.distributed._functional_collectives as functional

    def total(call):
        with counting() as sends:
            call()
        assert not sends.unknown
        return sum(sent.bytes for sent in sends.calls)

    x, out = torch.ones(12), torch.zeros(12 * n)
    parts = [torch.ones(12) for _ in range(n)]
    found = {
        "all_reduce": total(lambda: dist.all_reduce(x)),
        "all_gather": total(lambda: dist.all_gather(parts, x)),
        "all_gather async": total(lambda: dist.all_gather_into_tensor(out, x, async_op=True).wait()),
        "reduce_scatter": total(lambda: dist.reduce_scatter_tensor(x, out)),
        "reduce_scatter list": total(lambda: dist.reduce_scatter(x, parts)),
        "broadcast": total(lambda: dist.broadcast(x, 0)),
        "reduce": total(lambda: dist.reduce(x, 0)),
        "gather": total(lambda: dist.gather(x, parts if rank == 0 else None)),
        "scatter": total(lambda: dist.scatter(x, parts if rank == 0 else None)),
        "all_to_all": total(lambda: dist.all_to_all_single(torch.zeros(12), x)),
        "functional gather": total(lambda: functional.all_gather_tensor(x, 0, dist.group.WORLD) + 1),
        "functional reduce": total(lambda: functional.all_reduce(x, "sum", dist.group.WORLD) + 1),
        "functional scatter": total(lambda: functional.reduce_scatter_tensor(out, "sum", 0, dist.group.WORLD) + 1),
        "send": total(lambda: wait([dist.isend(x, (rank + 1) % n), dist.irecv(out[:12], (rank - 1) % n)])),
        "batch": total(
            lambda: wait(
                dist.batch_isend_irecv(
                    [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, out[:12], (rank - 1) % n)]
                )
            )
        ),
        "object": total(lambda: dist.all_gather_object([None] * n, "x")) > 0,
        "coalesced": total(lambda: coalesced(x)),
    }

    def in_thread():
        thread = threading.Thread(target=lambda: dist.all_reduce(x))
        thread.start()
        thread.join()

    found["thread"] = total(in_thread)
    dist.barrier()
    assert not hasattr(dist.ProcessGroup.allreduce, "__wrapped__")  # nothing is left behind
    return found


def wait(works):
    for work in works:
        work.wait()


def coalesced(x):
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)


def test_each_collective_by_its_formula():
    size, n = 48, 4
    for rank, found in enumerate(run(each_collective, n=n)):
        assert found == {
            "all_reduce": 2 * size * 3 // 4,
            "all_gather": 3 * size,
            "all_gather async": 3 * size,
            "reduce_scatter": 3 * size,
            "reduce_scatter list": 3 * size,
            "broadcast": size * 3 // 4,
            "reduce": size * 3 // 4,
            "gather": size if rank else 0,
            "scatter": 0 if rank else 3 * size,
            "all_to_all": size * 3 // 4,
            "functional gather": 3 * size,
            "functional reduce": 2 * size * 3 // 4,
            "functional scatter": 3 * size,
            "send": size,
            "batch": size,
            "object": True,
            "coalesced": 2 * (2 * size * 3 // 4),
            "thread": 2 * size * 3 // 4,
        }


def hooked(rank, n):
    found = []
    for hook in ("fp16", "power"):
        model = torch.nn.parallel.DistributedDataParallel(mlp(256, 256, bias=False))
        if hook == "fp16":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        else:
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def step():
            model(torch.ones(2, 256)).sum().backward()

        for _ in range(4):
            step()
        found.append(audit_traffic(model, step))
    return found


def test_collectives_in_communication_hooks_and_their_callbacks():
    for fp16, power in run(hooked, n=2):
        assert fp16.bytes == {"all-reduce": 2 * 65536} and fp16.stages == (0,)
        assert fp16.differs == ["all-reduce carries float16, 0.5 times the bytes of float32 an element."]
        # rank 1: two vectors of 256, in callbacks of futures
        assert power.bytes == {"all-reduce": 2 * 4 * 256} and power.stages == ()


def unlike(rank, n):
    model = torch.nn.parallel.DistributedDataParallel(mlp(64, 64))
    x = torch.ones(2000)

    def step():
        model(torch.ones(2, 64)).sum().backward()
        if rank == 1:
            dist.send(x, 0)
        else:
            dist.recv(x, 1)

    step()
    return audit_traffic(model, step), audit_traffic(model, lambda: None)


def test_ranks_that_differ_and_a_step_that_sends_nothing():
    for audit, nothing in run(unlike, n=2):
        assert audit.notes == ["The ranks differ: point-to-point sends 8,000 bytes on rank 1 and 0 on rank 0."]
        assert nothing.stages == () and nothing.differs[0].startswith("Nothing was sent")


def single(rank, n):
    model, optimizer = test_audit.plain(tiny_llama())
    return audit_traffic(model, lambda: trainer(model, optimizer, rank)(0))


def test_one_rank_sends_nothing():
    audit = alone(single)
    assert (audit.total, audit.bytes, audit.stages, audit.agreement_bytes) == (0, {}, (0,), 0)
    assert str(audit).startswith("a step sends 0.00 model sizes per rank on 1 rank")
    with pytest.raises(ValueError, match="no parameters"):
        audit_traffic(torch.nn.Identity(), lambda: None)


# -- DeepSpeed -------------------------------------------------------------------------------

#: Release weights at once, however few they are.
RELEASE = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}


def deepspeed(rank, n, cases):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500", CUDA_VISIBLE_DEVICES="")
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # its shared-memory collectives want a compiler
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = []
    for zero in cases:
        model = tiny_llama(layers=4)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**6,
        }
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

        def step(number):
            engine.backward(engine(**batch(rank, number)).loss)
            engine.step()

        for number in range(3):
            step(number)
        found.append(audit_traffic(engine, lambda: step(3)))
    return found


def test_the_factors_of_deepspeed():
    pytest.importorskip("deepspeed")
    cases = [{"stage": 0}, {"stage": 1}, {"stage": 2}, {"stage": 3, **RELEASE}, {"stage": 3}]
    for found in run(deepspeed, n=2, keep=False, cases=cases):
        for audit in found:
            print(audit)
        zero, one, two, three, kept = found
        assert all(audit.dtype == "bfloat16" and audit.parameters == whole_size(layers=4) for audit in found)
        assert zero.model_sizes == {"all-reduce": 2.0} and zero.stages == (0,)
        # where the textbook reduce-scatters the gradients and sends 2
        for audit in (one, two):
            assert audit.model_sizes == {"all-reduce": pytest.approx(2.0, rel=0.01), "all-gather": pytest.approx(1.0, rel=0.01)}
            assert audit.stages == (1, 2) and audit.textbook[2] == 2.0
            text = "Gradients are all-reduced: 2.00 model sizes of elements, where a reduce-scatter sends 1.00."
            assert audit.differs == [text]
        assert three.total == pytest.approx(3.0, rel=0.01) and three.stages == (3,) and three.notes == []
        # a model below its threshold of live parameters is not released after forward
        assert kept.total == pytest.approx(2.0, rel=0.01) and kept.stages == (0, 1, 2)
        assert kept.notes == ["Configured is DeepSpeed stage 3, of which the textbook sends 3.00."]
