"""Parameters and blocks of the families that are known in closed form, from their configuration.

Names, shapes and order are those of `named_parameters()` of transformers' causal language model of that family
(transformers 5: the experts of a layer are fused into two parameters of three dimensions). The families here are the
Llama kind: a gated MLP or experts, RMS norms, no biases but on request. The others are in `classics.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from zerostage.mistakes import InputError
from zerostage.planning.model.architecture import Block, Weight
from zerostage.planning.model.fields import EXPERTS, LATENT, SHARED, Fields


class NotModelled(Exception):
    """The family is known, this variant of it is not; the text says which. It is to be counted on the meta device."""


@dataclass
class Parts:
    """Weights and blocks as they are collected, in the order in which the model defines them."""

    hidden: int
    vocab: int
    tied: bool = False
    positions: int | None = None
    weights: list[Weight] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    unmodelled: str = ""  # why activations do not follow from the blocks, where they do not
    assumed: list[str] = field(default_factory=list)

    def add(self, name: str, *shape: int, active: float = 1.0) -> None:
        self.weights.append(Weight((name,), shape, active=active))

    def linear(self, name: str, inputs: int, outputs: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", outputs, inputs)
        if bias:
            self.add(f"{name}.bias", outputs)

    def norm(self, name: str, size: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", size)
        if bias:
            self.add(f"{name}.bias", size)

    def embedding(self, name: str, width: int | None = None) -> None:
        """Token embeddings; where they are tied, the head's weight is the same parameter."""
        names = (f"{name}.weight", "lm_head.weight") if self.tied else (f"{name}.weight",)
        self.weights.append(Weight(names, (self.vocab, width or self.hidden)))

    def head(self, bias: bool = False, width: int | None = None) -> None:
        if not self.tied:
            self.add("lm_head.weight", self.vocab, width or self.hidden)
        if bias:
            self.add("lm_head.bias", self.vocab)


@dataclass(frozen=True)
class Family:
    """One model_type: how its parts follow from its fields, and what its configuration must say."""

    parts: Callable[[Fields], Parts]
    required: tuple[str, ...]
    aliases: dict[str, str] = field(default_factory=dict)
    transposed: bool = False  # linear weights are stored (in, out): GPT-2's Conv1D


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def begin(fields: Fields, tied: bool) -> Parts:
    """The sizes that every family has. `tied`: what transformers takes where tie_word_embeddings is absent."""
    return Parts(
        fields.count("hidden_size"),
        fields.count("vocab_size"),
        fields.flag("tie_word_embeddings", tied),
        fields.count("max_position_embeddings") if fields.get("max_position_embeddings") is not None else None,
    )


@dataclass(frozen=True)
class Style:
    """What tells the families of the Llama kind apart. Defaults are what transformers takes where a field is absent."""

    kind: str
    kv_heads: int | None = None
    head_dim: int | None = None
    tied: bool = False
    qkv_bias: bool = False  # always; else as the field attention_bias says
    reads_bias: bool = False  # knows the field attention_bias
    mlp_bias: bool = False  # knows the field mlp_bias
    qk_norm: bool = False
    norms: int = 2
    activation: str = "hidden_act"
    experts: str = ""  # the field that counts experts; '': a dense MLP
    windows: Callable[[Fields, int], list[int | None]] = lambda fields, layers: [None] * layers


def _llama(style: Style) -> Callable[[Fields], Parts]:
    def parts(fields: Fields) -> Parts:
        fields.refuse(style.kind, *LATENT, *SHARED, *(() if style.experts else EXPERTS))
        model = begin(fields, style.tied)
        hidden = model.hidden
        heads, kv_heads, head_dim = fields.heads(style.kv_heads, style.head_dim)
        layers = fields.count("num_hidden_layers")
        windows = style.windows(fields, layers)
        bias = style.reads_bias and fields.flag("attention_bias", False)
        sparse = _sparse_layers(fields, layers, style)
        model.embedding("model.embed_tokens")
        for layer, window in enumerate(windows):
            name = f"model.layers.{layer}"
            model.linear(f"{name}.self_attn.q_proj", hidden, heads * head_dim, bias or style.qkv_bias)
            model.linear(f"{name}.self_attn.k_proj", hidden, kv_heads * head_dim, bias or style.qkv_bias)
            model.linear(f"{name}.self_attn.v_proj", hidden, kv_heads * head_dim, bias or style.qkv_bias)
            model.linear(f"{name}.self_attn.o_proj", heads * head_dim, hidden, bias)
            if style.qk_norm:
                model.norm(f"{name}.self_attn.q_norm", head_dim)
                model.norm(f"{name}.self_attn.k_norm", head_dim)
            count = chosen = 0
            if layer in sparse:
                count, chosen = experts_of(fields, style.experts)
                ffn = fields.count("moe_intermediate_size" if style.kind != "mixtral" else "intermediate_size")
                router_first = style.kind == "mixtral"
                if router_first:
                    model.add(f"{name}.mlp.gate.weight", count, hidden)
                experts(model, name, count, chosen, ffn)
                if not router_first:
                    model.add(f"{name}.mlp.gate.weight", count, hidden)
            else:
                ffn = fields.count("intermediate_size")
                gated_mlp(model, f"{name}.mlp", ffn, style.mlp_bias and fields.flag("mlp_bias", False))
            for norm in _NORMS[: style.norms]:
                model.norm(f"{name}.{norm}", hidden)
            model.blocks.append(
                Block(
                    name, heads, kv_heads, head_dim, ffn, True, count, chosen, 0, window, "rms", style.norms, style.qk_norm,
                    fields.get(style.activation, "gelu_pytorch_tanh" if "gemma" in style.kind else "silu"),
                    fields.dropout("attention_dropout"),
                )
            )  # fmt: skip
        model.norm("model.norm", hidden)
        model.head()
        return model

    return parts


_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


def gated_mlp(model: Parts, name: str, ffn: int, bias: bool = False) -> None:
    model.linear(f"{name}.gate_proj", model.hidden, ffn, bias)
    model.linear(f"{name}.up_proj", model.hidden, ffn, bias)
    model.linear(f"{name}.down_proj", ffn, model.hidden, bias)


def experts(model: Parts, block: str, count: int, chosen: int, ffn: int) -> None:
    """The routed experts of a block: transformers 5 keeps those of a layer in two parameters."""
    model.add(f"{block}.mlp.experts.gate_up_proj", count, 2 * ffn, model.hidden, active=chosen / count)
    model.add(f"{block}.mlp.experts.down_proj", count, model.hidden, ffn, active=chosen / count)


def experts_of(fields: Fields, key: str) -> tuple[int, int]:
    """How many experts a layer has, and how many of them a token uses."""
    count, chosen = fields.count(key), fields.count("num_experts_per_tok")
    if chosen > count:
        raise InputError(f"{fields.source}: num_experts_per_tok {chosen} is more than the {count} of {fields.spelled(key)}")
    return count, chosen


def _sparse_layers(fields: Fields, layers: int, style: Style) -> set[int]:
    """The layers that have experts. Qwen3-MoE can name dense ones, or have experts in every n-th layer only."""
    if not style.experts:
        return set()
    if style.kind == "mixtral":
        return set(range(layers))
    step, dense = fields.count("decoder_sparse_step", 1), fields.get("mlp_only_layers", [])
    return {layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0}


def _every(default: int | None, switch: bool = False) -> Callable[[Fields, int], list[int | None]]:
    """One window for all layers. `default`: where the field is absent; `switch`: only where use_sliding_window is true."""

    def windows(fields: Fields, layers: int) -> list[int | None]:
        if switch and not fields.flag("use_sliding_window", False):
            return [None] * layers
        absent = None if fields.has("sliding_window") else default
        size = fields.get("sliding_window", absent)
        return [None if size is None else fields.count("sliding_window", size)] * layers

    return windows


def _some(kind: str) -> Callable[[Fields, int], list[int | None]]:
    """A window for those layers that layer_types names, or that the family takes where there are no layer_types."""

    def windows(fields: Fields, layers: int) -> list[int | None]:
        size = _every(4096, switch=kind.startswith("qwen"))(fields, layers)[0]
        kinds = fields.get("layer_types")
        if kinds is None:
            pattern = 2 if kind == "gemma2" else fields.count("sliding_window_pattern", 6)
            first = fields.count("max_window_layers", 28, least=0)
            sliding = [layer >= first if kind.startswith("qwen") else (layer + 1) % pattern > 0 for layer in range(layers)]
        else:
            unknown = set(map(str, kinds)) - {"full_attention", "sliding_attention"}
            if unknown or len(kinds) != layers:
                what = f"'{min(unknown)}'" if unknown else f"{len(kinds)} entries for {layers} layers"
                raise InputError(f"{fields.source}: layer_types has {what}; known are full_attention and sliding_attention")
            sliding = [kind == "sliding_attention" for kind in kinds]
        return [size if slides else None for slides in sliding]

    return windows


def _deepseek(fields: Fields) -> Parts:
    """Multi-head latent attention: DeepSeek-V2 report (arXiv:2405.04434) section 2.1; experts: V3 report (arXiv:2412.19437)."""
    model = begin(fields, False)
    hidden = model.hidden
    heads, rope, nope = fields.count("num_attention_heads"), fields.count("qk_rope_head_dim"), fields.count("qk_nope_head_dim")
    value, rank = fields.count("v_head_dim"), fields.count("kv_lora_rank")
    q_rank = fields.count("q_lora_rank") if fields.get("q_lora_rank") is not None else None  # null: no low-rank queries
    bias = fields.flag("attention_bias", False)
    dense_layers = fields.count("first_k_dense_replace", least=0)
    model.embedding("model.embed_tokens")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"model.layers.{layer}"
        attention = f"{name}.self_attn"
        if q_rank is None:
            model.linear(f"{attention}.q_proj", hidden, heads * (nope + rope))
        else:
            model.linear(f"{attention}.q_a_proj", hidden, q_rank, bias)
            model.norm(f"{attention}.q_a_layernorm", q_rank)
            model.linear(f"{attention}.q_b_proj", q_rank, heads * (nope + rope))
        model.linear(f"{attention}.kv_a_proj_with_mqa", hidden, rank + rope, bias)
        model.norm(f"{attention}.kv_a_layernorm", rank)
        model.linear(f"{attention}.kv_b_proj", rank, heads * (nope + value))
        model.linear(f"{attention}.o_proj", heads * value, hidden, bias)
        count = chosen = shared = 0
        if layer < dense_layers:
            ffn = fields.count("intermediate_size")
            gated_mlp(model, f"{name}.mlp", ffn)
        else:
            count, chosen = experts_of(fields, "n_routed_experts")
            ffn = fields.count("moe_intermediate_size")
            shared = ffn * fields.count("n_shared_experts")
            experts(model, name, count, chosen, ffn)
            model.add(f"{name}.mlp.gate.weight", count, hidden)
            gated_mlp(model, f"{name}.mlp.shared_experts", shared)
        model.norm(f"{name}.input_layernorm", hidden)
        model.norm(f"{name}.post_attention_layernorm", hidden)
        model.blocks.append(
            Block(name, heads, heads, nope + rope, ffn, True, count, chosen, shared, activation=fields.get("hidden_act", "silu"))
        )
    model.norm("model.norm", hidden)
    model.head()
    model.unmodelled = "multi-head latent attention"
    if fields.get("num_nextn_predict_layers", 0):
        model.assumed.append("without the layer for multi-token prediction, which transformers does not build")
    return model


_STYLES = (
    Style("llama", reads_bias=True, mlp_bias=True),
    Style("mistral", kv_heads=8, windows=_every(4096)),
    Style("qwen2", kv_heads=32, qkv_bias=True, windows=_some("qwen2")),
    Style("qwen3", kv_heads=32, head_dim=128, reads_bias=True, qk_norm=True, windows=_some("qwen3")),
    Style("mixtral", kv_heads=8, experts="num_local_experts", windows=_every(None)),
    Style("qwen3_moe", kv_heads=4, reads_bias=True, qk_norm=True, experts="num_experts", windows=_every(4096, switch=True)),
    Style("gemma", kv_heads=16, head_dim=256, tied=True, reads_bias=True),
    Style(
        "gemma2", kv_heads=4, head_dim=256, tied=True, reads_bias=True, norms=4, activation="hidden_activation",
        windows=_some("gemma2"),
    ),
    Style(
        "gemma3_text", kv_heads=4, head_dim=256, tied=True, reads_bias=True, qk_norm=True, norms=4,
        activation="hidden_activation", windows=_some("gemma3_text"),
    ),
)  # fmt: skip

LLAMA_KIND: dict[str, Family] = {
    style.kind: Family(
        _llama(style),
        (
            *SIZES,
            *((style.experts, "num_experts_per_tok") if style.experts else ()),
            *(("moe_intermediate_size",) if style.kind == "qwen3_moe" else ("intermediate_size",)),
        ),
        {"num_local_experts": "num_experts"} if style.kind == "qwen3_moe" else {},
    )
    for style in _STYLES
}
LLAMA_KIND["deepseek_v3"] = Family(
    _deepseek,
    (*SIZES, *LATENT, *EXPERTS[2:], "num_experts_per_tok", "n_shared_experts", "first_k_dense_replace"),
    {"num_local_experts": "n_routed_experts"},
)
