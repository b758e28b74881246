"""The trace of a step: it accounts for all of the time, and for every collective."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from models import batch, tiny_llama
from ranks import run

import zerostage
from zerostage import Precision
from zerostage.engine import engine_of
from zerostage.timeline import KINDS

DELAY = 0.2


def traced(rank: int, n: int, stage: int, folder: str) -> dict[str, Any]:
    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    for step in range(2):
        with zerostage.trace(model) as trace:
            if rank == 1 and step == 1:
                time.sleep(DELAY)  # the others wait for this rank, and it for nobody
            began = time.perf_counter()
            model(**batch(rank, step)).loss.backward()
            optimizer.step()
            seconds = time.perf_counter() - began
        optimizer.zero_grad()
    if rank == 0:
        trace.save(Path(folder) / f"{stage}.json")
    units = [unit.name for unit in engine_of(model).units]
    main = [timeline.main for timeline in trace.ranks]
    network = [Counter(kind for kind, *_ in timeline.network) for timeline in trace.ranks]
    assert engine_of(model).world.timeline is None
    zerostage.close(model)
    return {"split": trace.split(), "seconds": seconds, "main": main, "network": network, "units": units, "text": str(trace)}


def test_every_part_of_a_step_is_accounted_for(tmp_path: Path) -> None:
    for stage in range(4):
        results = run(traced, n=2, stage=stage, folder=str(tmp_path))
        assert results[0]["split"] == results[1]["split"]  # all ranks have all ranks' figures
        split, units = results[0]["split"], results[0]["units"]
        for seconds, result in zip(split, results):
            assert set(seconds) == set(KINDS) and all(value >= 0 for value in seconds.values())
            assert sum(seconds.values()) >= result["seconds"]
            assert seconds["optimizer"] > 0 and seconds["reduce"] > 0
        assert split[0]["waiting"] > DELAY * 0.9 > split[1]["waiting"]
        assert split[1]["compute"] > DELAY * 0.9
        for spans in results[0]["main"]:
            assert all(stop <= start for (*_, stop), (_, _, start, _) in zip(sorted(spans, key=_start), sorted(spans, key=_start)[1:]))
        passes = {0: 1, 1: 1, 2: 1, 3: 2}[stage]  # stage 0 gathers reduced gradients, 1 and 2 updated weights
        for transfers in results[0]["network"]:
            assert transfers["gather"] == passes * len(units) and transfers["reduction"] == len(units)
        events = json.loads((tmp_path / f"{stage}.json").read_text())["traceEvents"]
        shown = Counter((event["pid"], event["cat"]) for event in events if event["ph"] == "X")
        assert all(shown[rank, kind] for rank in (0, 1) for kind in KINDS if (rank, kind) != (1, "waiting"))
        assert sum(event["ph"] == "b" for event in events) == sum(event["ph"] == "e" for event in events) > 0
        assert "exposed communication" in results[0]["text"]


def _start(span: tuple[str, str, int, int]) -> int:
    return span[2]
