"""The same code on GPUs, over NCCL: run where there are any."""

from __future__ import annotations

import pytest
import torch
from models import batch, tiny_llama
from ranks import run

import zerostage
from zerostage import Precision

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS == 0, reason="needs a GPU")


def on_gpu(rank: int, n: int, stage: int) -> dict:
    torch.cuda.set_device(rank)
    model = tiny_llama(layers=4, hidden=256, vocab=1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    peaks = []
    for step in range(6):
        torch.cuda.reset_peak_memory_stats()
        tokens = {name: value.cuda() for name, value in batch(rank, step, vocab=1024).items()}
        model(**tokens).loss.backward()
        zerostage.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(torch.cuda.max_memory_allocated())
    ledger, traffic = zerostage.memory(model, optimizer), zerostage.traffic(model)
    traffic.reset()
    model(**tokens).loss.backward()
    optimizer.step()
    return {
        "state": zerostage.full_state_dict(model, rank0_only=False),
        "peaks": peaks,
        "ledger": (ledger.expected, ledger.measured),
        "sent": ({k: traffic.bytes.get(k, 0) for k in traffic.expected()}, traffic.expected()),
    }


def test_every_stage_gives_the_same_bits_on_gpus() -> None:
    reference = None
    for stage in range(4):
        for result in run(on_gpu, n=GPUS, stage=stage, backend="nccl", keep=False, timeout=300):
            expected, measured = result["ledger"]
            assert all(measured[term] == size for term, size in expected.items())
            assert result["sent"][0] == result["sent"][1]
            assert result["peaks"][2] == result["peaks"][5]
            reference = reference or result["state"]
            assert all(torch.equal(result["state"][name], value) for name, value in reference.items()), stage
