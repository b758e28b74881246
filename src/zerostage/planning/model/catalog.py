"""Built-in models: the fields of their published config.json that shapes and activations follow from.

Rows are in the order of the columns; '-' leaves a field out. Names are matched without regard to case, separators and
the publisher; words that do not change the shape ('instruct', 'chat', 'hf', ...) may be left on.
"""

from __future__ import annotations

import re
from typing import Any

_LLAMA = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_LAST = ("vocab_size", "max_position_embeddings", "tie_word_embeddings")
_COLUMNS = (*_LLAMA, *_LAST)
_PLAIN = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")

CATALOG: dict[str, dict[str, Any]] = {}


def _table(model_type: str, columns: tuple[str, ...], rows: str, **common: Any) -> None:
    """Add a row for each model. `common`: fields that all of them have."""
    for row in rows.strip().splitlines():
        name, *values = row.split()
        if len(values) != len(columns):
            raise ValueError(f"catalog: {name} has {len(values)} values for {len(columns)} columns")
        fields = {key: _value(value) for key, value in zip(columns, values) if value != "-"}
        CATALOG[name] = {"model_type": model_type, **common, **fields}


def _value(text: str) -> int | bool | None:
    return {"yes": True, "no": False, "none": None}[text] if text in ("yes", "no", "none") else int(text)


# fmt: off
_table("llama", _COLUMNS, """
llama-7b          32  4096 11008  32 32   -  32000   2048 no
llama-13b         40  5120 13824  40 40   -  32000   2048 no
llama-30b         60  6656 17920  52 52   -  32000   2048 no
llama-65b         80  8192 22016  64 64   -  32000   2048 no
llama-2-7b        32  4096 11008  32 32   -  32000   4096 no
llama-2-13b       40  5120 13824  40 40   -  32000   4096 no
llama-2-70b       80  8192 28672  64  8   -  32000   4096 no
codellama-7b      32  4096 11008  32 32   -  32016  16384 no
codellama-13b     40  5120 13824  40 40   -  32016  16384 no
codellama-34b     48  8192 22016  64  8   -  32000  16384 no
llama-3-8b        32  4096 14336  32  8   - 128256   8192 no
llama-3-70b       80  8192 28672  64  8   - 128256   8192 no
llama-3.1-8b      32  4096 14336  32  8   - 128256 131072 no
llama-3.1-70b     80  8192 28672  64  8   - 128256 131072 no
llama-3.1-405b   126 16384 53248 128  8   - 128256 131072 no
llama-3.2-1b      16  2048  8192  32  8  64 128256 131072 yes
llama-3.2-3b      28  3072  8192  24  8 128 128256 131072 yes
llama-3.3-70b     80  8192 28672  64  8   - 128256 131072 no
tinyllama-1.1b    22  2048  5632  32  4   -  32000   2048 no
smollm2-135m      30   576  1536   9  3   -  49152   8192 yes
smollm2-360m      32   960  2560  15  5   -  49152   8192 yes
smollm2-1.7b      24  2048  8192  32 32   -  49152   8192 yes
yi-6b             32  4096 11008  32  4   -  64000   4096 no
yi-34b            60  7168 20480  56  8   -  64000   4096 no
""")
_table("mistral", (*_COLUMNS, "sliding_window"), """
mistral-7b-v0.1     32  4096 14336 32 8   -  32000  32768 no 4096
mistral-7b-v0.2     32  4096 14336 32 8   -  32000  32768 no none
mistral-7b-v0.3     32  4096 14336 32 8   -  32768  32768 no none
mistral-nemo-12b    40  5120 14336 32 8 128 131072 131072 no none
mistral-small-24b   40  5120 32768 32 8 128 131072  32768 no none
mistral-large-123b  88 12288 28672 96 8 128  32768 131072 no none
""")
_table("mixtral", (*_COLUMNS, "num_local_experts", "num_experts_per_tok"), """
mixtral-8x7b   32 4096 14336 32 8 - 32000 32768 no 8 2
mixtral-8x22b  56 6144 16384 48 8 - 32768 65536 no 8 2
""", sliding_window=None)
_table("qwen2", _COLUMNS, """
qwen2.5-0.5b  24  896  4864 14  2 - 151936  32768 yes
qwen2.5-1.5b  28 1536  8960 12  2 - 151936 131072 yes
qwen2.5-3b    36 2048 11008 16  2 - 151936  32768 yes
qwen2.5-7b    28 3584 18944 28  4 - 152064 131072 no
qwen2.5-14b   48 5120 13824 40  8 - 152064 131072 no
qwen2.5-32b   64 5120 27648 40  8 - 152064 131072 no
qwen2.5-72b   80 8192 29568 64  8 - 152064 131072 no
""", use_sliding_window=False)
_table("qwen3", _COLUMNS, """
qwen3-0.6b  28 1024  3072 16 8 128 151936 40960 yes
qwen3-1.7b  28 2048  6144 16 8 128 151936 40960 yes
qwen3-4b    36 2560  9728 32 8 128 151936 40960 yes
qwen3-8b    36 4096 12288 32 8 128 151936 40960 no
qwen3-14b   40 5120 17408 40 8 128 151936 40960 no
qwen3-32b   64 5120 25600 64 8 128 151936 40960 no
""", use_sliding_window=False)
_table("qwen3_moe", (*_COLUMNS, "num_experts", "num_experts_per_tok", "moe_intermediate_size"), """
qwen3-30b-a3b    48 2048  6144 32 4 128 151936 40960 no 128 8  768
qwen3-235b-a22b  94 4096 12288 64 4 128 151936 40960 no 128 8 1536
""", use_sliding_window=False, decoder_sparse_step=1, mlp_only_layers=[])
_table("gemma", _COLUMNS, """
gemma-2b  18 2048 16384  8  1 256 256000 8192 yes
gemma-7b  28 3072 24576 16 16 256 256000 8192 yes
""")
_table("gemma2", _COLUMNS, """
gemma-2-2b   26 2304  9216  8  4 256 256000 8192 yes
gemma-2-9b   42 3584 14336 16  8 256 256000 8192 yes
gemma-2-27b  46 4608 36864 32 16 128 256000 8192 yes
""", sliding_window=4096)
_table("gemma3_text", (*_COLUMNS, "sliding_window"), """
gemma-3-270m  18  640  2048  4  1 256 262144  32768 yes  512
gemma-3-1b    26 1152  6912  4  1 256 262144  32768 yes  512
gemma-3-4b    34 2560 10240  8  4 256 262208 131072 yes 1024
gemma-3-12b   48 3840 15360 16  8 256 262208 131072 yes 1024
gemma-3-27b   62 5376 21504 32 16 128 262208 131072 yes 1024
""")
_table("phi", (*_PLAIN, "max_position_embeddings"), """
phi-1.5  24 2048  8192 32 51200 2048
phi-2    32 2560 10240 32 51200 2048
""", tie_word_embeddings=False)
CATALOG["phi-2"]["resid_pdrop"] = 0.1
_table("phi3", (*_COLUMNS, "sliding_window"), """
phi-3-mini    32 3072  8192 32 32 -  32064  4096 no 2047
phi-3-medium  40 5120 17920 40 10 -  32064  4096 no 2047
phi-4         40 5120 17920 40 10 - 100352 16384 no none
""")
_GPT = ("n_layer", "n_embd", "n_head")
_table("gpt2", _GPT, """
gpt2         12  768 12
gpt2-medium  24 1024 16
gpt2-large   36 1280 20
gpt2-xl      48 1600 25
""", vocab_size=50257, n_positions=1024)
# Table 2.1 of the GPT-3 paper (arXiv:2005.14165), built as GPT-2.
_table("gpt2", _GPT, """
gpt3-125m  12   768 12
gpt3-350m  24  1024 16
gpt3-760m  24  1536 16
gpt3-1.3b  24  2048 16
gpt3-2.7b  32  2560 32
gpt3-6.7b  32  4096 32
gpt3-13b   40  5120 40
gpt3-175b  96 12288 96
""", vocab_size=50257, n_positions=2048)
_table("gptj", (*_GPT, "n_positions", "vocab_size"), """
gpt-j-6b  28 4096 16 2048 50400
""", tie_word_embeddings=False)
_table("gpt_neox", _PLAIN, """
pythia-70m    6  512  2048  8 50304
pythia-160m  12  768  3072 12 50304
pythia-410m  24 1024  4096 16 50304
pythia-1b    16 2048  8192  8 50304
pythia-1.4b  24 2048  8192 16 50304
pythia-2.8b  32 2560 10240 32 50304
pythia-6.9b  32 4096 16384 32 50432
pythia-12b   36 5120 20480 40 50688
gpt-neox-20b 44 6144 24576 64 50432
""", max_position_embeddings=2048, tie_word_embeddings=False)
_table("opt", ("num_hidden_layers", "hidden_size", "ffn_dim", "num_attention_heads"), """
opt-125m  12  768  3072 12
opt-350m  24 1024  4096 16
opt-1.3b  24 2048  8192 32
opt-2.7b  32 2560 10240 32
opt-6.7b  32 4096 16384 32
opt-13b   40 5120 20480 40
opt-30b   48 7168 28672 56
opt-66b   64 9216 36864 72
""", vocab_size=50272, max_position_embeddings=2048)
CATALOG["opt-350m"].update(word_embed_proj_dim=512, do_layer_norm_before=False)
_table("bloom", ("n_layer", "hidden_size", "n_head"), """
bloom-560m  24  1024  16
bloom-1b1   24  1536  16
bloom-1b7   24  2048  16
bloom-3b    30  2560  32
bloom-7b1   30  4096  32
bloom-176b  70 14336 112
""", vocab_size=250880)
_table("falcon", ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_kv_heads", "new_decoder_architecture"), """
falcon-7b   32 4544  71 - no
falcon-40b  60 8192 128 8 yes
""", vocab_size=65024, multi_query=True, parallel_attn=True, bias=False)
_table("starcoder2", (*_LLAMA[:5], "tie_word_embeddings"), """
starcoder2-3b   30 3072 12288 24 2 yes
starcoder2-7b   32 4608 18432 36 4 yes
starcoder2-15b  40 6144 24576 48 4 no
""", vocab_size=49152, max_position_embeddings=16384, sliding_window=4096, use_bias=True,
     attention_dropout=0.1, residual_dropout=0.1, embedding_dropout=0.1)
# fmt: on
CATALOG["deepseek-v3"] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "tie_word_embeddings": False,
}

_TEXT = "the text model only: the published one has a vision tower beside it"
#: What a user of a built-in model has to know.
NOTES: dict[str, str] = {
    "gemma-3-4b": _TEXT,
    "gemma-3-12b": _TEXT,
    "gemma-3-27b": _TEXT,
    "gpt3-1.3b": "16 heads of 128: the paper's 24 heads of 128 do not make its hidden size of 2048",
    "gpt3-13b": "hidden size 5120 = 40 heads of 128: the paper's 5140 is no multiple of its heads",
    "gpt3-175b": "built as GPT-2: every layer attends to all positions, where GPT-3 alternates with sparse ones",
}

_OTHER_NAMES = {
    "llama-1-7b": "llama-7b",
    "llama-1-13b": "llama-13b",
    "llama-1-30b": "llama-30b",
    "llama-33b": "llama-30b",
    "llama-1-65b": "llama-65b",
    "codellama-34b-python": "codellama-34b",
    "mistral-7b": "mistral-7b-v0.1",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "mistral-nemo": "mistral-nemo-12b",
    "mistral-nemo-2407": "mistral-nemo-12b",
    "mistral-small-24b-2501": "mistral-small-24b",
    "mistral-large-2407": "mistral-large-123b",
    "mistral-large-2411": "mistral-large-123b",
    "tinyllama": "tinyllama-1.1b",
    "tinyllama-1.1b-v1.0": "tinyllama-1.1b",
    "phi-1_5": "phi-1.5",
    "phi-3-mini-4k": "phi-3-mini",
    "phi-3-medium-4k": "phi-3-medium",
    "gpt2-small": "gpt2",
    "gpt2-124m": "gpt2",
    "gpt2-355m": "gpt2-medium",
    "gpt2-774m": "gpt2-large",
    "gpt2-1.5b": "gpt2-xl",
    "gpt3": "gpt3-175b",
    "gpt-j": "gpt-j-6b",
    "gpt-neox": "gpt-neox-20b",
    "bloom": "bloom-176b",
    "deepseek-r1": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
}

#: Words of a name that do not change the shape.
_NO_SHAPE = {"instruct", "base", "chat", "hf", "it", "pt", "meta"}

#: Who publishes these models on the hub. The same name under another publisher is taken for the same model, and said so.
PUBLISHERS = set(
    "meta-llama huggyllama codellama qwen mistralai mistral-community google microsoft openai-community deepseek-ai 01-ai "
    "huggingfacetb tinyllama facebook bigscience tiiuae eleutherai bigcode unsloth nousresearch".split()
)


def _key(name: str, words_off: bool = False) -> str:
    """A name without separators. The points of versions stay: 'opt-1.3b' is not 'opt-13b'."""
    words = re.split(r"[-_: ]+", name.lower())
    return "".join(word for word in words if not (words_off and word in _NO_SHAPE))


_KEYS = {_key(name): name for name in CATALOG} | {_key(other): name for other, name in _OTHER_NAMES.items()}


def find(name: str) -> str | None:
    """The built-in name that is meant by `name`: 'meta-llama/Meta-Llama-3.1-8B-Instruct' is 'llama-3.1-8b'. None: none is."""
    short = name.strip().rpartition("/")[2]
    return _KEYS.get(_key(short)) or _KEYS.get(_key(short, words_off=True))
