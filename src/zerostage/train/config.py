"""The settings of a training run: one flat list of fields, from defaults, a TOML file and flags.

Every field is also a flag (`micro_batch` is `--micro-batch`). Flags win over the file, the
file over the defaults, and each value remembers where it came from, so that a message about
two values that disagree can say where to look. Neither torch nor transformers is imported.
"""

from __future__ import annotations

import os
import typing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError

from zerostage.mistakes import InputError, closest

Count = typing.Annotated[int, Field(ge=1)]
CountOrZero = typing.Annotated[int, Field(ge=0)]
Fraction = typing.Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = typing.Annotated[float, Field(gt=0, allow_inf_nan=False)]
PositiveOrZero = typing.Annotated[float, Field(ge=0, allow_inf_nan=False)]
#: A flag arrives as text, and pydantic compares literals without conversion.
Stage = typing.Annotated[Literal[0, 1, 2, 3], BeforeValidator(lambda v: int(v) if str(v) in "0123" else v)]
Files = typing.Annotated[list[str], BeforeValidator(lambda v: [v] if isinstance(v, str) else v)]


class TrainConfig(BaseModel):
    """The settings of `zerostage train`. Lengths are in tokens, batches in sequences."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    model: str = Field(description="folder of a Hugging Face causal language model, or its name on the hub")
    data: Files = Field(description="training files: text, .jsonl or .parquet with a 'text' field")
    eval_data: Files = Field([], description="held-out files, instead of a part of --data")
    eval_fraction: Fraction = Field(0.05, description="part of --data held out, taken from its end (0: none)")
    eval_every: CountOrZero = Field(0, description="held-out loss every so many steps (0: only before and after)")
    eval_samples: CountOrZero = Field(0, description="at most so many held-out sequences (0: all)")
    stage: Stage = Field(3, description="ZeRO stage")
    ranks: Count = Field(1, description="number of data-parallel ranks (default: one per GPU, or 1)")
    sequence_length: Count = Field(1024, description="tokens in a packed sequence")
    micro_batch: Count = Field(1, description="sequences per rank in one forward")
    accumulation: Count = Field(1, description="micro-batches per rank in one step")
    global_batch: Count = Field(1, description="sequences in one step over all ranks (default: the product)")
    steps: CountOrZero = Field(0, description="optimizer steps (0: as many as --epochs gives)")
    epochs: Positive = Field(1.0, description="passes over the training data, where --steps is not given")
    learning_rate: Positive = Field(2e-5, description="peak learning rate of AdamW")
    min_learning_rate: PositiveOrZero = Field(0.0, description="learning rate at the end of the cosine")
    warmup_steps: CountOrZero = Field(0, description="steps of linear warm-up")
    weight_decay: PositiveOrZero = Field(0.01, description="AdamW weight decay; norms and biases have none")
    beta1: Fraction = Field(0.9, description="decay of AdamW's first moment")
    beta2: Fraction = Field(0.95, description="decay of AdamW's second moment")
    clip: PositiveOrZero = Field(1.0, description="largest global gradient norm (0: no clipping)")
    seed: CountOrZero = Field(0, description="seed of the sample order and of dropout")
    precision: Literal["bf16", "fp32"] = Field("bf16", description="bf16 with fp32 master weights, or fp32 throughout")
    activation_checkpointing: bool = Field(False, description="recompute activations in the backward")
    prefetch: CountOrZero = Field(1, description="units gathered ahead of use at stage 3")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto takes GPUs where there are any")
    threads: CountOrZero = Field(0, description="CPU threads per rank (0: one on the CPU, torch's default with GPUs)")
    strict: bool = Field(
        False,
        description="end with exit code 4 where the audit after the first two steps finds another stage than configured, "
        "or more bytes than planned by over 1% and 1 MB",
    )
    metrics: str = Field("", description="JSONL file of metrics, overwritten or, on resume, continued (default: one under runs/)")
    trace: str = Field("", description="file that receives a Chrome trace of the last step, all ranks; CPU only")
    save: str = Field("", description="folder that receives the trained model, in Hugging Face form")
    checkpoints: str = Field("", description="folder of checkpoints, from which a run goes on by itself; all ranks must see it")
    checkpoint_every: CountOrZero = Field(0, description="steps between checkpoints (0: only at the end and on SIGTERM)")
    keep_last: CountOrZero = Field(2, description="newest checkpoints to keep (0: all)")
    resume: str = Field("auto", description="auto: from the newest whole checkpoint; no: from step 1; or a checkpoint's folder")
    test_save: bool = Field(False, description="write a checkpoint before step 1, read it back, compare, delete it")
    async_save: bool = Field(False, description="train on while a checkpoint is written, from a copy in memory")
    max_restarts: CountOrZero = Field(0, description="restarts of all ranks, from the newest checkpoint, after one has failed")

    def source(self, name: str) -> str:
        """Where the value of field `name` came from, in words."""
        return self._sources.get(name, "the default")

    def given(self, name: str) -> bool:
        """Whether field `name` was set by the file, a flag or the environment."""
        return name in self._sources


def flag(name: str) -> str:
    """The command-line flag of field `name`."""
    return "--" + name.replace("_", "-")


def kind(name: str) -> type:
    """list, Literal, or the type (bool, int, float, str) of field `name`."""
    annotation = TrainConfig.model_fields[name].annotation
    return typing.get_origin(annotation) or annotation


def load(path: str | None, flags: dict[str, Any], environ: dict[str, str] | None = None) -> TrainConfig:
    """The configuration from the TOML file at `path` (or None), overridden by `flags` (field name to value).

    `WORLD_SIZE` in `environ` sets the number of ranks. Raises InputError, one line, for
    unknown fields, bad values, and batch sizes that disagree.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in (_read_toml(path) if path else {}).items():
        field = name.replace("-", "_")
        if field not in TrainConfig.model_fields:
            known = closest(field, TrainConfig.model_fields)
            raise InputError(f"{path}: there is no field '{name}'{known} ('zerostage train --help' lists the fields)")
        values[field], sources[field] = value, f"the config file {path}"
    for name, value in flags.items():
        values[name], sources[name] = value, f"the flag {flag(name)}"
    world_size = (environ or {}).get("WORLD_SIZE")
    if world_size:
        if "ranks" in values and str(values["ranks"]) != world_size:
            raise InputError(
                f"ranks is {values['ranks']} ({sources['ranks']}) but this job already has {world_size} ranks "
                f"(the environment's WORLD_SIZE): leave {flag('ranks')} out or make them equal"
            )
        values["ranks"], sources["ranks"] = world_size, "the environment's WORLD_SIZE"
    for name in ("model", "data"):
        if not values.get(name):
            raise InputError(f"{name} is missing: give {flag(name)}, or {name} = ... in a config file (--config)")
    try:
        config = TrainConfig(**values)
    except ValidationError as error:
        raise InputError(_explain(error.errors()[0], sources)) from None
    config._sources = sources
    if config.given("steps") and config.steps and config.given("epochs"):
        raise InputError(
            f"steps is {config.steps} ({config.source('steps')}) and epochs is {config.epochs:g} "
            f"({config.source('epochs')}): give one of them"
        )
    for name in ("checkpoint_every", "keep_last", "test_save", "async_save", "max_restarts"):
        if not config.checkpoints and config.given(name) and getattr(config, name):
            raise InputError(
                f"{name} is {getattr(config, name)} ({config.source(name)}) but there is no folder for checkpoints: "
                "give --checkpoints"
            )
    return config


def derive_batch(config: TrainConfig) -> TrainConfig:
    """Fill in whichever of micro_batch, accumulation and global_batch was not given, and return `config`.

    global_batch = micro_batch x accumulation x ranks. Where only the global batch is given,
    the micro-batch is 1. Raises InputError listing every number and its source when they
    cannot agree.
    """
    names = ("micro_batch", "accumulation", "global_batch")
    micro, accumulation, total = (getattr(config, name) if config.given(name) else None for name in names)
    if total is None:
        config.micro_batch, config.accumulation = micro or 1, accumulation or 1
        config.global_batch = config.micro_batch * config.accumulation * config.ranks
        return config
    if micro is None and accumulation is None:
        micro = 1
    if micro is None:
        config.micro_batch = total // (accumulation * config.ranks)
    elif accumulation is None:
        config.accumulation = total // (micro * config.ranks)
    if config.micro_batch * config.accumulation * config.ranks == total:
        return config
    derived = {"micro_batch": micro, "accumulation": accumulation}
    numbers = ", ".join(
        f"{name} {getattr(config, name)} ({config.source(name)})"
        for name in ("global_batch", "micro_batch", "accumulation", "ranks")
        if name in ("global_batch", "ranks") or derived[name] is not None
    )
    raise InputError(
        f"batch sizes disagree: global_batch must be micro_batch x accumulation x ranks in whole numbers, but {numbers}"
        "; change one of them or leave one out"
    )


def _read_toml(path: str) -> dict[str, Any]:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        import tomli as tomllib
    if not os.path.isfile(path):
        raise InputError(f"the config file {path} does not exist")
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}") from None
    for name, value in table.items():
        if isinstance(value, dict):
            raise InputError(f"{path}: [{name}] is a table, but the fields are one flat list: remove the [{name}] line")
    return table


def _explain(error: dict[str, Any], sources: dict[str, str]) -> str:
    """One line for the first of pydantic's errors: the field, the value, its source, what is allowed."""
    name = error["loc"][0]
    context, value = error.get("ctx", {}), error["input"]
    rules = {
        "literal_error": f"use {context.get('expected')}" + closest(str(value), choices(name)),
        "greater_than_equal": f"it must be {context.get('ge')} or more",
        "greater_than": f"it must be more than {context.get('gt')}",
        "less_than": f"it must be less than {context.get('lt')}",
        "finite_number": "it must be finite",
        "bool_parsing": "use true or false",
        "bool_type": "use true or false",
        "list_type": "it must be a list of file names",
    }
    if error["type"].startswith("int_"):
        rule = "it must be a whole number"
    elif error["type"].startswith("float_"):
        rule = "it must be a number"
    else:
        rule = rules.get(error["type"], error["msg"][0].lower() + error["msg"][1:])
    return f"{name} is {value!r} ({sources.get(name, 'the default')}): {rule}"


def choices(name: str) -> list[str]:
    """The allowed values of field `name` where they are few, else []."""
    if kind(name) is not Literal:
        return []
    return [str(choice) for choice in typing.get_args(TrainConfig.model_fields[name].annotation)]
