"""Real rank processes for tests: a pool that outlives a test, and a watchdog on every call.

    def body(rank, n, **kwargs): ...          # a module-level function of the test file
    results = run(body, n=4, timeout=60, lr=0.1)

`run` has ranks 0 to n-1 call `body` inside a gloo process group of exactly n ranks and
returns their n return values in rank order. Only the process group is new in each call
(some milliseconds); the processes stay, with torch imported and one thread each. They are
forked from a server process that has imported torch and started no thread, so a rank that
had to be killed is replaced in tens of milliseconds.

Functions travel by name, arguments and results as plain pickles (a tensor by its bytes).
"""

from __future__ import annotations

import atexit
import faulthandler
import functools
import gc
import importlib
import multiprocessing
import multiprocessing.util  # noqa: F401  (its exit handler must be registered before ours)
import os
import pickle
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist

MOST_RANKS = 8
#: Seconds that the other ranks get to report as well, after the first one failed.
GRACE = 3.0
#: Seconds that a rank gets to leave its process group after it has reported.
LEAVE = 5.0
#: Seconds within which the death of a process is noticed.
NOTICED = 0.5
_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PRELOAD = ["torch", "torch.distributed.fsdp", "pytest", "transformers.models.llama.modeling_llama"]


@dataclass(frozen=True)
class Failure:
    """How one rank ended that did not return: what it raised, its stack if it hung, or its exit code."""

    rank: int
    kind: str  #: name of the exception class, "Timeout", "Died", or "Unfinished" (stopped because another failed)
    message: str
    details: str  #: the traceback, or the stacks of all threads
    seconds: float  #: since the start of the call

    def __str__(self) -> str:
        return f"rank {self.rank} after {self.seconds:.2f} s: {self.kind}: {self.message}\n{self.details}".rstrip()


class RankFailure(AssertionError):
    """One or more ranks did not return. `failures` holds them, the first in time first."""

    def __init__(self, headline: str, failures: list[Failure], output: str = "") -> None:
        self.failures = failures
        super().__init__("\n\n".join([headline, *map(str, failures)] + ([output] if output else [])))


def run(
    body: Callable[..., Any],
    n: int = 1,
    timeout: float = 60,
    *,
    expect_failure: bool = False,
    group: bool = True,
    group_timeout: float | None = None,
    backend: str = "gloo",
    keep: bool = True,
    **kwargs: Any,
) -> list[Any]:
    """Call `body(rank, n, **kwargs)` on n ranks and return their results in rank order.

    `body` must be a module-level function of a module that can be imported from tests/.
    `timeout` seconds are for the whole call: after them every rank's stacks are dumped, the
    ranks are killed, and the test fails with what was dumped. Each rank starts with seed 0
    and with RANK, LOCAL_RANK, WORLD_SIZE and LOCAL_WORLD_SIZE set. With `group=False` there
    is neither a process group nor any of these variables. `group_timeout` is the process
    group's own timeout in seconds; by default it is longer than `timeout`, so that the
    watchdog speaks first. `keep=False` ends these processes with the call, for a body that
    leaves behind what cannot be undone (DeepSpeed holds on to its process group).

    With `expect_failure=True` a rank that raised or died gives a `Failure` in its place
    of the list instead of failing the test, and every rank gets the whole `timeout` to end by
    itself. A rank that does not end fails the test even then.

    Raises RankFailure, with all ranks' exceptions in the order of time and what they printed.
    """
    __tracebackhide__ = True
    options = dict(group=group, group_timeout=group_timeout, backend=backend)
    return _pool.run(body, n, timeout, expect_failure, keep, options, kwargs)


def alone(body: Callable[..., Any], **kwargs: Any) -> Any:
    """Call `body(0, 1, **kwargs)` in this very process, seeded like a rank, without a process group."""
    _seed()
    return body(0, 1, **kwargs)


def processes() -> Any:
    """The multiprocessing context whose processes start in milliseconds, with torch imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    return context


def close() -> None:
    """End all ranks; the next `run` starts new ones."""
    _pool.close()


def _seed() -> None:
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


# -- The test's side -------------------------------------------------------------------------


class _Rank:
    """One rank process as the test sees it: a connection, and files for what it prints."""

    def __init__(self, context: Any, rank: int, folder: Path) -> None:
        self.rank = rank
        self.output = folder / f"output{rank}"
        self.stacks = folder / f"stacks{rank}"
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(rank, theirs, str(self.output), str(self.stacks)), name=f"rank {rank}")
        self.process.start()
        theirs.close()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()

    def dump_stacks(self) -> None:
        self.stacks.write_bytes(b"")
        os.kill(self.process.pid, signal.SIGUSR1)


class _Pool:
    def __init__(self) -> None:
        self.ranks: dict[int, _Rank] = {}
        self.folder: Path | None = None
        self.store: dist.TCPStore | None = None
        self.calls = 0

    def close(self) -> None:
        self.drop(list(self.ranks))
        self.store = None
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    def drop(self, ranks: list[int]) -> None:
        for rank in ranks:
            self.ranks.pop(rank).kill()

    def grow(self, n: int) -> list[_Rank]:
        if self.folder is None:
            self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
            # One server for all calls, with a prefix for each. A FileStore would do, but who waits in it looks
            # every 10 ms, which makes 100 ms for a call's process group and 10 ms for every further group in it.
            self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        context = processes()
        saved = {name: os.environ.get(name) for name in _ONE_THREAD}
        os.environ.update(dict.fromkeys(_ONE_THREAD, "1"))
        try:
            for rank in range(n):
                if rank in self.ranks and not self.ranks[rank].process.is_alive():
                    self.drop([rank])
                if rank not in self.ranks:
                    self.ranks[rank] = _Rank(context, rank, self.folder)
        finally:
            for name, value in saved.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
        return [self.ranks[rank] for rank in range(n)]

    def run(self, body, n, timeout, expect_failure, keep, options, kwargs) -> list[Any]:
        __tracebackhide__ = True
        if not 1 <= n <= MOST_RANKS:
            raise ValueError(f"n is {n}; the pool has 1 to {MOST_RANKS} ranks")
        if "<" in body.__qualname__:
            raise TypeError(f"{body.__qualname__} is not a module-level function, so ranks cannot import it")
        arguments = pickle.dumps(kwargs)
        ranks = self.grow(n)
        self.calls += 1
        call = dict(
            function=(body.__module__, body.__qualname__),
            n=n,
            arguments=arguments,
            store=(self.store.port, f"call{self.calls}"),
            options={**options, "group_timeout": options["group_timeout"] or timeout + 60},
        )
        try:
            ended, clean = self.gather(ranks, call, timeout, expect_failure)
        except BaseException:
            self.drop(list(range(n)))
            raise
        # Its peers may raise for the connection that a dying process closes before its death is noticed here.
        failures = sorted((e for e in ended if isinstance(e, Failure)), key=lambda f: f.seconds - (f.kind == "Died") * NOTICED)
        hung = any(f.kind in ("Timeout", "Died", "Unfinished") for f in failures)
        failed = [f for f in failures if not expect_failure or f.kind == "Timeout"]
        output = "\n".join(text for rank in ranks if (text := _tail(rank))) if failed else ""
        # Ranks that came to an end as the test expected them to, and left their group, are as good as new.
        if failed or hung or not clean or not keep:
            self.drop(list(range(n)))
        if failed:
            raise RankFailure(f"{len(failed)} of {n} ranks failed in {body.__qualname__}; rank {failures[0].rank} first", failures, output)
        return [e if isinstance(e, Failure) else pickle.loads(e) for e in ended]

    def gather(self, ranks: list[_Rank], call: dict, timeout: float, expect_failure: bool) -> tuple[list[Any], bool]:
        """Each rank's pickled result or Failure, and whether all ranks left their process group."""
        started = time.monotonic()
        ended: dict[int, Any] = {}
        left: set[int] = set()
        deadline, why = started + timeout, "Timeout"
        for rank in ranks:
            try:
                rank.connection.send_bytes(pickle.dumps(call))
            except OSError:
                pass  # It died since the last call; its sentinel says so below.
        while len(left) < len(ranks):
            if len(ended) == len(ranks) and why != "Left":
                deadline, why = time.monotonic() + LEAVE, "Left"
            watched = {r.connection: r for r in ranks if r.rank not in left} | {r.process.sentinel: r for r in ranks if r.rank not in left}
            ready = connection.wait(list(watched), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in {watched[item].rank: watched[item] for item in ready}.values():
                try:
                    kind, value = pickle.loads(rank.connection.recv_bytes())
                except (EOFError, OSError):
                    rank.process.join(LEAVE)
                    left.add(rank.rank)
                    message = f"the process ended with exit code {rank.process.exitcode}"
                    ended.setdefault(rank.rank, Failure(rank.rank, "Died", message, "", time.monotonic() - started))
                else:
                    if kind == "left":
                        left.add(rank.rank)
                    elif kind == "raised":
                        name, text, details, moment = value
                        ended[rank.rank] = Failure(rank.rank, name, text, details, moment - started)
                    else:
                        ended[rank.rank] = value
            if not expect_failure and why == "Timeout" and any(isinstance(e, Failure) for e in ended.values()):
                deadline, why = min(deadline, time.monotonic() + GRACE), "Unfinished"
        late = [rank for rank in ranks if rank.rank not in ended]
        for rank in late:
            rank.dump_stacks()
        seconds = time.monotonic() - started
        for rank in late:
            if why == "Timeout":
                message = f"did not return within {timeout:g} s; it was here:"
            else:
                message = "was still here when another rank had failed:"
            ended[rank.rank] = Failure(rank.rank, why, message, _read_when_written(rank.stacks), seconds)
        return [ended[rank.rank] for rank in ranks], len(left) == len(ranks)


def _read_when_written(path: Path, within: float = 5.0) -> str:
    """The dump in `path`, once it no longer grows: the signal handler writes while we look."""
    text, deadline = "", time.monotonic() + within
    while time.monotonic() < deadline:
        time.sleep(0.1)
        now = path.read_text(errors="replace")
        if now and now == text:
            break
        text = now
    return text or "(no stack: the process did not answer the signal)"


def _tail(rank: _Rank, most: int = 20_000) -> str:
    text = rank.output.read_text(errors="replace").strip() if rank.output.exists() else ""
    return f"---- printed by rank {rank.rank} ----\n{text[-most:]}" if text else ""


_pool = _Pool()
atexit.register(_pool.close)


# -- The rank's side -------------------------------------------------------------------------


def _serve(rank: int, calls: Any, output: str, stacks: str) -> None:
    """A rank's life: take a call, join its group, run it, report, leave the group."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    faulthandler.enable(sys.stderr)
    faulthandler.register(signal.SIGUSR1, open(stacks, "a"), all_threads=True)
    # Ctrl-C reaches the whole terminal; the test's process decides. A handler and not
    # SIG_IGN, which programs started by a test would inherit.
    signal.signal(signal.SIGINT, lambda *_: None)
    torch.set_num_threads(1)
    _explain_asserts()
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (connection.wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    while True:
        try:
            call = pickle.loads(calls.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)
        os.ftruncate(descriptor, 0)
        calls.send_bytes(pickle.dumps(_answer(rank, call)))
        _leave()
        calls.send_bytes(pickle.dumps(("left", None)))


def _answer(rank: int, call: dict) -> tuple[str, Any]:
    # Whatever is alive now stays; collecting after the call then costs only what the call made.
    gc.freeze()
    _seed()
    n = call["n"]
    try:
        module, name = call["function"]
        body = getattr(importlib.import_module(module), name)
        if call["options"]["group"]:
            _join(rank, n, call)
        return "returned", pickle.dumps(body(rank, n, **pickle.loads(call["arguments"])))
    except BaseException as error:
        return "raised", (type(error).__name__, str(error), _traceback(error), time.monotonic())


def _join(rank: int, n: int, call: dict) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", n), ("LOCAL_WORLD_SIZE", n)):
        os.environ[name] = str(value)
    timeout = timedelta(seconds=call["options"]["group_timeout"])
    port, prefix = call["store"]
    store = dist.PrefixStore(prefix, _connected(port))
    store.set_timeout(timeout)
    dist.init_process_group(
        call["options"]["backend"], store=store, rank=rank, world_size=n, timeout=timeout
    )
    # A rank whose body returns at once must not close its connections while another one is still making its own.
    if store.add("joined", 1) == n:
        store.set("all joined", "")
    store.wait(["all joined"])


@functools.cache
def _connected(port: int) -> dist.TCPStore:
    """This process's connection to the store: one for all calls, since to connect can mean to wait for a name server."""
    return dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)


def _leave() -> None:
    """Undo what a call may have left behind in this process."""
    # Models first: their hooks and handles may hold the group's memory and work.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(1)


def _traceback(error: BaseException) -> str:
    """The traceback without this file's own frames."""
    shown = traceback.TracebackException.from_exception(error)
    own = [frame for frame in shown.stack if frame.filename == __file__]
    shown.stack[:] = shown.stack[len(own) :] if shown.stack[: len(own)] == own else shown.stack
    return "".join(shown.format())


def _explain_asserts() -> None:
    """Have a failing assert in a test body show its values, as pytest does in its own process."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config())
    except Exception as error:  # Private names of pytest: without them asserts are only terser.
        print(f"asserts are not explained: {error!r}")
