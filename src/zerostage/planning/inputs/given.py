"""What a configuration that is already in use says about a run, and how its tables are read.

The readers of the several formats (`from_deepspeed.py`, `from_accelerate.py`, `from_torchtitan.py`) all fill a `Draft`
through `Section`s, which remember what was asked of them, so that whatever nobody asked for can be told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from zerostage.mistakes import InputError, closest

#: Spellings of dtypes in these files.
DTYPES = {
    "bf16": "bf16",
    "bfloat16": "bf16",
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "no": "fp32",
}
#: Optimizers by what they keep, which is all that memory asks of them. Lion keeps one moment, as SGD with momentum does.
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "fusedadam", "cpuadam", "deepspeedcpuadam", "adamw_hf", "nadam", "radam"), "adamw"),
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_torch_xla"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adam8bit", "adamw8bit"), "adamw"),
    **dict.fromkeys(("lion", "fusedlion", "cpulion", "deepspeedcpulion", "lion_32bit"), "momentum"),
    "sgd": "sgd",
    "adafactor": "adafactor",
}
#: What transformers and accelerate put where a DeepSpeed file has 'auto': in words, and from the model's hidden size h.
AUTO: dict[str, tuple[str, Callable[[int], int]]] = {
    "reduce_bucket_size": ("h x h", lambda h: h * h),
    "stage3_prefetch_bucket_size": ("0.9 x h x h", lambda h: int(0.9 * h * h)),
    "stage3_param_persistence_threshold": ("10 x h", lambda h: 10 * h),
}


@dataclass(frozen=True)
class Given:
    """What a file states. What it leaves open is absent, not filled in with a guess.

    `run` holds fields of `run.Run`. `shard` is the number of ranks that divide one copy of the training state and
    `replicate` the number of copies (hybrid sharding); `weights_shard` is the number of ranks that divide the weights
    alone, where it differs. None: as the stage has it over all ranks. `engine_options` are the engine's own sizes and
    switches, in elements as DeepSpeed counts them; `auto` names those that the Hugging Face integration computes from
    the model (see `options`).
    """

    kind: str  # 'DeepSpeed JSON', 'accelerate configuration', 'torchtitan TOML', 'Trainer arguments'
    run: dict[str, Any] = field(default_factory=dict)
    stage: int | None = None
    shard: int | None = None
    replicate: int | None = None
    weights_shard: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    model: str | None = None
    engine_options: dict[str, int | bool] = field(default_factory=dict)
    auto: tuple[str, ...] = ()
    assumed: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def options(self, hidden: int) -> dict[str, int | bool]:
        """`engine_options` with its 'auto' sizes (see `AUTO`) for a model of this hidden size."""
        return {**{name: AUTO[name][1](hidden) for name in self.auto}, **self.engine_options}


class Draft:
    """A `Given` under construction. `file` is how errors name the file."""

    def __init__(self, file: str, kind: str) -> None:
        self.file = file
        self.values: dict[str, Any] = {"kind": kind}
        self.run: dict[str, Any] = {}
        self.engine_options: dict[str, int | bool] = {}
        self.auto: list[str] = []
        self.assumed: list[str] = []
        self.ignored: list[str] = []

    def state(self, **values: Any) -> None:
        """Keep those of `values` (fields of `Given`) that are stated at all."""
        self.values.update({name: value for name, value in values.items() if value is not None})

    def state_run(self, **values: Any) -> None:
        """Keep those of `values` (fields of `Run`) that are stated at all."""
        self.run.update({name: value for name, value in values.items() if value is not None})

    def wrong(self, text: str) -> InputError:
        return InputError(f"{self.file}: {text}")

    def optimizer(self, name: str, key: str, momentum: bool = False) -> None:
        """State the optimizer called `name` under `key`."""
        kept = OPTIMIZERS.get(name.lower().replace("-", "_"))
        if kept is None:
            self.ignored.append(f"{key} is {name!r}, whose state is not known here: give --optimizer")
            return
        self.run["optimizer"] = "momentum" if kept == "sgd" and momentum else kept
        if "8bit" in name.lower():
            self.run["moments"] = "int8"

    def batch(self, total: int | None, name: str, copies: int | None) -> None:
        """Complete or check micro-batch x accumulation x data-parallel ranks = `total`, which is called `name`."""
        if total is None:
            return
        micro, accumulation = self.run.get("micro_batch"), self.run.get("accumulation")
        known = {"micro-batch": micro, "accumulation": accumulation, "data-parallel ranks": copies}
        missing = [term for term, value in known.items() if value is None]
        product = 1
        for value in known.values():
            product *= value or 1
        words = " x ".join(f"{term} {value}" for term, value in known.items() if value is not None)
        if len(missing) > 1:
            self.assumed.append(
                f"{name} {total} decides nothing without {' and '.join(missing)}: give --micro-batch and the machines"
            )
        elif total % product or (not missing and total != product):
            raise self.wrong(f"{name} is {total}, but {words} = {product}; change one of them so that they agree")
        elif missing == ["micro-batch"]:
            self.run["micro_batch"] = total // product
        elif missing == ["accumulation"]:
            self.run["accumulation"] = total // product
        elif missing:
            self.state(ranks=total // product * self.run.get("tensor", 1))

    def finish(self) -> Given:
        return Given(
            **self.values,
            run=self.run,
            engine_options=self.engine_options,
            auto=tuple(self.auto),
            assumed=tuple(dict.fromkeys(self.assumed)),
            ignored=tuple(dict.fromkeys(self.ignored)),
        )


class Section:
    """One table of a file. Each reader returns None where the key is absent, null or 'auto'."""

    def __init__(self, draft: Draft, table: Any, path: str = "") -> None:
        if not isinstance(table, dict):
            raise draft.wrong(f"{path or 'the file'} is {_shown(table)}; it must be a table of keys and values")
        self.draft, self.table, self.path = draft, table, path
        self.asked: set[str] = set()

    def name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def value(self, *keys: str) -> Any:
        """The value under the first of `keys` (spellings of one thing) that is there."""
        self.asked.update(keys)
        for key in keys:
            value = self.table.get(key)
            if value == "auto":
                self.draft.assumed.append(f"{self.name(key)} is 'auto': {_auto(key)}")
            elif value is not None:
                return value
        return None

    def whole(self, *keys: str, least: int = 1, unset: tuple[int, ...] = ()) -> int | None:
        """A whole number; 5e8 and '1e9' count. Those in `unset` mean that it is not given."""
        value = self.value(*keys)
        if value is None:
            return None
        try:
            number = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is not None and number in unset:
            return None
        if number is None or not number.is_integer() or number < least:
            raise self.draft.wrong(f"{self._found(keys)} is {_shown(value)}; it must be a whole number of {least} or more")
        return int(number)

    def flag(self, *keys: str) -> bool | None:
        """True or false; also as the words that accelerate takes."""
        value = self.value(*keys)
        if value is None or isinstance(value, bool):
            return value
        word = str(value).strip().lower()
        if word in ("true", "yes", "on", "1", "y", "t"):
            return True
        if word in ("false", "no", "off", "0", "n", "f"):
            return False
        raise self.draft.wrong(f"{self._found(keys)} is {_shown(value)}; it must be true or false")

    def text(self, *keys: str) -> str | None:
        value = self.value(*keys)
        if value is None or isinstance(value, str):
            return value
        raise self.draft.wrong(f"{self._found(keys)} is {_shown(value)}; it must be text")

    def word(self, choices: dict[str, Any], *keys: str) -> Any:
        """What `choices` (keys in lower case) has for the word; YAML's bare no, which arrives as False, counts as 'no'."""
        value = self.value(*keys)
        if value is None:
            return None
        word = "no" if value is False and "no" in choices else str(value).strip().lower()
        if word not in choices:
            names = list(choices)
            raise self.draft.wrong(f"{self._found(keys)} is {_shown(value)}, not one of {', '.join(names)}{closest(word, names)}")
        return choices[word]

    def section(self, key: str) -> Section:
        """The table under `key`, an empty one where it is absent."""
        value = self.value(key)
        return Section(self.draft, {} if value is None else value, self.name(key))

    def ignore(self, key: str, harmless: tuple[Any, ...], why: str) -> None:
        """Tell that `key` is not modelled, unless its value is one of `harmless`."""
        value = self.value(key)
        if value is not None and value not in harmless:
            self.draft.ignored.append(f"{self.name(key)} = {_shown(value)}: {why}")

    def rest(self, harmless: tuple[str, ...] = ()) -> None:
        """Tell what nobody asked for; `harmless` are keys that say nothing about memory or time."""
        asked = [*self.asked, *harmless]
        for key in self.table:
            if key not in asked and not str(key).startswith("_"):  # those are comments
                self.draft.ignored.append(f"{self.name(str(key))}: not known{closest(str(key), asked)}")

    def _found(self, keys: tuple[str, ...]) -> str:
        return self.name(next((key for key in keys if self.table.get(key) is not None), keys[0]))


def _auto(key: str) -> str:
    return f"{AUTO[key][0]} elements, h being the model's hidden size" if key in AUTO else "the file does not give it"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
