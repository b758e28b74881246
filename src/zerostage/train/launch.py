"""Start the ranks of a job, or join the job that is there.

Without a launcher, `start` runs the same command once per local rank under torch's elastic
launcher, each rank with the variables that torchrun would set. Under torchrun these
variables are there already; under Slurm `place` derives them. Either way a rank finds its
place in the environment, so there is one code path from there on.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from pathlib import Path

from zerostage.mistakes import InputError, StrictError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
#: Set by `start` for the ranks it starts: the folder for their error reports, and its own process id.
REPORTS, PARENT = "ZEROSTAGE_REPORTS", "ZEROSTAGE_PARENT"
INTERRUPTED, FAILED, STRICT = 130, 1, 4


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


def start(command: list[str], ranks: int, device: str) -> int:
    """Run `command` once per rank on this machine and return the exit code of the whole.

    0 when all ranks end well; 130 after Ctrl-C and 128 + the signal after another one; 4 where
    --strict ended it; else 1, after showing the first rank that failed. The ranks meet at a free port. When one rank
    ends badly the others are ended too. On the CPU a rank has one thread unless
    OMP_NUM_THREADS says otherwise; on Windows USE_LIBUV is 0 unless it is set.
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
    with tempfile.TemporaryDirectory(prefix="zerostage-") as reports:
        os.environ[REPORTS], os.environ[PARENT] = reports, str(os.getpid())
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            monitor_interval=0.1,
        )
        try:
            elastic_launch(config, command[0])(*command[1:])
        except (KeyboardInterrupt, SignalException) as stop:
            number = getattr(stop, "sigval", signal.SIGINT)
            _show_cursor()
            print(f"\nstopped by {signal.Signals(number).name}: all {ranks} ranks have ended", file=sys.stderr)
            return 128 + int(number)
        except ChildFailedError as error:
            _show_cursor()
            text, code = _first_failure(error.failures, Path(reports))
            print(text, file=sys.stderr)
            return code
    return 0


def run_rank(function, *arguments) -> int:
    """Call `function` as one rank and return its exit code; a failure is reported once and ends the process.

    In a rank that `start` began, the report goes to the launcher, which shows only the first.
    Elsewhere it is printed here, under the rank's number, and left for torchrun as well. What
    all ranks say alike (StrictError) is printed by rank 0 only, and the code is 4 on all; torchrun
    itself then ends with 1, as after any failure.
    """
    rank = os.environ.get("RANK", "0")
    reports = os.environ.get(REPORTS)
    if reports:
        threading.Thread(target=_end_with_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
    try:
        function(*arguments)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        code = STRICT if isinstance(error, StrictError) else FAILED
        text = str(error) if isinstance(error, InputError) else traceback.format_exc().rstrip()
        if reports:
            report = Path(reports, f"{rank}.partial")
            values = {"rank": int(rank), "time": time.time(), "text": text, "code": code}
            report.write_text(json.dumps(values), encoding="utf-8")
            report.rename(report.with_suffix(".json"))
            # Where another rank was killed, this one only noticed: give the launcher the time to
            # see that one's end first.
            time.sleep(1)
        else:
            if code == FAILED or rank == "0":
                print(f"rank {rank}: {text}" if "RANK" in os.environ and code == FAILED else text, file=sys.stderr)
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # At once and without destructors: the others are waiting in a collective for this rank,
        # and some backends' destructors wait for the others.
        os._exit(code)


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
    known = [json.loads(path.read_text(encoding="utf-8")) for path in reports.glob("*.json")]
    if known:
        first = min(known, key=lambda report: report["time"])
        who = f"rank {first['rank']} failed: " if first["code"] == FAILED else ""
        return who + first["text"], first["code"]
    return _ended(*next(iter(failures.items()))), FAILED


def _ended(rank: int, failure) -> str:
    if failure.exitcode >= 0:
        return f"rank {rank} ended with exit code {failure.exitcode}; the other ranks were ended"
    hint = "; the system does this when memory runs out" if failure.exitcode == -9 else ""
    return f"rank {rank} was ended by {failure.signal_name()}{hint}; the other ranks were ended"


def _end_with_parent(parent: int) -> None:
    """End this rank when its launcher is gone, however it went: ranks run in sessions of their own."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


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
