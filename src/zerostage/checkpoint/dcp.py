"""A checkpoint that torch.distributed.checkpoint wrote, as FSDP2, DDP and torchtitan runs do, open for reading.

What is the model's, what the optimizer's, is told by the keys themselves, into which DCP flattens
the state dict that the user had:

    app.model.layers.0.weight                        prefix 'app.model.', and the parameter's name
    app.optim.state.layers.0.weight.exp_avg          prefix 'app.optim.'
    app.optim.param_groups.0.lr                      from get_optimizer_state_dict
    app.optim.param_groups.layers.0.weight.lr        the same with flatten_optimizer_state_dict=True

Either prefix may be empty, and what belongs to neither is the user's.
"""

from __future__ import annotations

import logging
import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zerostage.checkpoint.dcp_folder import METADATA, Folder
from zerostage.checkpoint.folder import MANIFEST
from zerostage.checkpoint.source import WEIGHTS, Piece, Source, Stored
from zerostage.mistakes import some

log = logging.getLogger("zerostage")

_GROUPS, _STATE = "param_groups.", "state."
#: Bytes of tensors under one name beside model and optimizer up to which they are read as the user's extra.
MOST_EXTRA = 64 << 20


def recognises(path: Path) -> bool:
    """Whether `path` is a folder of torch.distributed.checkpoint, and not one of zerostage, which has DCP's form too."""
    return (path / METADATA).is_file() and not (path / MANIFEST).exists()


class DCPSource(Source):
    """The checkpoint in the folder `path`. Opening it reads `.metadata` and the optimizer's numbers, none of the large tensors.

    The model's values are its weights: FSDP2 has no second copy of them. Which of them are buffers is not
    stored, so each is in `parameters` and in `buffers()`. With flatten_optimizer_state_dict=True the groups
    are not stored either: parameters with the same hyperparameters make one.

    `model`: the key under which the model was saved, where the checkpoint has several that could be it.

    Raises DamagedError (an OSError) that names the file which is missing, truncated or damaged, and
    ValueError where no model, or more than one, is in the checkpoint.
    """

    def __init__(self, path: str | Path, model: str | None = None) -> None:
        folder = self._folder = Folder(Path(path))
        self._keys = list(folder.paths)
        self._optimizers = sorted({match[1] for key in self._keys if (match := re.match(r"((?:.*?\.)?)param_groups\.", key))})
        trained: list[Any] = [name for prefix in self._optimizers for name in self._optimized(prefix)]
        numbered = any(not isinstance(name, str) for name in trained)
        if numbered:
            trained = []
        others = [key for key in self._keys if not self._is_optimizer(key)]
        self._prefix = _model_prefix(folder, [key for key in others if key in folder.tensors], trained, model)
        self._model = {key.removeprefix(self._prefix): key for key in others if self._is_model(key)}
        known = set(trained)
        self._states = self._find_states(known)
        self.parameters = {name: self._stored(name, key, known) for name, key in self._model.items()}
        self.names = list(self.parameters)
        # DDP's state_dict has a prefix that the model does not know. It may be the model's own, so both names are given.
        self._ddp = "module." if all(name.startswith("module.") for name in self.names) else ""
        if self._ddp:
            self.names = [name.removeprefix(self._ddp) for name in self.names]
            for table in (self.parameters, self._model, self._states):
                table |= {name.removeprefix(self._ddp): value for name, value in table.items()}
        self.optimizer = "" if trained else None
        self.what = f"a torch.distributed.checkpoint (FSDP2) of {len(folder.files)} file{'s'[: len(folder.files) != 1]}"
        if numbered:
            self.what += ", whose optimizer state has numbers in the place of names,"
            log.warning(
                f"{path}: the optimizer state is left out, since it has numbers in the place of the parameters' names: "
                "save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )

    # -- Which key is what -------------------------------------------------------------------

    def _is_optimizer(self, key: str) -> bool:
        return any(key.startswith((prefix + _GROUPS, prefix + _STATE)) for prefix in self._optimizers)

    def _is_model(self, key: str) -> bool:
        # A model's names have dots of their own; at the top level only the path tells them from dots between keys.
        here = key.startswith(self._prefix) if self._prefix else len(self._folder.paths[key]) == 1
        return here and key in self._folder.tensors

    def _optimized(self, prefix: str) -> list[Any]:
        """Names of the parameters in an optimizer's groups (numbers if it was saved by torch.optim's own state_dict)."""
        groups = prefix + _GROUPS
        if groups + "0.params" in self._folder.objects:
            numbers = sorted({int(key.removeprefix(groups).partition(".")[0]) for key in self._keys if key.startswith(groups)})
            return [name for number in numbers for name in self._folder.object(f"{groups}{number}.params")]
        return list(dict.fromkeys(key.removeprefix(groups).rpartition(".")[0] for key in self._keys if key.startswith(groups)))

    def _find_states(self, names: set[str]) -> dict[str, dict[str, str]]:
        """For each parameter the key of each optimizer state."""
        states: dict[str, dict[str, str]] = {}
        for prefix in self._optimizers if names else ():
            for key in self._keys:
                if not key.startswith(prefix + _STATE):
                    continue
                entry = key.removeprefix(prefix + _STATE)
                # Names have dots, and a state may: the name is the longest beginning that is one.
                ends = [at for at in range(len(entry)) if entry[at] == "." and entry[:at] in names]
                if not ends:
                    log.warning(f"{self._folder.path}: {key} is left out: it belongs to no parameter of the optimizer's groups")
                    continue
                states.setdefault(entry[: ends[-1]], {})[entry[ends[-1] + 1 :]] = key
        return states

    def _stored(self, name: str, key: str, trained: set[str]) -> Stored:
        shape, dtype = self._folder.tensors[key]
        terms, scalars = {WEIGHTS: dtype}, {}
        for term, state in self._states.get(name, {}).items():
            if state not in self._folder.tensors:
                scalars[term] = self._value(state)
            elif self._folder.tensors[state][0] == shape and term != "step":
                terms[term] = self._folder.tensors[state][1]
            else:
                scalars[term] = self._folder.tensor(state)
        return Stored(shape, terms, scalars, source=dtype, trainable=name in trained or not trained)

    def _value(self, key: str, default: Any = None) -> Any:
        """What is no tensor; `default`, and a logged line, where reading it could run code."""
        try:
            return self._folder.object(key)
        except pickle.UnpicklingError:
            log.warning(f"{self._folder.path}: {key} is left out: torch.load does not read its type with weights_only=True")
            return default

    # -- What a reader asks for ----------------------------------------------------------------

    @cached_property
    def groups(self) -> list[dict[str, Any]] | None:  # type: ignore[override]
        if self.optimizer is None:
            return None
        groups = [group for prefix in self._optimizers for group in self._groups_of(prefix + _GROUPS)]
        if self._ddp:
            for group in groups:
                group["names"] += [name.removeprefix(self._ddp) for name in group["names"]]
        return groups

    def _groups_of(self, prefix: str) -> list[dict[str, Any]]:
        nested = prefix + "0.params" in self._folder.objects
        found: dict[str, dict[str, Any]] = {}  # by number or name
        left_out = object()
        for key in self._keys:
            if key.startswith(prefix):
                entry = key.removeprefix(prefix)
                owner, _, item = entry.partition(".") if nested else entry.rpartition(".")
                value = self._folder.tensor(key) if key in self._folder.tensors else self._value(key, left_out)
                if value is not left_out:
                    found.setdefault(owner, {})[item] = value
        if nested:
            return [{"names": group.pop("params"), **group} for _, group in sorted(found.items(), key=lambda pair: int(pair[0]))]
        groups: dict[str, dict[str, Any]] = {}
        for name, values in found.items():
            same = repr(sorted((k, v.tolist() if isinstance(v, torch.Tensor) else v) for k, v in values.items()))
            groups.setdefault(same, {"names": [], **values})["names"].append(name)
        return list(groups.values())

    def read(self, term: str, pieces: Sequence[Piece]) -> None:
        """Raises KeyError where a parameter or its `term` is not stored, ValueError for an interval that it has not."""
        self._folder.fill([(self._key(term, piece.name), piece.start, piece.stop, piece.out) for piece in pieces])

    def _key(self, term: str, name: str) -> str:
        if name not in self.parameters:
            raise KeyError(f"{self.what} has no '{name}'")
        if term not in self.parameters[name].terms:
            raise KeyError(f"{self.what} has no {term} of '{name}', only {some(self.parameters[name].terms, 9)}")
        return self._model[name] if term == WEIGHTS else self._states[name][term]

    def buffers(self) -> Mapping[str, torch.Tensor]:  # type: ignore[override]
        """Every entry of the model, each read when it is asked for."""
        return _Entries(self._folder, self._model)

    def extra(self) -> dict[str, Any] | None:
        """What was saved beside model and optimizer, nested as it was.

        Left out with a logged line: what cannot be read safely, and what is as large as a model (averages of weights).
        """
        folder = self._folder
        keys = [key for key in self._keys if not self._is_optimizer(key) and not self._is_model(key)]
        if self._prefix:
            keys = [key for key in keys if not key.startswith(self._prefix)]
        sizes: dict[Any, int] = {}
        for key in keys:
            if key in folder.tensors:
                shape, dtype = folder.tensors[key]
                first = folder.paths[key][0]
                sizes[first] = sizes.get(first, 0) + math.prod(shape) * dtype.itemsize
        for first in [first for first, size in sizes.items() if size > MOST_EXTRA]:
            log.warning(f"{folder.path}: '{first}' is left out: {sizes[first]:,} bytes of tensors are more than an extra has")
        left_out = object()
        found: dict[Any, Any] = {}
        for key in keys:
            path = folder.paths[key]
            if sizes.get(path[0], 0) <= MOST_EXTRA:
                value = folder.tensor(key) if key in folder.tensors else self._value(key, left_out)
                if value is not left_out:
                    inner = found
                    for part in path[:-1]:
                        inner = inner.setdefault(part, {})
                    inner[path[-1]] = value
        return _with_lists(found) or None


def _model_prefix(folder: Folder, tensors: list[str], trained: list[str], wanted: str | None) -> str:
    """What stands before the model's names in their keys: '' or something that ends in a dot. Raises ValueError.

    `trained`: names that the model must have; without any, what it is can only be told by its own name and size.
    """
    known = set(tensors)
    if wanted is not None:
        prefixes = {f"{wanted}." if wanted else ""}
    elif trained:
        prefixes = {key.removesuffix(trained[0]) for key in tensors if f".{key}".endswith(f".{trained[0]}")}
        prefixes = {prefix for prefix in prefixes if all(prefix + name in known for name in trained)}
        if not prefixes:
            raise ValueError(f"{folder.path} has an optimizer's state, but no model with all its parameters ({some(trained)})")
    else:
        sizes: dict[str, int] = {}
        for key in tensors:
            path = [str(part) for part in folder.paths[key]]
            end = path.index("model") + 1 if "model" in path[:-1] else min(len(path) - 1, 1)
            prefix = "".join(f"{part}." for part in path[:end])
            sizes[prefix] = sizes.get(prefix, 0) + math.prod(folder.tensors[key][0])
        prefixes = set(sizes)
    if len(prefixes) > 1:  # such as an average of the weights, which has the same names
        called = sorted((prefix for prefix in prefixes if f".{prefix}".endswith(".model.")), key=lambda prefix: prefix.count("."))
        if called and [prefix.count(".") for prefix in called].count(called[0].count(".")) == 1:
            prefixes = {called[0]}
        elif not trained:  # beside it there may be small states of other things
            prefixes = {prefix for prefix in prefixes if 10 * sizes[prefix] >= max(sizes.values())}
    if not any(key.startswith(tuple(prefixes)) for key in tensors):
        where = f" under {wanted!r}" if wanted else ""
        raise ValueError(f"{folder.path} has no model{where}, only {some(folder.paths) or 'nothing'}")
    if len(prefixes) > 1:
        several = sorted(prefix.removesuffix(".") or "the top level" for prefix in prefixes)
        raise ValueError(
            f"{folder.path} has several models ({some(several)}), and nothing tells which is meant: save it with the model under "
            "the key 'model', or open it with zerostage.checkpoint.dcp.DCPSource(path, model=KEY)"
        )
    return prefixes.pop()


def _with_lists(found: Any) -> Any:
    """Nested dicts, with those made of indices as lists."""
    if not isinstance(found, dict):
        return found
    items = {key: _with_lists(value) for key, value in found.items()}
    return [items[index] for index in sorted(items)] if items and all(isinstance(key, int) for key in items) else items


class _Entries(Mapping):
    """The model's tensors by name, each read when it is asked for."""

    def __init__(self, folder: Folder, keys: dict[str, str]) -> None:
        self._folder, self._keys = folder, keys

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._folder.tensor(self._keys[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
