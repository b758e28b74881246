"""Meet the other ranks, also after torch's elastic launcher has started all of them anew.

Its ranks meet at a store that outlives them: what the ranks of the last start left there, such as
the addresses at which they could be reached, is found again, and whoever reads it before the
new rank has written its own waits for a process that is gone. So the ranks of a start first
agree on a name that none had before, and meet under that.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

#: Seconds that ranks wait for each other; they may have been started on nodes that were not equally free.
PATIENCE = 1800.0


def join(device: torch.device) -> None:
    """Initialise torch.distributed as one rank of the job that the environment describes."""
    how: dict[str, Any] = {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store, rank, ranks = next(rendezvous("env://"))
        how = {"store": dist.PrefixStore(new_name(store, rank, ranks), store), "rank": rank, "world_size": ranks}
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device, **how)
    else:
        dist.init_process_group("gloo", **how)


def new_name(store: Any, rank: int, ranks: int) -> str:
    """A name on which the ranks that are alive agree, whatever is left in `store` of earlier ones.

    Each rank leaves a mark of its own. Rank 0 offers a name to the marks that it finds. A rank
    takes the offer up where its own mark is in it, which only a living rank 0 can have put there;
    the name holds once all have taken it up, else rank 0 offers another when a mark changes.
    Raises RuntimeError where that takes too long.
    """
    mark, deadline = uuid.uuid4().hex, time.monotonic() + PATIENCE
    store.set(f"zerostage/join/{rank}", mark)
    name, marks = "", []
    while time.monotonic() < deadline:
        if rank == 0:
            found = [_read(store, f"zerostage/join/{other}") for other in range(ranks)]
            if all(found) and found != marks:
                name, marks = uuid.uuid4().hex, found
                store.set("zerostage/join/offer", json.dumps([name, marks]))
            if name and store.add(f"zerostage/join/{name}/taken", 0) == ranks - 1:
                store.set(f"zerostage/join/{name}/holds", "yes")
                return name
        else:
            offered, marks = json.loads(_read(store, "zerostage/join/offer") or '["", []]')
            if offered != name and len(marks) == ranks and marks[rank] == mark:
                name = offered
                store.add(f"zerostage/join/{name}/taken", 1)
            if name and _read(store, f"zerostage/join/{name}/holds"):
                return name
        time.sleep(0.02)
    raise RuntimeError(f"rank {rank} of {ranks} has waited {PATIENCE:.0f} s for the other ranks to start: look at their output")


def _read(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
