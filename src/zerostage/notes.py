"""What ranks write down for each other in the job's store: what they wait for, and how they ended.

A rank that is stuck in a collective reads the others' notes. From them it finds out that the
ranks wait for each other for ever, that another one failed, and which failed first. So no
rank waits until a transport's timeout, and each one's error names the cause.
"""

from __future__ import annotations

import json
import logging
import multiprocessing.util
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

#: Seconds without progress after which ranks compare what they are waiting for.
STALL = 3.0
#: Seconds after which ranks that all wait for different things are called deadlocked.
DEADLOCK = 10.0
#: Seconds that a rank which caught an exception gets to come back to the others.
RECOVERY = 15.0
#: Seconds after which a rank says what it waits for.
PATIENCE = 30.0

log = logging.getLogger("zerostage")


class OrderError(RuntimeError):
    """Ranks wait for each other in different places, so none would ever go on."""


class PeerError(RuntimeError):
    """Another rank failed or ended, so this one cannot go on. The message says which was first, and why."""


class Notes:
    """This rank's pen and the others' notes, for the ranks of one `World`."""

    def __init__(self, store: Any, name: str, rank: int, global_ranks: Sequence[int], closed: Callable[[], list[int]]) -> None:
        self.store, self.name, self.rank, self.global_ranks = store, name, rank, list(global_ranks)
        self.closed = closed  # the ranks whose connections are closed
        self.steps = 0  # optimizer steps so far
        self._raised = self._told = False
        self._contradiction = ""
        self.process = os.getpid()
        _open.add(self)
        _watch_process()

    @property
    def size(self) -> int:
        return len(self.global_ranks)

    # Waiting

    def compare(self, kind: str, what: str, number: int, waited: float) -> int:
        """Called while stuck. Raises once it is certain that this rank would wait for ever.

        Returns the number of the latest gather for which a rank waits, which may be waiting for this one.
        A rank has one note of what it waits for, whichever of its models that belongs to.
        """
        if self._contradiction:  # what cleans up behind the first error shall not find it out once more
            raise OrderError(self._contradiction)
        mine = [self.name, kind, number, what]
        self.store.set(self._waits(self.rank), json.dumps(mine))
        if first := self._read(self._first):
            raise PeerError(self._cannot_go_on(first, what))
        notes = {rank: json.loads(text) for rank in range(self.size) if (text := self._read(self._waits(rank)))}
        crossed = [note for note in notes.values() if note[:3] == mine[:3] and note != mine]
        stuck = waited > DEADLOCK and len(notes) == self.size and len({tuple(note) for note in notes.values()}) > 1
        if crossed or stuck:
            waits = "; ".join(f"rank {rank} waits for {note[3]} ({note[1]} {note[2]})" for rank, note in sorted(notes.items()))
            # peers that have not looked yet need this rank's note and a moment to read it
            time.sleep(STALL + 1)
            self._contradiction = (
                f"the ranks ran the model's units in different orders and wait for each other: {waits}. "
                "Every rank must run the same modules in the same order in each forward and backward, and call "
                "optimizer.step() and clip_grad_norm_ equally often, of each model in the same order. Where ranks have "
                "different numbers of batches, use zerostage.together"
            )
            raise OrderError(self._contradiction)
        if waited > RECOVERY:
            for rank in range(self.size):
                if rank not in notes and (text := self._read(self._exception(rank))):
                    raise PeerError(self._cannot_go_on(self.ended(text), what))
        if waited > PATIENCE and not self._told:
            self._told = True
            others = sorted(set(range(self.size)) - set(notes))
            log.warning(
                f"rank {self.rank} has waited {waited:.0f} s for {what}; ranks {others} are busy, or wait for something that is "
                "not zerostage's (a barrier, another collective, a batch that does not come)"
            )
        return max([note[2] for note in notes.values() if note[:2] == [self.name, "gather"]], default=0)

    def withdraw(self) -> None:
        """This rank waits no longer."""
        self.store.set(self._waits(self.rank), "")
        self._told = False

    # Ending

    def raised(self, text: str) -> None:
        """An exception leaves a forward or backward on this rank. Whether it is the end, nobody knows yet."""
        self.store.set(self._exception(self.rank), f"rank {self.rank} failed first{self._when()}: {text}")
        self._raised = True

    def recovered(self) -> None:
        """This rank goes on after an exception."""
        if self._raised:
            self.store.set(self._exception(self.rank), "")
            self._raised = False

    def ended(self, text: str) -> str:
        """Note how a rank ended, unless one ended before; returns the note about the first."""
        return self.store.compare_set(self._first, "", text).decode()

    def end(self, error: str) -> None:
        """This process ends, because of `error` or because its program is done."""
        text = f"rank {self.rank} failed first{self._when()}: {error}"
        if not error:
            text = self._read(self._exception(self.rank)) or (
                f"rank {self.rank}'s program came to its end{self._when()}. Every rank must run the same number of forwards, "
                "backwards and steps; zerostage.together stops or joins ranks with fewer batches"
            )
        self.ended(text)
        gone = self.store.add(f"zerostage/gone/{self.name}", 1)
        deadline = time.monotonic() + STALL + 2
        while _keeps(self.store) and gone < self.size and time.monotonic() < deadline:
            time.sleep(0.05)
            gone = self.store.add(f"zerostage/gone/{self.name}", 0)

    def lost(self, what: str) -> PeerError:
        """What to raise where a peer's connection closed while this rank waited for `what`."""
        try:
            deadline = time.monotonic() + 2
            while not (first := self._read(self._first)) and time.monotonic() < deadline:
                time.sleep(0.1)
            if not first:
                gone = self.closed()
                told = [text for rank in gone if (text := self._read(self._exception(rank)))]
                who = f"rank {gone[0]}" if gone else "another rank"
                text = f"{who} ended without a word{self._when()}: it was killed, ran out of memory, or crashed"
                first = self.ended(told[0] if told else text)
        except Exception:  # the store has gone, with the rank that kept it and what it may have noted
            gone = self.closed()
            first = f"rank {gone[0] if gone else 0} ended{self._when()}; why is not known, for the job's store ended with it"
        return PeerError(self._cannot_go_on(first, what))

    def close(self) -> None:
        _open.discard(self)

    def _cannot_go_on(self, first: str, what: str) -> str:
        return f"rank {self.rank} cannot go on: {first}. It was waiting for {what}"

    def _when(self) -> str:
        return f" (after {self.steps} optimizer steps)"

    # Keys

    @property
    def _first(self) -> str:
        return f"zerostage/first/{self.name}"

    def _waits(self, rank: int) -> str:
        return f"zerostage/waits/{self.global_ranks[rank]}"

    def _exception(self, rank: int) -> str:
        return f"zerostage/raised/{self.name}/{rank}"

    def _read(self, key: str) -> str:
        return self.store.get(key).decode() if self.store.check([key]) else ""


def _keeps(store: Any) -> bool:
    """Whether this process keeps the job's store, so that the others' notes end with it."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return isinstance(store, dist.TCPStore) and dist.is_initialized() and dist.get_rank() == 0 and not by_launcher


_open: weakref.WeakSet[Notes] = weakref.WeakSet()
_watched = 0  # the process whose end is being watched: not a child that it forks


def _watch_process() -> None:
    """Have this process note how it ends, as far as it can: not where it is killed."""
    global _watched
    if _watched == os.getpid():
        return
    _watched = os.getpid()
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        _end(error)
        previous(kind, error, trace)

    sys.excepthook = hook
    multiprocessing.util.Finalize(None, _end, exitpriority=100)  # also where atexit is not reached


def _end(error: BaseException | None = None) -> None:
    error = error or sys.exc_info()[1]  # multiprocessing ends a process while the exception is on its way out
    if isinstance(error, SystemExit):
        error = error.__context__
    for notes in [notes for notes in _open if notes.process == os.getpid()]:
        notes.close()
        try:
            notes.end(f"{type(error).__name__}: {error}" if error else "")
        except Exception:  # the store has gone before
            pass
