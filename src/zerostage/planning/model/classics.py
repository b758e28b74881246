"""Parameters and blocks of families with layer norms and an ungated MLP (GPT-2 and its like), and of Phi-3.

As `families.py`: names, shapes and order of transformers' causal language models.
"""

from __future__ import annotations

from zerostage.planning.model.architecture import Block
from zerostage.planning.model.families import LLAMA_KIND, SIZES, Family, NotModelled, Parts, begin
from zerostage.planning.model.fields import EXPERTS, LATENT, SHARED, Fields


def _block(name: str, heads: int, kv_heads: int, head_dim: int, ffn: int, activation: str, **more) -> Block:
    return Block(name, heads, kv_heads, head_dim, ffn, **{"gated": False, "norm": "layer", "activation": activation, **more})


def _started(fields: Fields, family: str, tied: bool) -> Parts:
    fields.refuse(family, *LATENT, *EXPERTS, *SHARED)
    return begin(fields, tied)


def _gpt2(fields: Fields) -> Parts:
    model = _started(fields, "gpt2", True)
    hidden = model.hidden
    if fields.flag("add_cross_attention", False):
        raise NotModelled("cross-attention")
    model.positions = fields.count("max_position_embeddings", 1024)
    heads = fields.count("num_attention_heads")
    head_dim, ffn = fields.divided(heads), fields.count("n_inner", 4 * hidden)
    dropout = fields.dropout("attn_pdrop", "resid_pdrop", default=0.1)
    model.embedding("transformer.wte")
    model.add("transformer.wpe.weight", model.positions, hidden)
    for layer in range(fields.count("num_hidden_layers")):
        name = f"transformer.h.{layer}"
        model.norm(f"{name}.ln_1", hidden, True)
        for part, inputs, outputs in (("attn.c_attn", hidden, 3 * hidden), ("attn.c_proj", hidden, hidden)):
            _conv1d(model, f"{name}.{part}", inputs, outputs)
        model.norm(f"{name}.ln_2", hidden, True)
        for part, inputs, outputs in (("mlp.c_fc", hidden, ffn), ("mlp.c_proj", ffn, hidden)):
            _conv1d(model, f"{name}.{part}", inputs, outputs)
        model.blocks.append(
            _block(name, heads, heads, head_dim, ffn, fields.get("activation_function", "gelu_new"), dropout=dropout)
        )
    model.norm("transformer.ln_f", hidden, True)
    model.head()
    return model


def _conv1d(model: Parts, name: str, inputs: int, outputs: int) -> None:
    """GPT-2's linear layer: its weight is stored (in, out)."""
    model.add(f"{name}.weight", inputs, outputs)
    model.add(f"{name}.bias", outputs)


def _gptj(fields: Fields) -> Parts:
    model = _started(fields, "gptj", False)
    hidden = model.hidden
    heads = fields.count("num_attention_heads")
    head_dim, ffn = fields.divided(heads), fields.count("n_inner", 4 * hidden)
    dropout = fields.dropout("attn_pdrop", "resid_pdrop")
    model.embedding("transformer.wte")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"transformer.h.{layer}"
        model.norm(f"{name}.ln_1", hidden, True)
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            model.linear(f"{name}.attn.{part}", hidden, hidden)
        model.linear(f"{name}.mlp.fc_in", hidden, ffn, True)
        model.linear(f"{name}.mlp.fc_out", ffn, hidden, True)
        activation = fields.get("activation_function", "gelu_new")
        model.blocks.append(_block(name, heads, heads, head_dim, ffn, activation, norms=1, dropout=dropout))
    model.norm("transformer.ln_f", hidden, True)
    model.head(bias=True)
    return model


def _gpt_neox(fields: Fields) -> Parts:
    model = _started(fields, "gpt_neox", False)
    hidden, ffn = model.hidden, fields.count("intermediate_size")
    heads = fields.count("num_attention_heads")
    head_dim, bias = fields.divided(heads), fields.flag("attention_bias", True)
    dropout = fields.dropout("attention_dropout", "hidden_dropout")
    model.embedding("gpt_neox.embed_in")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"gpt_neox.layers.{layer}"
        model.norm(f"{name}.input_layernorm", hidden, True)
        model.norm(f"{name}.post_attention_layernorm", hidden, True)
        model.linear(f"{name}.attention.query_key_value", hidden, 3 * hidden, bias)
        model.linear(f"{name}.attention.dense", hidden, hidden, bias)
        model.linear(f"{name}.mlp.dense_h_to_4h", hidden, ffn, True)
        model.linear(f"{name}.mlp.dense_4h_to_h", ffn, hidden, True)
        model.blocks.append(_block(name, heads, heads, head_dim, ffn, fields.get("hidden_act", "gelu"), dropout=dropout))
    model.norm("gpt_neox.final_layer_norm", hidden, True)
    model.head()
    return model


def _falcon(fields: Fields) -> Parts:
    model = _started(fields, "falcon", True)
    hidden, ffn = model.hidden, fields.count("ffn_hidden_size", 4 * model.hidden)
    heads = fields.count("num_attention_heads")
    head_dim, bias = fields.divided(heads), fields.flag("bias", False)
    grouped, single = fields.flag("new_decoder_architecture", False), fields.flag("multi_query", True)
    kv_heads = fields.count("num_kv_heads", heads) if grouped else 1 if single else heads
    norms = ["post_attention_layernorm", "input_layernorm"]
    if fields.flag("parallel_attn", True):
        two = fields.count("num_ln_in_parallel_attn", 2 if grouped else 1) == 2
        norms = ["ln_attn", "ln_mlp"] if two else ["input_layernorm"]
    dropout = fields.dropout("attention_dropout", "hidden_dropout")
    model.embedding("transformer.word_embeddings")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"transformer.h.{layer}"
        model.linear(f"{name}.self_attention.query_key_value", hidden, (heads + 2 * kv_heads) * head_dim, bias)
        model.linear(f"{name}.self_attention.dense", hidden, hidden, bias)
        model.linear(f"{name}.mlp.dense_h_to_4h", hidden, ffn, bias)
        model.linear(f"{name}.mlp.dense_4h_to_h", ffn, hidden, bias)
        for norm in norms:
            model.norm(f"{name}.{norm}", hidden, True)
        activation = fields.get("activation", "gelu")
        model.blocks.append(_block(name, heads, kv_heads, head_dim, ffn, activation, norms=len(norms), dropout=dropout))
    model.norm("transformer.ln_f", hidden, True)
    model.head()
    model.unmodelled = "Falcon's attention and biases"
    return model


def _opt(fields: Fields) -> Parts:
    model = _started(fields, "opt", True)
    hidden, ffn = model.hidden, fields.count("ffn_dim")
    heads = fields.count("num_attention_heads")
    head_dim, width = fields.divided(heads), fields.count("word_embed_proj_dim", hidden)
    bias, affine = fields.flag("enable_bias", True), fields.flag("layer_norm_elementwise_affine", True)
    dropout = fields.dropout("dropout", default=0.1) or fields.dropout("attention_dropout")
    model.positions = fields.count("max_position_embeddings", 2048)
    model.embedding("model.decoder.embed_tokens", width)
    model.add("model.decoder.embed_positions.weight", model.positions + 2, hidden)  # two more, for padding
    if width != hidden:
        model.linear("model.decoder.project_out", hidden, width)
        model.linear("model.decoder.project_in", width, hidden)
    last = fields.flag("do_layer_norm_before", True) and not fields.flag("_remove_final_layer_norm", False)
    if last and affine:
        model.norm("model.decoder.final_layer_norm", hidden, True)
    for layer in range(fields.count("num_hidden_layers")):
        name = f"model.decoder.layers.{layer}"
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            model.linear(f"{name}.self_attn.{part}", hidden, hidden, bias)
        if affine:
            model.norm(f"{name}.self_attn_layer_norm", hidden, True)
        model.linear(f"{name}.fc1", hidden, ffn, bias)
        model.linear(f"{name}.fc2", ffn, hidden, bias)
        if affine:
            model.norm(f"{name}.final_layer_norm", hidden, True)
        model.blocks.append(_block(name, heads, heads, head_dim, ffn, fields.get("activation_function", "relu"), dropout=dropout))
    model.head(width=width)
    return model


def _bloom(fields: Fields) -> Parts:
    model = _started(fields, "bloom", True)
    hidden, ffn = model.hidden, 4 * model.hidden
    heads = fields.count("num_attention_heads")
    head_dim, dropout = fields.divided(heads), fields.dropout("attention_dropout", "hidden_dropout")
    model.embedding("transformer.word_embeddings")
    model.norm("transformer.word_embeddings_layernorm", hidden, True)
    for layer in range(fields.count("num_hidden_layers")):
        name = f"transformer.h.{layer}"
        model.norm(f"{name}.input_layernorm", hidden, True)
        model.linear(f"{name}.self_attention.query_key_value", hidden, 3 * hidden, True)
        model.linear(f"{name}.self_attention.dense", hidden, hidden, True)
        model.norm(f"{name}.post_attention_layernorm", hidden, True)
        model.linear(f"{name}.mlp.dense_h_to_4h", hidden, ffn, True)
        model.linear(f"{name}.mlp.dense_4h_to_h", ffn, hidden, True)
        model.blocks.append(_block(name, heads, heads, head_dim, ffn, "gelu_new", dropout=dropout))
    model.norm("transformer.ln_f", hidden, True)
    model.head()
    model.unmodelled = "ALiBi attention"
    return model


def _phi(fields: Fields) -> Parts:
    model = _started(fields, "phi", False)
    hidden, ffn = model.hidden, fields.count("intermediate_size")
    heads, kv_heads, head_dim = fields.heads()
    qk_norm = fields.flag("qk_layernorm", False)
    dropout = fields.dropout("attention_dropout", "resid_pdrop")
    model.embedding("model.embed_tokens")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"model.layers.{layer}"
        for part, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            model.linear(f"{name}.self_attn.{part}", hidden, size * head_dim, True)
        model.linear(f"{name}.self_attn.dense", heads * head_dim, hidden, True)
        if qk_norm:
            model.norm(f"{name}.self_attn.q_layernorm", hidden // heads, True)
            model.norm(f"{name}.self_attn.k_layernorm", hidden // heads, True)
        model.linear(f"{name}.mlp.fc1", hidden, ffn, True)
        model.linear(f"{name}.mlp.fc2", ffn, hidden, True)
        model.norm(f"{name}.input_layernorm", hidden, True)
        activation = fields.get("hidden_act", "gelu_new")
        model.blocks.append(_block(name, heads, kv_heads, head_dim, ffn, activation, norms=1, qk_norm=qk_norm, dropout=dropout))
    model.norm("model.final_layernorm", hidden, True)
    model.head(bias=True)
    return model


def _phi3(fields: Fields) -> Parts:
    model = _started(fields, "phi3", False)
    hidden, ffn = model.hidden, fields.count("intermediate_size")
    heads, kv_heads, head_dim = fields.heads()
    dropout = fields.dropout("attention_dropout", "resid_pdrop")
    window = fields.count("sliding_window") if fields.get("sliding_window") is not None else None
    model.embedding("model.embed_tokens")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"model.layers.{layer}"
        model.linear(f"{name}.self_attn.o_proj", heads * head_dim, hidden)
        model.linear(f"{name}.self_attn.qkv_proj", hidden, (heads + 2 * kv_heads) * head_dim)
        model.linear(f"{name}.mlp.gate_up_proj", hidden, 2 * ffn)
        model.linear(f"{name}.mlp.down_proj", ffn, hidden)
        model.norm(f"{name}.input_layernorm", hidden)
        model.norm(f"{name}.post_attention_layernorm", hidden)
        activation = fields.get("hidden_act", "silu")
        model.blocks.append(Block(name, heads, kv_heads, head_dim, ffn, window=window, activation=activation, dropout=dropout))
    model.norm("model.norm", hidden)
    model.head()
    return model


def _starcoder2(fields: Fields) -> Parts:
    model = _started(fields, "starcoder2", True)
    hidden, ffn = model.hidden, fields.count("intermediate_size")
    heads, kv_heads, head_dim = fields.heads(kv_default=2)
    bias = fields.flag("use_bias", True)
    dropout = fields.dropout("attention_dropout", "residual_dropout")
    window = fields.count("sliding_window") if fields.get("sliding_window") is not None else None
    model.embedding("model.embed_tokens")
    for layer in range(fields.count("num_hidden_layers")):
        name = f"model.layers.{layer}"
        for part, size in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            model.linear(f"{name}.self_attn.{part}", hidden, size * head_dim, bias)
        model.linear(f"{name}.self_attn.o_proj", heads * head_dim, hidden, bias)
        model.linear(f"{name}.mlp.c_fc", hidden, ffn, bias)
        model.linear(f"{name}.mlp.c_proj", ffn, hidden, bias)
        model.norm(f"{name}.input_layernorm", hidden, True)
        model.norm(f"{name}.post_attention_layernorm", hidden, True)
        activation = fields.get("hidden_act", "gelu_pytorch_tanh")
        model.blocks.append(_block(name, heads, kv_heads, head_dim, ffn, activation, window=window, dropout=dropout))
    model.norm("model.norm", hidden, True)
    model.head()
    return model


_GPT = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}
_BLOOM = {"n_embed": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads"}

#: All families in closed form, by transformers' model_type.
FAMILIES: dict[str, Family] = {
    **LLAMA_KIND,
    "phi": Family(_phi, (*SIZES, "intermediate_size")),
    "phi3": Family(_phi3, (*SIZES, "intermediate_size")),
    "gpt2": Family(_gpt2, SIZES, {**_GPT, "n_positions": "max_position_embeddings"}, transposed=True),
    "gptj": Family(_gptj, SIZES, {**_GPT, "n_positions": "max_position_embeddings"}),
    "gpt_neox": Family(_gpt_neox, (*SIZES, "intermediate_size")),
    "falcon": Family(_falcon, SIZES, {"n_embed": "hidden_size"}),
    "opt": Family(_opt, (*SIZES, "ffn_dim")),
    "bloom": Family(_bloom, SIZES, _BLOOM),
    "starcoder2": Family(_starcoder2, (*SIZES, "intermediate_size")),
}
