"""All-gather and reduce-scatter of flat buffers among ranks; the bytes they send; who waits for whom.

Two primitives carry everything. `gather` completes a buffer of which each rank holds one
equal part, in place. `exchange` hands each rank the parts of everybody's buffer that fall in
its own slice; `tree_sum` then adds them in a fixed order. Together the latter are a
reduce-scatter: the same bytes, one rounding, and the same bits at every partition.

Over gloo both are pairs of tagged sends and receives, measured two to five times faster than
its all-gather and reduce-scatter, and messages of different units can never be mistaken
for one another. Over NCCL they are its all-gather and all-to-all, and so they are over torch's
"fake" backend, which copies this rank's part into every place: no rank's true values, but all
of its memory, at any number of ranks.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zerostage.notes import STALL, Notes
from zerostage.partition import Partition
from zerostage.timeline import Timeline

#: Elements per piece of a reduction or an optimizer update on a CPU: fp32 pieces of this size stay in its cache.
CHUNK = 262_144
#: The same on an accelerator, where a piece must be worth a kernel launch.
LARGE_CHUNK = 16_777_216
_UNTIMED = nullcontext()
#: Tag of messages that nobody receives.
PROBE = 2**31 - 1


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


def piece_size(device: torch.device) -> int:
    """Elements to work on at a time, so that no wide copy of a whole buffer is ever made."""
    return CHUNK if device.type == "cpu" else LARGE_CHUNK


class Meter:
    """Bytes sent by this rank, and calls, by collective."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def add(self, name: str, sent: int) -> None:
        self.bytes[name] += sent
        self.calls[name] += 1

    def reset(self) -> None:
        self.bytes.clear()
        self.calls.clear()


class Gauge:
    """Bytes held for a while, now and at most so far."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def change(self, by: int) -> None:
        self.now += by
        self.peak = max(self.peak, self.now)


class Pending:
    """A collective under way. `wait` returns when its result is there (on CUDA: for the current stream)."""

    def __init__(self, what: str = "", channel: Channel | None = None, works: Sequence[Any] = (), number: int = 0) -> None:
        self.what, self.number = what, number
        self._channel = channel
        self._works = works
        self._issued = time.time_ns()
        self._done = threading.Event()
        self._error: BaseException | None = None
        if channel is None:
            self._done.set()

    def complete(self) -> None:
        """Block until the messages have arrived (runs on the channel's thread)."""
        try:
            for place in range(len(self._works)):  # no variable that would keep the last one alive here
                self._works[place].wait()
        except BaseException as error:
            self._error = error
        if (timeline := self._channel.world.timeline) is not None:
            timeline.network.append((self._channel.kind, self.what, self._issued, time.time_ns()))
        self._done.set()

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._done.is_set()

    def wait(self) -> None:
        if self._channel is not None and not self._done.is_set():
            with self._channel.world.span("waiting", self.what):
                self._channel.wait(self, self._done)
        self._works = ()  # buffers are freed by the thread that made them, at a known moment
        if self._error is not None:
            raise self._channel.world.notes.lost(self.what) from None


def proceed(under_way: list[tuple[Iterator[Pending], Pending]], block: bool = True) -> list[tuple[Iterator[Pending], Pending]]:
    """Await each collective and issue the one that follows it; without `block` only where that is no wait."""
    going = []
    for steps, pending in under_way:
        if block or pending.ready:
            pending.wait()
            following = next(steps, None)
            if following is not None:
                going.append((steps, following))
        else:
            going.append((steps, pending))
    return going


class StreamPending(Pending):
    """A collective on a CUDA stream: waiting orders the current stream behind it and does not block the host."""

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works = ()


class Channel:
    """Waits for collectives of one kind, in the order in which they were issued, on a thread of its own.

    A gloo receive cannot be polled or cancelled. Blocking in it on a thread leaves the main
    thread able to notice that ranks disagree, and to answer to Ctrl-C.
    """

    def __init__(self, world: World, kind: str) -> None:
        self.world, self.kind = world, kind
        self.issued = 0
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        thread = threading.Thread(target=_complete_all, args=(self._queue,), name=f"zerostage-{kind}", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _end, thread, self._queue)  # with the channel, or at exit

    def issue(self, what: str, works: Sequence[Any]) -> Pending:
        self.issued += 1
        pending = Pending(what, self, works, self.issued)
        self._queue.put(pending)
        return pending

    def wait(self, pending: Pending, done: threading.Event) -> None:
        waited = time.monotonic()
        while not done.wait(STALL):
            needed = self.world.notes.compare(self.kind, pending.what, pending.number, time.monotonic() - waited)
            self.world.help(needed)
        if time.monotonic() - waited > STALL:
            self.world.notes.withdraw()


def _end(thread: threading.Thread, pendings: queue.SimpleQueue[Pending | None]) -> None:
    pendings.put(None)
    if thread is not threading.current_thread():
        thread.join(timeout=1.0)  # a thread that is left in a receive must not hold up the end of the process


def _complete_all(pendings: queue.SimpleQueue[Pending | None]) -> None:
    while (pending := pendings.get()) is not None:
        pending.complete()
        del pending


class Team:
    """The ranks among which one level of a partition divides a term, in slice order."""

    def __init__(self, world: World, ranks: Sequence[int]) -> None:
        self.world = world
        self.ranks = list(ranks)  # within the world
        self.size = len(ranks)
        self.index = self.ranks.index(world.rank)
        self.group: Any = None  # a process group of its own, where the backend needs one

    def gather(self, buffer: torch.Tensor, what: str, tag: int) -> Pending:
        """Complete `buffer`, of which this rank holds part `index` of `size` equal parts, in place."""
        if self.size == 1:
            return Pending()
        mine = self._part(buffer)
        self.world.meter.add("all_gather", (self.size - 1) * mine.nbytes)
        if self.world.streams:
            work = _all_gather(buffer, mine, group=self.group, async_op=True)
            return StreamPending(works=(work,))
        works, parts = [], buffer.chunk(self.size)
        with self.world.span("gather", what):
            for peer in self._others():
                works.append(self.world.receive(parts[peer], self.ranks[peer], 2 * tag))
                works.append(self.world.send(mine, self.ranks[peer], 2 * tag))
        return self.world.gathers.issue(what, works)

    def exchange(self, buffer: torch.Tensor, what: str, tag: int) -> tuple[Pending, Sequence[torch.Tensor] | torch.Tensor]:
        """Hand part i of `buffer` to rank i. Returns every rank's part `index`, in rank order, once awaited.

        These are the rows of one tensor, or a list in which this rank's own part is a view of
        `buffer`, which must stay untouched until then.
        """
        mine = self._part(buffer)
        if self.size == 1:
            return Pending(), [mine]
        self.world.meter.add("reduce_scatter", (self.size - 1) * mine.nbytes)
        if self.world.streams:
            received = torch.empty_like(buffer)
            work = dist.all_to_all_single(received, buffer, group=self.group, async_op=True)
            return StreamPending(works=(work,)), received.view(self.size, -1)
        works, parts = [], buffer.chunk(self.size)
        received = list(parts)
        with self.world.span("reduce", what):
            for peer in self._others():
                received[peer] = torch.empty_like(mine)
                works.append(self.world.receive(received[peer], self.ranks[peer], 2 * tag + 1))
                works.append(self.world.send(parts[peer], self.ranks[peer], 2 * tag + 1))
        return self.world.reductions.issue(what, works), received

    def _part(self, buffer: torch.Tensor) -> torch.Tensor:
        size = buffer.numel() // self.size  # chunk() would make as many views as there are ranks
        return buffer[self.index * size : (self.index + 1) * size]

    def _others(self) -> list[int]:
        """The other members, each rank starting with its neighbour so that no one is everybody's first."""
        return [(self.index + step) % self.size for step in range(1, self.size)]


def tree_sum(
    parts: Sequence[torch.Tensor] | torch.Tensor, out: torch.Tensor, divisor: int = 1, add: torch.Tensor | None = None
) -> None:
    """out = sum(parts) / divisor (+ add), computed in fp32 (fp64 for fp64) and rounded once to out's dtype.

    Neighbours are added first, then pairs of neighbours, and so on: the tree over n ranks
    contains the tree over any aligned power of two of them, so reducing first within such
    nodes and then across them gives the same bits. `out` and `add` may be one of the parts.

    Parts may be the rows of one tensor: then the number of calls does not grow with theirs.
    """
    if len(parts) == 1 and divisor == 1 and add is None:
        out.copy_(parts[0])
        return
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    size = piece_size(out.device)
    rows = isinstance(parts, torch.Tensor)
    if rows:  # half of them are wide at a time
        size = max(1, 2 * size // len(parts))
    # torch adds two bf16 numbers in fp32 and rounds once, and bf16 has the range of fp32
    pair = len(parts) == 2 and add is None and {part.dtype for part in parts} == {out.dtype} <= {wide, torch.bfloat16}
    for start in range(0, out.numel(), size):
        piece = slice(start, start + size)
        place = out[piece]
        if pair:
            result = torch.add(parts[0][piece], parts[1][piece], out=place)
        elif rows:
            result = _tree(parts[:, piece], wide)
        else:
            result = _subtree([part[piece] for part in parts], wide)
        if divisor > 1:
            result.div_(divisor)
        if add is not None:
            result.add_(add[piece])
        if result is not place:
            place.copy_(result)


def _tree(rows: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """`_subtree` of the rows of one tensor, a whole layer of the tree at a time; of an odd number the last goes on as it is."""
    total = rows[::2].to(wide, copy=True)
    total[: len(rows) // 2].add_(rows[1::2])
    while len(total) > 1:
        total[: len(total) // 2 * 2 : 2].add_(total[1::2])
        total = total[::2]
    return total[0]


def _subtree(parts: Sequence[torch.Tensor], wide: torch.dtype) -> torch.Tensor:
    """The sum of `parts` in memory of its own; no more wide copies at a time than the tree is deep."""
    if len(parts) == 1:
        return parts[0].to(wide, copy=True)
    middle = 2 ** ((len(parts) - 1).bit_length() - 1)
    return _subtree(parts[:middle], wide).add_(_subtree(parts[middle:], wide))


class World:
    """The ranks that train together under one partition, and how they talk."""

    def __init__(self, group: Any, partition: Partition | None, device: torch.device, place: Callable[[int], Partition]):
        start_from_environment(device)
        self.device = device
        self.meter = Meter()
        self.gathered, self.in_flight = Gauge(), Gauge()
        self.distributed = dist.is_initialized()
        self.rank = dist.get_rank(group) if self.distributed else 0
        self.size = dist.get_world_size(group) if self.distributed else 1
        self.global_ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if self.distributed else [0]
        self.partition = (partition or place(self.size)).check(self.size)
        # torch's "fake" backend: one process stands for a rank of many, and there is nobody to talk to
        self.alone = self.distributed and dist.get_backend(group) == "fake"
        self.streams = self.distributed and (device.type == "cuda" or self.alone)
        self._data: Any = None
        self.saving: Any = None  # the group of a thread that saves while the others are in use; None for one rank
        self._to_destroy: list[Any] = []
        self.notes: Notes | None = None
        self.timeline: Timeline | None = None  # while somebody traces
        self.help: Callable[[int], None] = lambda needed: None  # issue gathers up to a number, while stuck
        if self.distributed and self.size > 1:
            # groups of our own, so that a user's collectives and ours never pair up; one for each kind of
            # agreement, so that where ranks disagree about what comes next they wait and find out
            self._data, self._votes, self._norms, self._objects, self.saving = (
                self._new_group(self.global_ranks, "gloo") for _ in range(5)
            )
            store = dist.HashStore() if self.alone else dist.distributed_c10d._get_default_store()
            self.notes = Notes(store, self._data.group_name, self.rank, self.global_ranks, self.closed)
            self.gathers = Channel(self, "gather")
            self.reductions = Channel(self, "reduction")
            self.controls = Channel(self, "agreement")
        self.teams = [self._team(level) for level in range(4)]

    @property
    def is_whole(self) -> bool:
        """Whether these are all ranks of the job."""
        return not self.distributed or self.size == dist.get_world_size()

    def _team(self, level: int) -> Team:
        radices = self.partition.levels(self.size)
        apart = math.prod(radices[:level])  # from one member to the next
        first = self.rank - self.partition.digits(self.rank, self.size)[level] * apart
        team = Team(self, range(first, first + radices[level] * apart, apart))
        if self.streams and team.size > 1:
            team.group = self._new_group([self.global_ranks[rank] for rank in team.ranks], "nccl")
        return team

    def _new_group(self, ranks: list[int], backend: str) -> Any:
        part = len(ranks) < dist.get_world_size()
        backend = "fake" if self.alone else backend
        # only the members of a part make it: the other ranks may train another model meanwhile
        made = dist.new_group(ranks, timedelta(hours=2), backend, use_local_synchronization=part)
        if not part:
            # torch names a part by its ranks, and would take the next one for this one if this one were destroyed
            self._to_destroy.append(made)
        return made

    def span(self, kind: str, what: str) -> AbstractContextManager[None]:
        """Note what is done in a block on the timeline, if there is one."""
        return self.timeline.span(kind, what) if self.timeline is not None else _UNTIMED

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        try:
            return self._isend(tensor, rank, tag)
        except RuntimeError:  # the connection was closed before
            raise self.notes.lost(f"rank {rank}, to which it was about to send") from None

    def _isend(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        return dist.isend(_raw(tensor), group=self._data, group_dst=rank, tag=tag)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        try:
            return dist.irecv(_raw(tensor), group=self._data, group_src=rank, tag=tag)
        except RuntimeError:
            raise self.notes.lost(f"rank {rank}, from which it was about to receive") from None

    # Agreement: small, on the host, counted under its own name.

    def maximum(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The elementwise maximum over ranks of a CPU tensor, in place."""
        if self.size > 1:
            self.meter.add("agreement", values.nbytes)
            self.controls.issue(what, (dist.all_reduce(values, dist.ReduceOp.MAX, self._votes, async_op=True),)).wait()
        return values

    def vote(self, votes: Sequence[bool], what: str) -> list[bool]:
        """For each of some questions, whether any rank says yes."""
        if self.size == 1:
            return list(votes)
        if self.alone:  # without a tensor, whose values torch's FakeTensorMode would not have
            self.meter.add("agreement", len(votes))
            return list(votes)
        return [bool(vote) for vote in self.maximum(torch.tensor(votes, dtype=torch.uint8), what).tolist()]

    def collect(self, value: float, what: str) -> list[float]:
        """Every rank's value (fp64), in rank order, the same list on all ranks."""
        if self.size == 1:
            return [value]
        values = torch.zeros(self.size, dtype=torch.float64)
        values[self.rank] = value
        self.meter.add("agreement", values.nbytes)
        self.controls.issue(what, (dist.all_reduce(values, group=self._norms, async_op=True),)).wait()
        return values.tolist()

    def collect_objects(self, value: Any, what: str) -> list[Any]:
        """Every rank's picklable value, in rank order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        gather = partial(dist.all_gather_object, values, value, group=self._objects)
        self.controls.issue(what, (_Call(gather),)).wait()
        return values

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        """Rank 0's values to every rank, in place."""
        if self.size == 1:
            return
        self.meter.add("broadcast", tensor.nbytes if self.rank == 0 else 0)
        if self.alone:
            return
        host = tensor.detach().cpu().contiguous()
        self.controls.issue(what, (dist.broadcast(_raw(host), group=self._data, group_src=0, async_op=True),)).wait()
        if host.data_ptr() != tensor.data_ptr():
            tensor.copy_(host)

    def closed(self) -> list[int]:
        """The ranks whose connections to this one are closed."""
        gone = []
        for rank in range(self.size):
            try:
                if rank != self.rank:
                    self._isend(torch.zeros(1, dtype=torch.uint8), rank, PROBE)
            except RuntimeError:
                gone.append(rank)
        return gone

    def close(self) -> None:
        """Release threads and process groups. Nothing may be pending."""
        if self.size > 1:
            self.notes.close()
            for channel in (self.gathers, self.reductions, self.controls):
                channel.close()
            for group in self._to_destroy:
                dist.destroy_process_group(group)


class _Call:
    """A blocking call with a Work's interface."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.wait = function


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes: a transport needs no opinion about dtypes."""
    return tensor.reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def start_from_environment(device: torch.device) -> None:
    """Initialise torch.distributed where a launcher has set the environment and the script has not done it."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise RuntimeError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set but {', '.join(missing)} is not: start the script with "
            "torchrun, or unset WORLD_SIZE to run on one rank"
        )
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
