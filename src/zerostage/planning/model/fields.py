"""The fields of a model's configuration (a config.json of transformers), read with every mistake named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerostage.mistakes import InputError

#: Fields of architectures whose formula differs: a family that does not know one must not price it as if it were not there.
#: transformers' own class of that family ignores them as well, so building it would repeat the mistake.
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_intermediate_size")
SHARED = ("n_shared_experts", "num_shared_experts", "shared_expert_intermediate_size")


class Fields:
    """A configuration and where it came from. Each reading raises an InputError of one line that names field and source.

    `aliases` gives other spellings of fields: {'n_embd': 'hidden_size'}.
    """

    def __init__(self, config: Mapping[str, Any], source: str, aliases: Mapping[str, str] | None = None) -> None:
        aliases = aliases or {}
        self.source = source
        self._config = {aliases.get(key, key): value for key, value in config.items()}
        self._spelling = {known: other for other, known in aliases.items()}

    def spelled(self, key: str) -> str:
        """The field as this family writes it."""
        return self._spelling.get(key, key)

    def has(self, key: str) -> bool:
        """Whether the field is there, be it null."""
        return key in self._config

    def get(self, key: str, default: Any = None) -> Any:
        """The field as it stands; `default` where it is absent or null."""
        value = self._config.get(key)
        return default if value is None else value

    def require(self, *keys: str) -> None:
        """Raises an InputError that names all fields of `keys` that are absent."""
        missing = [self.spelled(key) for key in keys if key not in self._config]
        if missing:
            raise InputError(f"{self.source} has no {', '.join(missing)}: add what is missing, nothing is guessed")

    def count(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`. `default` stands for an absent or null field; None: it must be there."""
        value = self.get(key, default)
        if value is None:
            self.require(key)
            raise InputError(f"{self.source}: {self.spelled(key)} is null; give a whole number")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{self.source}: {self.spelled(key)} must be a whole number of at least {least}, not {value!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.source}: {self.spelled(key)} must be true or false, not {value!r}")
        return value

    def dropout(self, *keys: str, default: float = 0.0) -> bool:
        """Whether any of the probabilities is above 0."""
        values = [self.get(key, default) for key in keys]
        for key, value in zip(keys, values):
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise InputError(f"{self.source}: {self.spelled(key)} must be a probability, not {value!r}")
        return any(value > 0 for value in values)

    def refuse(self, family: str, *keys: str) -> None:
        """Raises an InputError where one of `keys` has a meaning (is neither absent, null, false nor 0)."""
        found = [key for key in keys if self._config.get(key)]
        if found:
            raise InputError(
                f"{self.source} has {', '.join(found)}, which model_type '{family}' does not know: its parameters would be "
                "counted without it; give the model_type that the model is made with, or the model itself as module:function"
            )

    def heads(self, kv_default: int | None = None, head_dim_default: int | None = None) -> tuple[int, int, int]:
        """Query heads, key-value heads and the size of one head.

        `kv_default`: key-value heads where the field is absent (None, or a null field: as many as query heads).
        `head_dim_default`: the size where the field is absent (None, or a null field: hidden size / heads).
        """
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", heads if self.has("num_key_value_heads") else kv_default or heads)
        head_dim = self.get("head_dim", None if self.has("head_dim") else head_dim_default)
        if heads % kv_heads:
            raise InputError(
                f"{self.source}: {heads} {self.spelled('num_attention_heads')} are not a multiple of "
                f"{kv_heads} {self.spelled('num_key_value_heads')}; every key-value head serves as many query heads"
            )
        if head_dim is not None:
            return heads, kv_heads, self.count("head_dim", head_dim)
        return heads, kv_heads, self.divided(heads)

    def divided(self, heads: int) -> int:
        """The size of one head where the heads share the hidden size."""
        hidden = self.count("hidden_size")
        if hidden % heads:
            raise InputError(
                f"{self.source}: {self.spelled('hidden_size')} {hidden} is not a multiple of {heads} "
                f"{self.spelled('num_attention_heads')}; correct one of them or give head_dim"
            )
        return hidden // heads
