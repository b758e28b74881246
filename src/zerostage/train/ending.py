"""How a rank ends: because all is done, because of SIGTERM, or because of a failure, which is reported once.

SIGTERM means that the node is wanted back. A rank of a run with checkpoints ends the step in
hand, saves, and leaves with `Stopped`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError, StrictError

#: Set by `start` for the ranks it starts: the folder for their error reports, and its own process id.
REPORTS, PARENT = "ZEROSTAGE_REPORTS", "ZEROSTAGE_PARENT"
INTERRUPTED, TERMINATED, FAILED, STRICT = 130, 143, 1, 4
#: In the folder of reports: that all ranks have stopped because of SIGTERM.
STOPPED = "stopped"
#: Seconds within which two SIGTERMs are one: a batch system sends it to every process of a job, launchers pass theirs on.
ONE_SIGNAL = 1.0


class Stopped(Exception):
    """The run ends here, in good order, because of SIGTERM: all ranks raise it. The text says how to go on. Exit code 143."""


class Termination:
    """SIGTERM as a wish: `asked` tells of it. A second one, later, ends this process at once."""

    def __init__(self) -> None:
        self._first: float | None = None
        self._before = on_sigterm(self._note)

    @property
    def asked(self) -> bool:
        return self._first is not None

    def _note(self, *_: Any) -> None:
        if self._first is None:
            self._first = time.monotonic()
        elif time.monotonic() - self._first > ONE_SIGNAL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self, stopped: bool = False) -> None:
        """As it was before; where the run has stopped, no more: a launcher ends the rest once one rank is gone."""
        on_sigterm(signal.SIG_IGN if stopped else self._before)


def on_sigterm(handler: Any) -> Any:
    """Install a handler and return the one before; threads cannot."""
    if threading.current_thread() is threading.main_thread():
        return signal.signal(signal.SIGTERM, handler or signal.SIG_DFL)
    return None


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """What a failure within is reported with: 'rank 1 failed in step 3: ...'."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "during"):
            error.during = what
        raise


def generation() -> int:
    """How often torch's launcher has started the ranks anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def restarted() -> bool:
    """Whether this job was started anew, by torch's launcher or by Slurm, with the command that it began with."""
    return generation() > 0 or os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")


def run_rank(function, *arguments) -> int:
    """Call `function` as one rank and return its exit code; a failure is reported once and ends the process.

    In a rank that `start` began, the report goes to the launcher, which shows only the first.
    Elsewhere it is printed here, under the rank's number, and left for torchrun as well. What
    all ranks say alike (StrictError) is printed by rank 0 only, and the code is 4 on all; torchrun
    itself then ends with 1, as after any failure.
    """
    rank = os.environ.get("RANK", "0")
    reports = Path(os.environ[REPORTS]) if os.environ.get(REPORTS) else None
    if reports:
        threading.Thread(target=_end_with_parent, args=(int(os.environ[PARENT]),), daemon=True).start()
        if (reports / STOPPED).exists():  # the launcher takes the end of a stopped rank for a failure, and starts it anew
            return TERMINATED
        (reports / f"process-{rank}").write_text(str(os.getpid()))
        if rank == "0" and generation():
            before = read_reports(reports, generation() - 1)
            why = told(before[0]) if before else "a rank was ended by the system"
            print(f"restart {generation()}: {why}", file=sys.stderr, flush=True)
    try:
        function(*arguments)
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except Stopped as stop:
        if reports:
            (reports / STOPPED).touch()
        if rank == "0":
            print(stop, file=sys.stderr)
        return TERMINATED
    except BaseException as error:
        code = STRICT if isinstance(error, StrictError) else FAILED
        text = str(error) if isinstance(error, InputError) or _is_of_peer(error) else traceback.format_exc().rstrip()
        report = {
            "rank": int(rank),
            "time": time.time(),
            "during": f" {error.during}" if hasattr(error, "during") else "",
            "text": text,
            "code": code,
            "peer": _is_of_peer(error),
        }
        if reports:
            partial = reports / f"{generation()}-{rank}.partial"
            partial.write_text(json.dumps(report), encoding="utf-8")
            partial.rename(partial.with_suffix(".json"))
            # Where another rank was killed, this one only noticed: give the launcher the time to
            # see that one's end first.
            time.sleep(1)
        else:
            if code == FAILED or rank == "0":
                print(told(report) if "RANK" in os.environ else text, file=sys.stderr)
            from torch.distributed.elastic.multiprocessing.errors import get_error_handler

            get_error_handler().record_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        # At once and without destructors: the others are waiting in a collective for this rank,
        # and some backends' destructors wait for the others.
        os._exit(code)


def _is_of_peer(error: BaseException) -> bool:
    """Whether this rank only noticed that another one had failed."""
    notes = sys.modules.get("zerostage.notes")  # imports torch, which a rank that ends early has not
    return notes is not None and isinstance(error, notes.PeerError)


def read_reports(folder: Path, start: int | None = None) -> list[dict[str, Any]]:
    """What the ranks of one start (the last one that has any) reported, the first in time first."""
    found: dict[int, list[dict[str, Any]]] = {}
    for path in folder.glob("*-*.json"):
        found.setdefault(int(path.name.split("-")[0]), []).append(json.loads(path.read_text(encoding="utf-8")))
    if start is None:
        start = max(found, default=0)
    return sorted(found.get(start, []), key=lambda report: (report["peer"], report["time"]))


def told(report: dict[str, Any]) -> str:
    """A report in words. What --strict found is said without a rank: all say it alike."""
    return f"rank {report['rank']} failed{report['during']}: {report['text']}" if report["code"] == FAILED else report["text"]


def _end_with_parent(parent: int) -> None:
    """End this rank when its launcher is gone, however it went: ranks run in sessions of their own."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
