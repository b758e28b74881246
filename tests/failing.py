"""A training script in which one rank fails at step 2: what the tests of failing ranks run, as people would.

    python failing.py WHERE        as one rank of a job that the environment describes

WHERE is forward, backward, data, save, kill, or end (it has fewer batches). BAD is the rank that does it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator

import torch
from torch import nn

import zerostage


def explode(*_: object) -> None:
    raise ValueError("boom")


def batches(where: str, bad: bool) -> Iterator[torch.Tensor]:
    for step in range(3 if where == "end" and bad else 5):
        if where == "data" and bad and step == 2:
            explode()
        yield torch.randn(4, 8)


def main(where: str) -> None:
    torch.set_num_threads(1)
    bad = os.environ["RANK"] == os.environ["BAD"]
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    zerostage.shard(model, optimizer, stage=int(os.environ["STAGE"]))
    for step, x in enumerate(batches(where, bad)):
        if bad and step == 2:
            if where == "forward":
                model[2].register_forward_hook(explode)
            if where == "backward":
                model[1].weight.register_hook(explode)
            if where == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if bad and step == 2 and where == "save":
            explode()


if __name__ == "__main__":
    main(sys.argv[1])
