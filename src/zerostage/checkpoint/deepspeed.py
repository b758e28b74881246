"""Checkpoints of DeepSpeed ZeRO, from the files that its ranks wrote or from a universal checkpoint."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.deepspeed_folder import Folder, find
from zerostage.checkpoint.deepspeed_state import Shards, Universal, degree, of_rank
from zerostage.checkpoint.foreign_file import Opaque, is_opaque, open_file
from zerostage.checkpoint.source import MASTER, WEIGHTS, Piece, Source, Stored

#: What DeepSpeed itself puts beside the model; all else in the file is the user's client_state.
_ITS_OWN = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments", "shared_params",
    "data_sampler", "random_ltd", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
    "universal_checkpoint_info", "sparse_tensor_module_names",
}  # fmt: skip


def recognises(path: Path) -> bool:
    """Whether `path` is a DeepSpeed checkpoint's own folder (global_step10), or the one above with the file `latest`."""
    return find(path) is not None


class DeepSpeedSource(Source):
    """A DeepSpeed checkpoint of ZeRO stage 1, 2 or 3, read from its ranks' files or from a universal checkpoint's.

    path: the checkpoint's own folder, or the one above, of which the file `latest` names it.

    Of a trained parameter there are 'master' and the optimizer's states of one value per element ('exp_avg'), and 'weights'
    where their dtype is another and DeepSpeed stored them (not at stage 3). Of a frozen one there are 'weights'; DeepSpeed
    stores none with exclude_frozen_parameters. A state that is neither one value per element nor a number is left out.
    `optimizer` is '' where the files do not tell it. `groups` have the settings as they are in the file; it is None with
    "elastic_checkpoint", where DeepSpeed stores none.

    Raises ValueError for a checkpoint of another kind: tensor-parallel, pipeline-parallel, mixture-of-experts, or stage 0;
    DamagedError for a missing or damaged file. No code from the files is run, and DeepSpeed need not be installed.
    """

    def __init__(self, path: str | Path) -> None:
        folder = Folder(Path(path))
        alone = folder.prefix is None and not folder.universal and folder.model().exists()
        if alone and not _model(folder.model())["param_shapes"]:
            folder.refuse("a checkpoint without ZeRO (stage 0)")
        first = of_rank(folder, 0)
        ranks = degree(first)
        whole = "fp32_flat_groups" not in first  # at stages 1 and 2 the weights are
        files = [folder.model()] if whole else [folder.model(rank) for rank in range(ranks)]
        if missing := next((file for file in files if not file.exists()), None):
            raise DamagedError(f"{missing} is missing: restore the file, or use another checkpoint")
        models = [_model(files[0])]
        if models[0].get("frozen_param_fragments"):  # the only things in the other ranks' files that those of rank 0 lacks
            models += [_model(file) for file in files[1:]]
        stage, version = _stage(first, models[0]), models[0].get("ds_version")
        self.what = f"a {'universal ' * folder.universal}DeepSpeed checkpoint of {ranks} ranks at stage {stage}"
        self.what += f" ({folder.path.name}{f', DeepSpeed {version}' if isinstance(version, str) else ''})"
        if key := next((key for key in ("ds_autoep_layers", "autoep_layers") if models[0].get(key)), None):
            folder.refuse(f"a mixture-of-experts checkpoint (its model has {key})")

        shapes = [{name: tuple(shape) for name, shape in flat.items()} for flat in models[0]["param_shapes"] or []]
        self._state = (Universal if folder.universal else Shards)(folder, first, shapes, ranks)
        self._buffers = {name: models[0]["module"][name] for name in models[0]["buffer_names"] if name in models[0]["module"]}
        self._weights: dict[str, list[torch.Tensor]] = {}  # the parts of each parameter, end to end
        self._add_parameters(models, shapes, whole)
        if folder.universal and whole and _zero(models[0]).get("round_robin_gradients"):
            self._refuse_mixed_up(folder, shapes)
        self.groups = self._state.groups
        self.optimizer = _optimizer(models[0].get("ds_config"), self)
        self._extra = {k: v for k, v in models[0].items() if k not in _ITS_OWN and v is not None and not is_opaque(v)}

    def _add_parameters(self, models: list[dict[str, Any]], shapes: list[dict[str, tuple]], whole: bool) -> None:
        module, aliases = models[0]["module"], models[0].get("shared_params") or {}
        frozen = {name: tuple(shape) for name, shape in (models[0].get("frozen_param_shapes") or {}).items()}
        trained = {name: shape for flat in shapes for name, shape in flat.items()}
        if whole:  # before stage 2 DeepSpeed does not say which are frozen
            no_parameter = self._buffers.keys() | {name for name in module if name.endswith("_extra_state")}
            tensors = {name: value for name, value in module.items() if isinstance(value, torch.Tensor)}
            values = {name: value for name, value in tensors.items() if name not in no_parameter}
            # It takes parameters without elements for one and the same.
            aliases = {name: first for name, first in aliases.items() if name not in values or values[name].numel()}
            frozen |= {name: tuple(value.shape) for name, value in values.items() if name not in trained and name not in aliases}
            values |= models[0].get("frozen_param_fragments") or {}
            self._weights = {name: [value.reshape(-1)] for name, value in values.items()}
        else:
            fragments = [model.get("frozen_param_fragments") or {} for model in models]
            self._weights = {name: [held[name].reshape(-1) for held in fragments] for name in frozen}
        for name, shape in (trained | frozen).items():
            if name in self._weights and sum(part.numel() for part in self._weights[name]) < math.prod(shape):
                raise ValueError(f"{self.what}: the weights of '{name}' are in parts that do not make up its shape {shape}")

        made: dict[str, Stored] = {}
        for number, flat in enumerate(shapes):
            terms, scalars = self._state.terms(number), self._state.scalars(number)
            for name, shape in flat.items():
                kept = self._weights[name][0].dtype if name in self._weights else None
                low = {} if kept in (None, terms[MASTER]) else {WEIGHTS: kept}
                own = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in scalars.items()}
                source = module[name].dtype if isinstance(module.get(name), torch.Tensor) else terms[MASTER]
                made[name] = Stored(shape, low | terms, own, source)
        for name, shape in frozen.items():
            dtype = self._weights[name][0].dtype
            made[name] = Stored(shape, {WEIGHTS: dtype}, {}, dtype, trainable=False)
        self.names = [name for name in module if name in made] + [name for name in made if name not in module]
        self._first = {name: name for name in made} | {name: first for name, first in aliases.items() if first in made}
        self.parameters = {name: made[first] for name, first in self._first.items()}

    def _refuse_mixed_up(self, folder: Folder, shapes: list[dict[str, tuple]]) -> None:
        """DeepSpeed's conversion (as of 0.19) takes the order of a group's parameters for the usual one; the weights tell."""
        for name in (name for flat in shapes for name in flat if name in self._weights):
            weights = self._weights[name][0][:100]
            master = torch.cat(list(self._state.parts(MASTER, name, 0, weights.numel())))
            if not torch.equal(master.to(weights.dtype), weights):
                raise ValueError(
                    f"{folder.path} has the values of other parameters for '{name}', since DeepSpeed's conversion does not heed "
                    "round_robin_gradients: give the folder it was made from"
                )

    @torch.no_grad()
    def read(self, term: str, pieces: Sequence[Piece]) -> None:
        for name, start, stop, out in pieces:
            first, numel = self._first[name], math.prod(self.parameters[name].shape)
            if not 0 <= start <= stop <= numel:
                raise ValueError(f"'{name}' has {numel} elements; [{start}, {stop}) was asked for")
            if term not in self.parameters[name].terms:
                raise KeyError(f"{self.what} has no {term} of '{name}'")
            parts = self._in_weights(first, start, stop) if term == WEIGHTS else self._state.parts(term, first, start, stop)
            done = 0
            for part in parts:
                out[done : done + part.numel()].copy_(part)
                done += part.numel()

    def _in_weights(self, name: str, start: int, stop: int) -> Iterator[torch.Tensor]:
        each = self._weights[name][0].numel()  # the last one has padding
        while start < stop:
            rank, at = divmod(start, each)
            end = min(each, at + stop - start)
            yield self._weights[name][rank][at:end]
            start += end - at

    def buffers(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self._buffers.items()}

    def extra(self) -> Any:
        """The client_state that was saved, with DeepSpeed's global_steps, global_samples, skipped_steps and lr_scheduler."""
        return self._extra or None


def _model(path: Path) -> dict[str, Any]:
    found = open_file(path)
    keys = {"module", "buffer_names", "param_shapes"}
    if not isinstance(found, dict) or not keys <= found.keys() or not isinstance(found["module"], dict):
        raise DamagedError(f"{path} is no file of DeepSpeed's model states: use another checkpoint")
    return found


def _stage(state: dict[str, Any], model: dict[str, Any]) -> int:
    """As the optimizer says (an enum), or as configured, since BF16_Optimizer does not say."""
    stage = state.get("zero_stage")
    if isinstance(stage, Opaque) and stage.args:
        stage = stage.args[0]
    if not isinstance(stage, int):
        stage = _zero(model).get("stage", 1)
    return stage


def _zero(model: dict[str, Any]) -> dict[str, Any]:
    """The configuration's "zero_optimization"."""
    config = model.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, dict) else None
    return zero if isinstance(zero, dict) else {}


def _optimizer(config: Any, source: DeepSpeedSource) -> str | None:
    """The name in torch.optim of what the optimizer does; '' where that is not known, None where it has no state."""
    if not any(stored.states or stored.scalars for stored in source.parameters.values()):
        return None
    settings = source.groups[0] if source.groups else {}
    if "decoupled_weight_decay" in settings:  # torch's own, from 2.6 on
        return "AdamW" if settings["decoupled_weight_decay"] else "Adam"
    chosen = config.get("optimizer") if isinstance(config, dict) else None
    if isinstance(chosen, dict) and isinstance(chosen.get("type"), str):
        kind, options = chosen["type"].lower(), chosen.get("params")
        # DeepSpeed takes "Adam" for AdamW unless it is told otherwise.
        if kind == "adam":
            return "AdamW" if not isinstance(options, dict) or options.get("adam_w_mode", True) else "Adam"
        return {"adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad"}.get(kind, "")
    return "SGD" if "dampening" in settings else ""
