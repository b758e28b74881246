"""Text files to packed sequences, in an order that does not depend on the number of ranks.

Documents are laid end to end, each followed by the tokenizer's end-of-text token, and cut
every `length` tokens. A sequence's targets are its tokens shifted by one, so each sequence
also sees the first token of the next one and every token is predicted once.

The order: each epoch is a permutation of all sequences, made from the seed and the epoch's number.
How far a run has come is an epoch and how many sequences of its permutation were taken
(`Position`); a step takes the next global batch of them, and what is left over at the end of an
epoch, less than a global batch, is dropped. Neither the number of ranks nor the micro-batch has
a part in it. So a run that goes on from a checkpoint, on whatever number of ranks and
even with another global batch, takes up where it was: no sequence of the epoch comes twice,
and none is left out but those of the short last batch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zerostage.mistakes import InputError
from zerostage.train.config import TrainConfig

#: The label of a position without a target; cross_entropy's default for ignore_index.
IGNORED = -100


def check_files(paths: list[str]) -> None:
    """Raise InputError for the first file that is missing or empty."""
    for path in paths:
        if not os.path.isfile(path):
            raise InputError(f"the data file {path} does not exist or is not a file: check --data and --eval-data")
        if os.path.getsize(path) == 0:
            raise InputError(f"the data file {path} is empty: remove it from --data or --eval-data")


def documents(path: str) -> Iterator[str]:
    """The documents of a file: each line's `text` in JSONL, each row's in Parquet, else the whole file."""
    kind = Path(path).suffix.lower()
    if kind in (".jsonl", ".ndjson"):
        yield from _jsonl(path)
    elif kind == ".parquet":
        yield from _parquet(path)
    else:
        try:
            yield Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it") from None


def _jsonl(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise InputError(f"{path}:{number} is not JSON: {error.msg} at column {error.colno}") from None
            if not isinstance(row, dict) or not isinstance(row.get("text"), str):
                raise InputError(f"{path}:{number} has no 'text' field with a string: each line needs one")
            yield row["text"]


def _parquet(path: str) -> Iterator[str]:
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(path)
    except (arrow.ArrowInvalid, OSError) as error:
        raise InputError(f"{path} is not a Parquet file: {str(error).splitlines()[0]}") from None
    if "text" not in file.schema_arrow.names:
        raise InputError(f"{path} has no 'text' column (it has {', '.join(file.schema_arrow.names)}): rename one")
    for batch in file.iter_batches(columns=["text"]):
        for text in batch.column(0).to_pylist():
            if not isinstance(text, str):
                raise InputError(f"{path} has a row whose 'text' is {text!r}, not a string: remove it")
            yield text


def tokenize(paths: list[str], tokenizer) -> np.ndarray:
    """All documents of `paths` as one int32 array, each document followed by the end-of-text token."""
    check_files(paths)
    end = tokenizer.eos_token_id
    if end is None:
        raise InputError("the model's tokenizer has no end-of-text token: set eos_token in its tokenizer_config.json")
    pieces = []
    for path in paths:
        for text in documents(path):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            pieces.append(np.array([*ids, end], dtype=np.int32))
    if not pieces:
        raise InputError(f"there is no document in {', '.join(paths)}")
    return np.concatenate(pieces)


@dataclass(frozen=True)
class Samples:
    """Sequences of `length` tokens cut from one array of tokens; the last one may be shorter."""

    tokens: np.ndarray
    length: int

    def __len__(self) -> int:
        # The last token is only a target, so it starts no sequence.
        return max(0, -(-(len(self.tokens) - 1) // self.length))

    def batch(self, indices) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of the samples `indices`, both int64 of shape (len(indices), length).

        An index of -1 gives a row without targets. Rows that are short are filled up with
        token 0 and IGNORED labels.
        """
        inputs = np.zeros((len(indices), self.length), dtype=np.int64)
        labels = np.full((len(indices), self.length), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            if index < 0:
                continue
            window = self.tokens[index * self.length : (index + 1) * self.length + 1]
            inputs[row, : len(window) - 1] = window[:-1]
            labels[row, : len(window) - 1] = window[1:]
        return inputs, labels

    def first(self, count: int) -> Samples:
        """The first `count` samples (0: all)."""
        return Samples(self.tokens[: count * self.length + 1], self.length) if count else self


class Position(NamedTuple):
    """How far a run has come: `offset` samples of the permutation of epoch `epoch` were taken."""

    epoch: int = 0
    offset: int = 0


@functools.lru_cache(maxsize=1)
def _permutation(samples: int, epoch: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(samples)


def take(samples: int, global_batch: int, position: Position, seed: int) -> tuple[np.ndarray, Position]:
    """The sample indices of the next global batch from `position` on, in order, and the position after it.

    Where less than a global batch is left of the epoch, it comes from the next epoch. The ranks
    share a global batch out in contiguous parts (`rank_share`).
    """
    if position.offset + global_batch > samples:
        position = Position(position.epoch + 1, 0)
    end = position.offset + global_batch
    return _permutation(samples, position.epoch, seed)[position.offset : end], Position(position.epoch, end)


def steps_left(samples: int, global_batch: int, position: Position, epochs: float) -> int:
    """Whole global batches from `position` to the end of `epochs` epochs, of which a started batch counts."""
    whole, part = int(epochs), epochs - int(epochs)
    per_epoch = samples // global_batch
    of_last = math.ceil(round(part * per_epoch, 6))  # of the epoch that is not a whole one
    if position.epoch > whole:
        return 0
    in_this = samples if position.epoch < whole else of_last * global_batch
    left = max(0, in_this - position.offset) // global_batch
    return left + max(0, whole - position.epoch - 1) * per_epoch + (of_last if position.epoch < whole else 0)


def rank_share(indices: np.ndarray, rank: int, ranks: int, micro_batch: int) -> list[np.ndarray]:
    """The micro-batches of `rank`: its contiguous part of a global batch, cut every `micro_batch` samples."""
    share = len(indices) // ranks
    part = indices[rank * share : (rank + 1) * share]
    return [part[start : start + micro_batch] for start in range(0, share, micro_batch)]


def load(config: TrainConfig, tokenizer) -> tuple[Samples, Samples | None]:
    """The training and the held-out samples of `config`; no held-out ones if it asks for none.

    Raises InputError when the data does not fill one global batch.
    """
    tokens = tokenize(config.data, tokenizer)
    held_out = None
    if config.eval_data:
        held_out = tokenize(config.eval_data, tokenizer)
    elif config.eval_fraction:
        cut = len(tokens) - max(2, round(len(tokens) * config.eval_fraction))
        tokens, held_out = tokens[:cut], tokens[cut:]
    train = Samples(tokens, config.sequence_length)
    if len(train) < config.global_batch:
        raise InputError(
            f"the training data gives {len(train)} sequences of {config.sequence_length} tokens, but one global batch "
            f"needs {config.global_batch}: lower --global-batch (or --accumulation, --micro-batch) or --sequence-length"
        )
    return train, None if held_out is None else Samples(held_out, config.sequence_length).first(config.eval_samples)


def load_once_per_node(config: TrainConfig, tokenizer) -> tuple[Samples, Samples | None]:
    """`load`, but only one rank per node tokenises; the others map the file that it writes."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return load(config, tokenizer)
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, src=0)
    paths = [Path(tempfile.gettempdir(), f"zerostage-{name[0]}-{part}.npy") for part in ("train", "held-out")]
    leader = int(os.environ.get("LOCAL_RANK", "0")) == 0
    try:
        if leader:
            for path, samples in zip(paths, load(config, tokenizer)):
                if samples is not None:
                    np.save(path, samples.tokens)
        dist.barrier()
        parts = [np.load(path, mmap_mode="r") if path.exists() else None for path in paths]
        dist.barrier()
    finally:
        if leader:
            for path in paths:
                try:
                    path.unlink(missing_ok=True)
                except OSError:  # Windows keeps a mapped file; the temporary folder is cleaned by the system
                    pass
    return tuple(None if part is None else Samples(part, config.sequence_length) for part in parts)
