"""Start the ranks of a job, or join the job that is there.

Without a launcher, `start` runs the same command once per local rank under torch's elastic
launcher, each rank with the variables that torchrun would set. Under torchrun these
variables are there already; under Slurm `place` derives them. Either way a rank finds its
place in the environment, so there is one code path from there on.

`start` passes SIGTERM on to the ranks and waits for their end, however long a save takes; a
second one ends all at once. Under torchrun it is torchrun that passes it on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError
from zerostage.train.ending import (
    FAILED,
    ONE_SIGNAL,
    PARENT,
    REPORTS,
    STOPPED,
    TERMINATED,
    on_sigterm,
    read_reports,
    run_rank,
    told,
)

__all__ = ["default_ranks", "place", "quiet_interrupt", "run_rank", "start"]

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")


def place(environ: dict[str, str]) -> bool:
    """Whether this process is a rank of a job that is already there; completes `environ` for Slurm.

    A Slurm task that is alone is not: it starts its own ranks. Raises InputError naming the
    missing variables when only some of a launcher's are set.
    """
    if "RANK" not in environ and "SLURM_PROCID" in environ and environ.get("SLURM_NTASKS") != "1":
        _require(SLURM, environ)
        _from_slurm(environ)
        _require((*SLURM, "MASTER_ADDR", "MASTER_PORT"), environ)
    if not any(name in environ for name in TORCHRUN):
        return False
    _require(TORCHRUN, environ)
    return True


def default_ranks(device: str) -> int:
    """One rank per GPU of this machine, or 1."""
    if device == "cpu":
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def additions(environ: dict[str, str], device: str, platform: str) -> dict[str, str]:
    """What ranks on this `platform` (as in `sys.platform`) need in their environment that `environ` does not decide."""
    needed = {}
    if device == "cpu":
        needed["OMP_NUM_THREADS"] = "1"  # more threads than cores would only take turns
    if platform == "win32":
        needed["USE_LIBUV"] = "0"  # torch's Windows builds come without libuv
    return {name: value for name, value in needed.items() if name not in environ}


def start(command: list[str], ranks: int, device: str, max_restarts: int = 0) -> int:
    """Run `command` once per rank on this machine and return the exit code of the whole.

    0 when all ranks end well; 130 after Ctrl-C and 128 + the signal after another one; 4 where
    --strict ended it; else 1, after showing the first rank that failed. The ranks meet at a free port. When one rank
    ends badly the others are ended too, and all are started anew up to `max_restarts` times. On the CPU
    a rank has one thread unless OMP_NUM_THREADS says otherwise; on Windows USE_LIBUV is 0 unless it is set.
    """
    added = additions(os.environ, device, sys.platform)
    os.environ.update(added)
    if "USE_LIBUV" in added:
        print("USE_LIBUV=0 is set for the ranks: torch's Windows builds come without libuv", file=sys.stderr)
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent logs each failure several times over; what matters is printed below, once.
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="zerostage-") as folder:
        os.environ[REPORTS], os.environ[PARENT] = folder, str(os.getpid())
        reports = Path(folder)
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=max_restarts,
            monitor_interval=0.1,
        )
        before = _take_over_sigterm(config, reports, ranks)
        try:
            elastic_launch(config, command[0])(*command[1:])
        except (KeyboardInterrupt, SignalException) as stop:
            number = getattr(stop, "sigval", signal.SIGINT)
            _show_cursor()
            if (reports / STOPPED).exists():
                return TERMINATED
            if failed := [report for report in read_reports(reports) if not report["peer"]]:
                print(told(failed[0]), file=sys.stderr)
            print(f"\nstopped by {signal.Signals(number).name}: all {ranks} ranks have ended", file=sys.stderr)
            return 128 + int(number)
        except ChildFailedError as error:
            _show_cursor()
            if (reports / STOPPED).exists():
                return TERMINATED
            text, code = _first_failure(error.failures, reports)
            print(text, file=sys.stderr)
            return code
        finally:
            on_sigterm(before)
    return 0


def _take_over_sigterm(config: Any, reports: Path, ranks: int) -> Any:
    """Have SIGTERM passed on to the ranks, and wait for their end: torch's agent would kill them after 30 seconds.

    Returns the handler that was there before.
    """
    from torch.distributed.elastic.multiprocessing import SignalException

    others = "SIGINT,SIGHUP,SIGQUIT"
    if any(field.name == "signals_to_handle" for field in dataclasses.fields(config)):
        config.signals_to_handle = others
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = others  # where the agent has no such setting
    asked: list[float] = []

    def pass_on(number: int, _: Any) -> None:
        processes = [int(path.read_text()) for path in reports.glob("process-*") if path.read_text()]
        if asked and time.monotonic() - asked[0] < ONE_SIGNAL:
            return
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL if asked else signal.SIGTERM)
        if not asked and len(processes) == ranks:  # else they have only just begun
            asked.append(time.monotonic())
            while [process for process in processes if _runs(process)]:
                time.sleep(0.05)
        raise SignalException(f"got signal {number}", sigval=signal.Signals(number))

    return on_sigterm(pass_on)


def _runs(child: int) -> bool:
    """Whether a child process has not ended yet."""
    try:
        return os.waitpid(child, os.WNOHANG)[0] == 0
    except ChildProcessError:  # its end was noticed before
        return False


def quiet_interrupt() -> None:
    """Let Ctrl-C end this rank without a traceback; whoever started the ranks reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _first_failure(failures: dict, reports: Path) -> tuple[str, int]:
    """What to print about the rank that failed first, and its exit code; the others failed because it went away."""
    # A rank that the system ended (out of memory, a crash) has left no report; one that was ended
    # by SIGTERM was most likely ended by the launcher, because of another.
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:
            return _ended(rank, failure), FAILED
    if known := read_reports(reports):
        return told(known[0]), known[0]["code"]
    return _ended(*next(iter(failures.items()))), FAILED


def _ended(rank: int, failure) -> str:
    if failure.exitcode >= 0:
        return f"rank {rank} ended with exit code {failure.exitcode}; the other ranks were ended"
    hint = "; the system does this when memory runs out" if failure.exitcode == -9 else ""
    return f"rank {rank} was ended by {failure.signal_name()}{hint}; the other ranks were ended"


def _show_cursor() -> None:
    """A rank that is ended while it draws a progress bar leaves the terminal without a cursor."""
    if sys.stdout.isatty():
        sys.stdout.write("\033[?25h")
        sys.stdout.flush()


def _require(names: tuple[str, ...], environ: dict[str, str]) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        found = ", ".join(name for name in names if name in environ)
        raise InputError(
            f"the environment has {found} but lacks {', '.join(missing)}: start with torchrun or srun, "
            "or unset them all to let zerostage start its own ranks"
        )
    for name in names:
        if name not in ("MASTER_ADDR",) and not environ[name].isdigit():
            raise InputError(f"the environment's {name} is {environ[name]!r}; it must be a whole number")


def _from_slurm(environ: dict[str, str]) -> None:
    """Set torchrun's variables from srun's. The first node of the step is where the ranks meet."""
    environ["RANK"] = environ["SLURM_PROCID"]
    environ["WORLD_SIZE"] = environ["SLURM_NTASKS"]
    environ["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    nodes = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if "MASTER_ADDR" not in environ and nodes:
        environ["MASTER_ADDR"] = first_node(nodes)
    if "MASTER_PORT" not in environ and environ.get("SLURM_JOB_ID", "").isdigit():
        # All ranks must name the same port without talking: the job and step numbers give one
        # that two jobs on a node do not share.
        job, step = int(environ["SLURM_JOB_ID"]), environ.get("SLURM_STEP_ID", "0")
        environ["MASTER_PORT"] = str(20000 + (job * 16 + int(step if step.isdigit() else 0)) % 12000)


def first_node(nodes: str) -> str:
    """The first host of a Slurm node list: 'a1' for 'a1,a2' and 'gpu03' for 'gpu[03-05,09]'."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\]([^,]*))?", nodes)
    return "".join(part or "" for part in match.groups())
