"""Where checkpoints lie: written beside their place, published whole by one rename, deleted only after that.

A checkpoint is a folder. While it is written it has a hidden name that says who writes it, so
that what a killed process left is known for what it is and removed by the next save. The newest
checkpoint of a folder is found by reading the checkpoints, each of which has a number that
counts up; nothing points at it that could be wrong. All of this is done by one rank.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zerostage.checkpoint.damage import DamagedError

log = logging.getLogger("zerostage")

MANIFEST, INDEX, SUMS, ASSETS = "manifest.json", "index.json", "SHA256SUMS", "assets"
_HOST = re.sub(r"\W", "_", socket.gethostname())
_tokens: dict[int, str] = {}
#: Seconds without a change after which what a process of another host left counts as abandoned.
ABANDONED = 3600.0
_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>partial|replaced|deleted)-(?P<host>.+)-(?P<process>\d+)-(?P<token>\w{8})")


def _token() -> str:
    """Of this process: its id alone comes again, in a restarted container even at once. A fork draws its own."""
    return _tokens.setdefault(os.getpid(), uuid.uuid4().hex[:8])


def beside(path: Path, kind: str) -> Path:
    """The hidden name beside `path` under which this process writes, replaces or deletes it."""
    return path.with_name(f".{path.name}.{kind}-{_HOST}-{os.getpid()}-{_token()}")


def sync(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if path.is_file():  # some file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def write(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a checkpoint of this library, whole or not."""
    return (path / MANIFEST).is_file() or (path / SUMS).is_file()


def manifest(path: Path) -> dict[str, Any]:
    """A checkpoint's manifest. Raises DamagedError where it cannot be read or is not the one whose checksum is listed."""
    try:
        content = (path / MANIFEST).read_bytes()
        found = json.loads(content)
        if not (isinstance(found["sequence"], int) and all(isinstance(size, int) for size in found["files"].values())):
            raise ValueError("it has other values than a manifest has")
    except FileNotFoundError:
        raise DamagedError(f"{path / MANIFEST} is missing") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path / MANIFEST} is damaged: {error}") from None
    if sums(path).get(MANIFEST) != hashlib.sha256(content).hexdigest():
        raise DamagedError(f"{path / MANIFEST} was altered: its checksum is not that in {SUMS}")
    return found


def sums(path: Path) -> dict[str, str]:
    """The checksum of each file of a checkpoint. Raises DamagedError where the list cannot be read."""
    try:
        lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DamagedError(f"{path / SUMS} is missing") from None
    except ValueError as error:
        raise DamagedError(f"{path / SUMS} is damaged: {error}") from None
    found = {}
    for line in lines:
        match = re.fullmatch(r"([0-9a-f]{64})  (\S.*)", line)
        if match is None:
            raise DamagedError(f"{path / SUMS} is damaged: it has the line {line[:80]!r}")
        found[match[2]] = match[1]
    return found


def check_sizes(path: Path) -> list[str]:
    """What is wrong with a checkpoint as far as names and sizes tell: one line for each file, [] where nothing is."""
    try:
        sizes, listed = manifest(path)["files"], sums(path)
    except OSError as error:
        return [str(error)]
    problems = []
    for name, size in sizes.items():
        file = path / name
        if not file.is_file():
            problems.append(f"{file} is missing")
        elif file.stat().st_size != size:
            problems.append(f"{file} has {file.stat().st_size:,} bytes, not {size:,}")
    for name in sorted({*sizes, MANIFEST} ^ set(listed)):
        where = "is not in" if name not in listed else "is in"
        problems.append(f"{path / name} {where} {SUMS}, against {MANIFEST}: one of the two is damaged")
    return problems


def check(path: Path, share: tuple[int, int] = (0, 1)) -> list[str]:
    """`check_sizes`, and the checksum of every file; of several ranks each reads its share (rank, ranks) of the files."""
    if problems := check_sizes(path):
        return problems
    rank, ranks = share
    for number, (name, expected) in enumerate(sorted(sums(path).items())):
        if number % ranks == rank:
            try:
                if digest(path / name) != expected:
                    problems.append(f"{path / name} was altered: its checksum is not that in {SUMS}")
            except OSError as error:
                problems.append(f"{path / name} cannot be read: {error}")
    return problems


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, newest first, whole or not; those without a readable manifest before all others.

    A checkpoint that was about to be replaced when its process was killed is there under its hidden name.
    """
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        hidden = _HIDDEN.fullmatch(path.name)
        if path.is_dir() and is_checkpoint(path) and (not hidden or hidden["kind"] == "replaced"):
            try:
                found.append((manifest(path)["sequence"], path.name, path))
            except OSError:
                found.append((math.inf, path.name, path))  # to be told about
    return [path for *_, path in sorted(found, reverse=True)]


def latest(folder: str | Path) -> Path | None:
    """The newest whole checkpoint in `folder`, by names and sizes; None if there is none.

    Found by reading each checkpoint's manifest. Those that are passed over are logged, with
    the file and what is wrong with it. `load` checks the checksums too.
    """
    for path in newest_first(Path(folder)):
        problems = check_sizes(path)
        if not problems:
            return path
        log.warning(f"passed over the checkpoint {path}: {problems[0]}")
    return None


def check_room(folder: Path, needed: int) -> None:
    """Raise OSError unless the disk of `folder`, which exists, has room for `needed` bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(
            f"a checkpoint in {folder} needs {needed / 1e9:,.3f} GB and the disk has {free / 1e9:,.3f} GB free: make room, "
            "keep fewer checkpoints, or write to another disk"
        )


def prepare(path: Path, needed: int) -> Path:
    """Make the folder in which the checkpoint `path` of `needed` bytes is written; remove what killed processes left beside it."""
    if path.exists() and not is_checkpoint(path) and (path.is_file() or any(path.iterdir())):
        raise OSError(f"{path} exists and is not a checkpoint: give a new folder's name")
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent)
    check_room(path.parent, needed)
    partial = beside(path, "partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir()
    return partial


def clean(folder: Path) -> None:
    """Remove what killed processes left in `folder`; bring back a checkpoint that was about to be replaced."""
    for path in list(folder.iterdir()):
        match = _HIDDEN.fullmatch(path.name)
        if match is None or not path.is_dir() or _in_use(path, match):
            continue
        original = path.with_name(match["name"])
        if match["kind"] == "replaced" and not original.exists() and not check_sizes(path):
            path.rename(original)
            log.warning(f"brought back the checkpoint {original}, which was about to be replaced")
        else:
            shutil.rmtree(path, ignore_errors=True)


def _in_use(path: Path, match: re.Match[str]) -> bool:
    if match["token"] == _token():
        return True
    if match["host"] == _HOST:
        process = int(match["process"])
        return process != os.getpid() and _lives(process)
    try:
        newest = max(entry.stat().st_mtime for entry in (path, *path.rglob("*")))
    except OSError:  # it is being removed
        return True
    return time.time() - newest < ABANDONED


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    try:  # one that has ended and that nobody has waited for, in a container without an init, is there for ever
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return True


def next_sequence(folder: Path) -> int:
    """One more than the highest number of a checkpoint in `folder`."""
    return 1 + max((_sequence(path) for path in newest_first(folder)), default=0)


def _sequence(path: Path) -> int:
    try:
        return manifest(path)["sequence"]
    except OSError:
        return 0


def publish(partial: Path, path: Path, described: dict[str, Any], checksums: dict[str, str]) -> int:
    """Give a written checkpoint its manifest and checksums, check that it is whole, and rename it. Returns its bytes.

    described: the manifest's other entries. checksums: those of the files that are known already, by name.
    """
    for file in sorted(partial.rglob("*")):
        name = file.relative_to(partial).as_posix()
        if file.is_file() and name not in checksums:
            sync(file)
            checksums[name] = digest(file)
    described["files"] = {name: (partial / name).stat().st_size for name in sorted(checksums)}
    write(partial / MANIFEST, json.dumps(described, indent=1).encode())
    checksums[MANIFEST] = digest(partial / MANIFEST)
    write(partial / SUMS, "".join(f"{checksums[name]}  {name}\n" for name in sorted(checksums)).encode())
    for inner in (partial, *(entry for entry in partial.rglob("*") if entry.is_dir())):
        sync(inner)
    if problems := check_sizes(partial):
        raise DamagedError(problems[0])
    old = None
    if path.exists():
        old = beside(path, "replaced")
        path.rename(old)
    partial.rename(path)
    sync(path.parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)
    return sum((path / name).stat().st_size for name in (*checksums, SUMS))


def rotate(path: Path, keep: int) -> list[Path]:
    """Delete the older ones of `path`'s siblings but the newest `keep` whole checkpoints, `path` among them."""
    whole = [other for other in newest_first(path.parent) if not other.name.startswith(".") and not check_sizes(other)]
    surplus = [other for other in whole[keep:] if other != path]
    for other in surplus:
        going = beside(other, "deleted")
        other.rename(going)  # so that it is never half there under its name
        shutil.rmtree(going, ignore_errors=True)
    return surplus


def candidates(path: Path) -> Iterator[Path]:
    """What `path` may mean: itself where it is a checkpoint, else the checkpoints in it, newest first."""
    if is_checkpoint(path):
        yield path
    elif not path.exists():  # killed between the two renames of `publish`
        for other in newest_first(path.parent):
            match = _HIDDEN.fullmatch(other.name)
            if match and match["name"] == path.name:
                yield other
    else:
        yield from newest_first(path)
