"""The planner's models: parameters in closed form against the modules of transformers, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from models import tiny_llama
from torch import nn

from zerostage.division import divide
from zerostage.mistakes import InputError
from zerostage.planning.model.catalog import CATALOG, find
from zerostage.planning.model.classics import FAMILIES
from zerostage.planning.model.resolve import resolve

SMALL = dict(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
OLD = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
WIDE = {**SMALL, "head_dim": 24}
MLA = dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12)
DEEPSEEK = {
    **{**SMALL, "num_key_value_heads": 4, "num_hidden_layers": 3},
    **MLA,
    **dict(n_routed_experts=8, n_shared_experts=2, moe_intermediate_size=32, first_k_dense_replace=1, num_experts_per_tok=2),
    **dict(n_group=2, topk_group=1),
}
TOYS = {
    "llama": ("llama", SMALL),
    "llama biases": ("llama", {**WIDE, "attention_bias": True, "mlp_bias": True}),
    "llama tied": ("llama", {**SMALL, "tie_word_embeddings": True, "vocab_size": 997}),
    "llama no kv heads": ("llama", OLD),
    "mistral": ("mistral", WIDE),
    "qwen2": ("qwen2", {**SMALL, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", SMALL),  # head_dim absent: 128
    "qwen3 biases": ("qwen3", {**WIDE, "attention_bias": True}),
    "mixtral": ("mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "qwen3_moe",
        {**WIDE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
        | {"mlp_only_layers": [1], "decoder_sparse_step": 2},
    ),
    "gemma": ("gemma", SMALL),
    "gemma2": ("gemma2", WIDE),
    "gemma3_text": ("gemma3_text", {**WIDE, "num_hidden_layers": 7, "sliding_window": 8}),
    "gemma3 untied": ("gemma3_text", {**WIDE, "tie_word_embeddings": False}),
    "phi": ("phi", {**SMALL, "qk_layernorm": True}),
    "phi tied": ("phi", {**SMALL, "tie_word_embeddings": True}),
    "phi3": ("phi3", SMALL),
    "gpt2": ("gpt2", dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, n_positions=32, n_inner=100)),
    "gpt2 untied": ("gpt2", dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, tie_word_embeddings=False)),
    "gptj": ("gptj", dict(vocab_size=97, n_embd=64, n_layer=2, n_head=4, rotary_dim=8)),
    "gpt_neox": ("gpt_neox", {**OLD, "attention_bias": False}),
    "falcon": ("falcon", OLD),
    "falcon new": ("falcon", {**OLD, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}),
    "falcon rw": ("falcon", {**OLD, "multi_query": False, "parallel_attn": False, "alibi": True, "ffn_hidden_size": 96}),
    "opt": ("opt", {**OLD, "ffn_dim": 128, "max_position_embeddings": 32}),
    "opt projected": ("opt", {**OLD, "ffn_dim": 128, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    "opt bare": ("opt", {**OLD, "ffn_dim": 128, "enable_bias": False, "layer_norm_elementwise_affine": False}),
    "bloom": ("bloom", dict(vocab_size=97, hidden_size=64, n_layer=2, n_head=4)),
    "starcoder2": ("starcoder2", {**SMALL, "use_bias": False}),
    "deepseek_v3": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": 24, "attention_bias": True}),
    "deepseek_v3 whole queries": ("deepseek_v3", {**DEEPSEEK, "q_lora_rank": None}),
}


def on_meta(model_type: str, config: dict) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = {key: value for key, value in config.items() if key != "model_type"}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **config))


def shapes(architecture) -> list:
    return [(weight.name, weight.shape) for weight in architecture.weights]


def check_against(architecture, model: nn.Module) -> None:
    """Names, shapes, order and units of the architecture are those of the module."""
    assert shapes(architecture) == [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    units = [(unit.name, [w.names for w in unit.weights], unit.resident) for unit in architecture.units]
    assert units == [(unit.name, unit.names, unit.resident) for unit in divide(model)]


def test_every_family_is_among_the_toys():
    assert {model_type for model_type, _ in TOYS.values()} == set(FAMILIES)


@pytest.mark.parametrize("toy", TOYS)
def test_closed_form_is_the_module(toy):
    model_type, config = TOYS[toy]
    architecture = resolve({"model_type": model_type, **config})
    model = on_meta(model_type, config)
    check_against(architecture, model)
    # and the same through the module: its config, as transformers writes it out, gives the same answer
    assert resolve(model).weights == architecture.weights
    assert resolve(model).blocks == architecture.blocks
    assert architecture.modelled == (model_type not in ("deepseek_v3", "falcon", "bloom"))


@pytest.mark.parametrize("name", ["llama-3-8b", "qwen2.5-0.5b", "qwen3-30b-a3b", "gemma-3-270m", "falcon-40b", "deepseek-v3"])
def test_built_in_model_is_the_module(name):
    check_against(resolve(name), on_meta(CATALOG[name]["model_type"], CATALOG[name]))


#: Totals that are published with the checkpoints (each as the model counts its own parameters, tied ones once).
PUBLISHED = {
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B-Instruct": 70_553_706_496,
    "llama_3.1_405b": 405_853_388_800,
    "Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-70b-chat-hf": 68_976_648_192,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
    "mistralai/Mistral-Nemo-Base-2407": 12_247_782_400,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-72B-Instruct": 72_706_203_648,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "google/gemma-2-9b-it": 9_241_705_984,
    "google/gemma-3-270m": 268_098_176,
    "google/gemma-3-1b-pt": 999_885_952,
    "microsoft/phi-2": 2_779_683_840,
    "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
    "microsoft/phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "openai-community/gpt2-xl": 1_557_611_200,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/gpt-j-6b": 6_050_882_784,
    "bigscience/bloom": 176_247_271_424,
    "tiiuae/falcon-7b": 6_921_720_704,
    "facebook/opt-350m": 331_196_416,
    "bigcode/starcoder2-7b": 7_173_923_840,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "HuggingFaceTB/SmolLM2-135M-Instruct": 134_515_008,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name):
    architecture = resolve(name)
    assert architecture.parameters == PUBLISHED[name]
    assert architecture.assumed == () or not architecture.modelled


def test_names_are_unambiguous():
    for name in CATALOG:
        assert find(name) == find(name.upper().replace("-", "_")) == name
    assert find("llama") is None and find("") is None


def test_experts_are_counted_with_what_a_token_uses():
    mixtral = resolve("mixtral-8x7b")  # R4: the dense formula gives 7,241,732,096
    assert (mixtral.parameters, mixtral.active_parameters) == (46_702_792_704, 12_879_925_248)
    assert (mixtral.blocks[0].experts, mixtral.blocks[0].experts_per_token) == (8, 2)
    deepseek = resolve("deepseek-ai/DeepSeek-R1")
    # the checkpoint's 671,026,419,200 less 58 x 256 correction biases of the router, which are buffers, not parameters
    assert deepseek.parameters == 671_026_419_200 - 58 * 256
    assert (deepseek.blocks[2].experts, deepseek.blocks[3].experts, deepseek.blocks[3].shared_ffn) == (0, 256, 2048)
    assert not deepseek.modelled and any("latent attention" in note for note in deepseek.assumed)


def test_head_dim_is_read():  # R5
    config = dict(CATALOG["qwen3-4b"])
    assert resolve(config).parameters == 4_022_468_096
    assert resolve({**config, "head_dim": None}).parameters == 3_668_570_240


def test_tied_embeddings_are_counted_once():  # R7
    config = dict(CATALOG["qwen2.5-0.5b"])
    assert resolve(config).parameters == 494_032_768
    assert resolve({**config, "tie_word_embeddings": False}).parameters == 630_167_424
    assert resolve(config).weights[0].names == ("model.embed_tokens.weight", "lm_head.weight")


def test_blocks_say_what_activations_follow_from():
    gemma = resolve("gemma-3-1b").blocks
    assert [block.window for block in gemma[:7]] == [512] * 5 + [None, 512]
    assert (gemma[0].norms, gemma[0].qk_norm, gemma[0].head_dim, gemma[0].activation) == (4, True, 256, "gelu_pytorch_tanh")
    assert [block.window for block in resolve("gemma-2-2b").blocks[:3]] == [4096, None, 4096]
    assert {block.window for block in resolve("mistral-7b").blocks} == {4096}
    assert {block.window for block in resolve("qwen3-8b").blocks} == {None}
    phi = resolve("phi-2").blocks[0]
    assert (phi.norms, phi.norm, phi.gated, phi.dropout) == (1, "layer", False, True)
    windowed = {**CATALOG["qwen2.5-7b"], "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 26}
    assert [block.window for block in resolve(windowed).blocks] == [None] * 26 + [100] * 2


# What is not modelled


def test_unknown_type_is_counted_on_meta():  # R12
    config = dict(model_type="olmo2", **SMALL)
    architecture = resolve(config)
    model = on_meta("olmo2", SMALL)
    check_against(architecture, model)
    assert not architecture.modelled and architecture.family == "olmo2"
    assert architecture.assumed == ("'olmo2' is not modelled in closed form: counted by building it on the meta device",)
    assert [block.name for block in architecture.blocks] == ["model.layers.0", "model.layers.1"]


def test_variant_of_a_known_family_is_counted_on_meta():
    config = dict(TOYS["gpt2"][1], add_cross_attention=True)
    architecture = resolve({"model_type": "gpt2", **config})
    check_against(architecture, on_meta("gpt2", config))
    assert "cross-attention" in architecture.assumed[0]


def test_experts_of_an_unmodelled_type_have_their_active_part():
    config = dict(WIDE, num_local_experts=4, num_experts_per_tok=1, model_type="gpt_oss", quantization_config=None)
    architecture = resolve(config)
    fused = sum(w.numel for w in architecture.weights if ".experts." in w.name)
    assert fused and architecture.active_parameters == architecture.parameters - fused * 3 // 4


class Odd(nn.Module):
    """Blocks of its own, one parameter shared by two of them, a module that is registered twice, a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(3)])
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.again = self.embed
        self.scale = nn.Parameter(torch.zeros(()))
        self.head = nn.Linear(8, 50)
        self.head.weight = self.embed.weight
        self.embed.weight.requires_grad_(False)


def test_module_is_counted_by_identity():
    model = Odd()
    architecture = resolve(model)
    assert architecture.parameters == sum(p.numel() for p in model.parameters())
    assert architecture.trainable_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    units = [(unit.name, [w.name for w in unit.weights], unit.resident) for unit in architecture.units]
    assert units == [(unit.name, [names[0] for names in unit.names], unit.resident) for unit in divide(model)]
    assert architecture.tied and not architecture.modelled


def test_function_is_built_on_meta(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(
        "import torch\nfrom torch import nn\ndef build():\n    return nn.Sequential(nn.Linear(10**6, 10**6))\n"
        "def wrong():\n    return 3\ndef broken():\n    raise ValueError('no\\nluck')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert resolve("own_model:build").parameters == 10**12 + 10**6
    for path, message in {
        "own_model:buidl": "has no buidl; did you mean build?",
        "own_model:wrong": "returned a int",
        "own_model:broken": "ValueError: no luck",
        "no_such_module_here:build": "cannot import no_such_module_here",
    }.items():
        refused(path, message)
    assert str(tmp_path) not in sys.path


def test_parameters_only():
    architecture = resolve(params=70.6e9)
    assert (architecture.parameters, architecture.family, architecture.modelled) == (70_600_000_000, "parameters", False)
    assert not architecture.blocks and "no layers" in architecture.assumed[0]
    assert sum(unit.numel for unit in architecture.units) == 70_600_000_000


def test_config_folder_needs_no_torch(tmp_path):  # R11
    (tmp_path / "config.json").write_text(json.dumps({**CATALOG["llama-3.1-70b"], "architectures": ["LlamaForCausalLM"]}))
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'numpy')))\n"
        "from zerostage.planning.model.resolve import resolve\n"
        "from zerostage.mistakes import InputError\n"
        f"a = resolve({str(tmp_path)!r})\n"
        "print(a.parameters, len(a.units), a.units[0].numel, a.modelled, a.assumed)\n"
        "try: resolve({'model_type': 'olmo2'})\n"
        "except InputError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    with_torch = resolve(on_meta("llama", CATALOG["llama-3.1-70b"]))
    first, second = done.stdout.splitlines()
    assert first == f"70553706496 {len(with_torch.units)} {with_torch.units[0].numel} True ()"
    assert "needs transformers and torch" in second


# Quantised weights and adapters

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "quant_method": "bitsandbytes"}


@pytest.mark.parametrize(
    "settings, bits",
    [
        ({**NF4, "bnb_4bit_use_double_quant": True}, 4 + 8 / 64 + 32 / 64 / 256),
        (NF4, 4.5),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8 + 24 / 4096),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
    ],
)
def test_quantised_weights_keep_their_count(settings, bits):  # R8
    architecture = resolve({**CATALOG["llama-2-13b"], "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32,
                            "quantization_config": settings})  # fmt: skip
    plain = resolve({**CATALOG["llama-2-13b"], "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32})
    assert shapes(architecture) == shapes(plain)
    by_name = {weight.name: weight for weight in architecture.weights}
    query = by_name["model.layers.3.self_attn.q_proj.weight"]
    assert query.bits == pytest.approx(bits) and not query.trainable and query.numel == 4096**2
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.input_layernorm.weight"):
        assert by_name[name].bits is None and by_name[name].trainable
    packed = sum(w.numel for w in architecture.weights if w.bits)
    assert packed == 40 * (4 * 4096**2 + 3 * 4096 * 13824)
    assert f"{packed:,} parameters are stored in" in architecture.assumed[0]


def test_bitsandbytes_leaves_experts_and_named_modules():
    mixtral = resolve({**CATALOG["mixtral-8x7b"], "quantization_config": {**NF4, "llm_int8_skip_modules": ["lm_head", "v_proj"]}})
    kinds = {w.name.split(".", 3)[-1] for w in mixtral.weights if w.bits}
    assert kinds == {f"self_attn.{part}_proj.weight" for part in "qko"}
    assert "experts are not quantised" in mixtral.assumed[1]
    awq = resolve({**CATALOG["mixtral-8x7b"], "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}})
    assert sum(w.numel for w in awq.weights if w.bits) > 46e9


def test_packed_parameter_counts_with_its_logical_shape():  # R8
    model = tiny_llama()
    packed = nn.Parameter(torch.zeros(32 * 64 // 2, 1, dtype=torch.uint8), requires_grad=False)
    packed.quant_state = SimpleNamespace(shape=torch.Size((64, 32)), absmax=torch.zeros(32 * 64 // 64))
    model.model.layers[0].mlp.up_proj.weight = packed
    architecture = resolve(model)
    assert architecture.parameters == resolve(tiny_llama()).parameters
    weight = next(w for w in architecture.weights if w.bits)
    assert (weight.name, weight.shape, weight.bits, weight.trainable) == (
        "model.layers.0.mlp.up_proj.weight", (64, 32), 4.5, False)  # fmt: skip
    assert architecture.modelled  # it still is a Llama, to the last parameter


def check_lora(config: dict, model: nn.Module, architecture) -> None:
    from peft import LoraConfig, get_peft_model

    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    check_against(architecture, adapted)
    assert [w.trainable for w in architecture.weights] == [p.requires_grad for p in adapted.parameters()]


ADAPTED = ("llama", "llama biases", "llama tied", "gpt2", "phi", "falcon", "mixtral", "qwen3_moe", "deepseek_v3")


@pytest.mark.parametrize("toy", ADAPTED)
def test_lora_is_pefts(toy):
    model_type, config = TOYS[toy]
    config = {"model_type": model_type, **config}
    architecture = resolve(config, lora_rank=4)
    check_lora(config, on_meta(model_type, config), architecture)
    assert resolve(on_meta(model_type, config), lora_rank=4).weights == architecture.weights
    assert any("rank 4" in note for note in architecture.assumed)


def test_lora_and_quantised_weights_of_an_unmodelled_type():
    config = dict(SMALL, model_type="olmo2")
    check_lora(config, on_meta("olmo2", config), resolve(config, lora_rank=4))
    four = resolve({**config, "quantization_config": NF4})
    assert sum(w.numel for w in four.weights if w.bits) == 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96)


def test_lora_counts():
    adapted = resolve("llama-2-7b", lora_rank=8)
    per_layer = 4 * 8 * (4096 + 4096) + 3 * 8 * (4096 + 11008)
    assert adapted.trainable_parameters == 32 * per_layer == 19_988_480
    assert adapted.parameters == 6_738_415_616 + 19_988_480


def test_lora_on_four_bits():
    adapted = resolve({**CATALOG["llama-2-7b"], "quantization_config": NF4}, lora_rank=8)
    assert adapted.trainable_parameters == 19_988_480
    assert sum(w.numel for w in adapted.weights if w.bits) == 32 * (4 * 4096**2 + 3 * 4096 * 11008)


# Bad input


def refused(model, *parts, **more) -> None:
    with pytest.raises(InputError) as caught:
        resolve(model, **more)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message, message


def llama(**changes) -> dict:
    return {"model_type": "llama", **SMALL, **changes}


@pytest.mark.parametrize(
    "config, parts",
    [
        ({"hidden_size": 64}, ["no model_type"]),
        (llama(num_attention_heads=5, num_key_value_heads=5), ["hidden_size 64 is not a multiple of 5 num_att", "head_dim"]),
        (llama(num_key_value_heads=3), ["4 num_attention_heads are not a multiple of 3 num_key_value_heads"]),
        (llama(vocab_size=0), ["vocab_size must be a whole number of at least 1, not 0"]),
        (llama(num_hidden_layers=-2), ["num_hidden_layers", "not -2"]),
        (llama(hidden_size=64.0), ["hidden_size", "not 64.0"]),
        (llama(intermediate_size="96"), ["intermediate_size", "not '96'"]),
        (llama(num_hidden_layers=True), ["num_hidden_layers", "not True"]),
        (llama(head_dim=0), ["head_dim", "not 0"]),
        (llama(tie_word_embeddings="no"), ["tie_word_embeddings must be true or false"]),
        (llama(hidden_size=None), ["hidden_size is null"]),
        (llama(q_lora_rank=16), ["q_lora_rank", "'llama' does not know"]),
        (llama(num_local_experts=8), ["num_local_experts", "'llama' does not know"]),
        (dict(TOYS["mixtral"][1], model_type="mixtral", n_shared_experts=1), ["n_shared_experts"]),
        (dict(TOYS["mixtral"][1], model_type="mixtral", num_experts_per_tok=5), ["5 is more than the 4 of num_local_experts"]),
        (dict(WIDE, model_type="gemma2", layer_types=["linear_attention"] * 2), ["layer_types has 'linear_attention'"]),
        (dict(WIDE, model_type="gemma2", layer_types=["full_attention"]), ["1 entries for 2 layers"]),
        (dict(model_type="gpt2", n_layer=2, n_head=4, vocab_size=9), ["the config has no n_embd"]),
        (dict(DEEPSEEK, model_type="deepseek_v3"), ["no q_lora_rank"]),
        (dict(model_type="lama"), ["model_type 'lama'; did you mean llama?"]),
        (dict(model_type="olmo2", hidden_size="x"), ["transformers cannot build this olmo2"]),
        (llama(quantization_config={"quant_method": "hqq"}), ["'hqq'", "known are"]),
        (llama(quantization_config={"quant_method": "gptq", "bits": 5}), ["bits 5"]),
        (llama(quantization_config="4bit"), ["must be an object"]),
        (llama(quantization_config={"quant_method": "fp8", "weight_block_size": [128]}), ["weight_block_size [128]"]),
        (llama(quantization_config={"quant_method": "bitsandbytes"}), ["neither in 4 nor in 8 bits"]),
        (llama(quantization_config={**NF4, "llm_int8_skip_modules": ["model"]}), ["applies to no linear layer"]),
    ],
)  # fmt: skip
def test_wrong_configs_are_refused(config, parts):
    refused(config, *parts)


def test_missing_fields_are_named_with_the_file(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "vocab_size": 97}))
    refused(tmp_path, str(path), "num_hidden_layers, num_attention_heads, intermediate_size")
    refused(str(path), str(path))
    path.write_text("{'model_type'")
    refused(path, f"{path} is not JSON")
    path.write_text("[1]")
    refused(path, "is a list")
    path.unlink()
    refused(tmp_path, "has no config.json")
    refused(path, "there is no file or folder")


def test_wrong_names_are_refused(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    refused("llama-3.1-9b", "did you mean llama-3.1-8b?")
    refused("qwen/qwen25-7", "did you mean qwen2.5-7b?")
    refused("", "no built-in model")
    refused("./missing/config.json", "no file or folder")
    refused(3, "not a int")
    refused(None, "give a model")
    refused("gpt2", "not both", params=1e9)
    for params in (0, -1.0, float("nan"), float("inf"), True, "7b"):
        refused(None, "params must be a positive number", params=params)
    for rank in (-1, 1.5, True):
        refused("gpt2", "lora_rank", lora_rank=rank)
    refused(None, "LoRA needs the shapes", params=1e9, lora_rank=8)
    refused(nn.Linear(2, 2), "shows none", lora_rank=2)


def test_another_publisher_is_said():
    assert "somebody/Qwen3-8B" in resolve("somebody/Qwen3-8B").assumed[0]
