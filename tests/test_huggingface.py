"""Hugging Face models in tiny configurations: three steps at every stage, with the bits of stage 0.

Stage 0 itself is compared with plain torch on the joined batch (fp32, 1e-5: some of these
models sum over many more elements than the toys of test_training.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import batch, joined_batch, tiny_llama
from ranks import run
from torch import nn

import zerostage
from zerostage import Precision

TEXT = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
GQA = TEXT | dict(num_key_value_heads=2, head_dim=8, use_cache=False, pad_token_id=0, bos_token_id=1, eos_token_id=2)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4,
                                      resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=1, eos_token_id=2))  # fmt: skip


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**GQA))


def gemma() -> nn.Module:
    from transformers import GemmaConfig, GemmaForCausalLM

    return GemmaForCausalLM(GemmaConfig(**GQA))


def mistral() -> nn.Module:
    from transformers import MistralConfig, MistralForCausalLM

    return MistralForCausalLM(MistralConfig(**GQA, sliding_window=8))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**GQA, num_local_experts=4, num_experts_per_tok=2, output_router_logits=True))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4,
                                               dropout_rate=0.0, decoder_start_token_id=0))  # fmt: skip


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**TEXT, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    shape = {k: v for k, v in TEXT.items() if k != "vocab_size"}
    config = ViTConfig(**shape, image_size=16, patch_size=8, num_labels=5, hidden_dropout_prob=0.0)
    return ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": tiny_llama, "qwen3": qwen3, "gemma": gemma, "mistral": mistral, "mixtral": mixtral,
    "gpt2": gpt2, "t5": t5, "bert": bert, "vit": vit,
}  # fmt: skip


def inputs(name: str, rank: int, step: int) -> dict[str, torch.Tensor]:
    tokens = batch(rank, step)
    if name == "vit":
        generator = torch.Generator().manual_seed(rank + 100 * step)
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator), "labels": tokens["labels"][:, 0] % 5}
    return tokens


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().train()


def trained(rank: int, n: int, name: str, stage: int | None, checkpointing: bool = False) -> dict[str, Any]:
    model = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    written = []
    prompt = batch(rank, 9)["input_ids"][:, :5]
    for step in range(3):
        if stage is None:
            torch.stack([model(**inputs(name, r, step)).loss for r in range(n)]).mean().backward()
        else:
            model(**inputs(name, rank, step)).loss.backward()
        if name not in ("bert", "vit") and stage is not None:
            model.eval()
            written.append(model.generate(prompt, max_new_tokens=3, min_new_tokens=3, do_sample=False))
            model.train()
        optimizer.step()
        optimizer.zero_grad()
    state = model.state_dict() if stage is None else zerostage.full_state_dict(model, rank0_only=False)
    return {"state": dict(state), "written": written}


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_and_generation_at_every_stage(name: str) -> None:
    plain = trained(0, 2, name, None)["state"]
    reference = run(trained, n=2, name=name, stage=0)
    for key, value in plain.items():
        assert torch.allclose(reference[0]["state"][key], value, atol=1e-5, rtol=0), key
    for stage in (1, 2, 3):
        for rank, result in enumerate(run(trained, n=2, name=name, stage=stage)):
            assert result["state"].keys() == plain.keys()
            for key, value in reference[0]["state"].items():
                assert torch.equal(result["state"][key], value), (stage, key)
            assert all(torch.equal(a, b) for a, b in zip(result["written"], reference[rank]["written"], strict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_with_activation_checkpointing_too(name: str) -> None:
    reference = run(trained, n=2, name=name, stage=0, checkpointing=True)
    for result, expected in zip(run(trained, n=2, name=name, stage=3, checkpointing=True), reference):
        assert all(torch.equal(result["state"][key], value) for key, value in expected["state"].items())


def adapted(rank: int, n: int, stage: int | None) -> dict[str, torch.Tensor]:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = get_peft_model(tiny_llama(layers=8), config)
    trainable = [p for p in model.parameters() if p.requires_grad]
    assert len(trainable) == 8 * 2 * 3  # two matrices for each of three modules in each block
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(trainable, lr=1e-3, eps=1e-4, weight_decay=0.0)
    if stage is not None:
        zerostage.shard(model, optimizer, stage=stage)
    for step in range(3):
        tokens = joined_batch(n, step) if stage is None else batch(rank, step)
        model(**tokens).loss.backward()
        assert all(p.grad is not None for p in trainable)
        if stage is not None:
            found = zerostage.audit(model, optimizer)
            assert found.without_gradient == [] and "48 of 48 trainable parameters have a gradient." in found.notes
        optimizer.step()
        optimizer.zero_grad()
    state = dict(model.state_dict()) if stage is None else zerostage.full_state_dict(model, rank0_only=False)
    assert not any(torch.equal(state[name], value) for name, value in start.items())  # no gradient was zero
    return state


def test_B6_lora_trains_every_adapter() -> None:
    plain = adapted(0, 2, None)
    start = tiny_llama(layers=8).state_dict()
    for stage in range(4):
        for state in run(adapted, n=2, stage=stage):
            assert state.keys() == plain.keys()
            for key, value in plain.items():
                assert torch.allclose(state[key], value, atol=1e-6, rtol=0), (stage, key)
    frozen = plain["base_model.model.model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(frozen, start["model.layers.0.mlp.up_proj.weight"])


def preferred(rank: int, n: int, stage: int | None, checkpointing: bool) -> dict[str, torch.Tensor]:
    policy, reference = tiny_llama(), tiny_llama(seed=1).requires_grad_(False)
    if checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    if stage is not None:
        zerostage.shard(policy, optimizer, stage=stage)
        zerostage.shard(reference, stage=stage)
    with torch.no_grad():
        policy(**batch(rank, 90)), reference(**batch(rank, 90))

    def score(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        log = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        return log.gather(-1, tokens[:, 1:, None]).sum((1, 2))

    def loss(r: int, step: int) -> torch.Tensor:
        chosen, rejected = batch(r, step)["input_ids"], batch(r, step + 50)["input_ids"]
        with torch.no_grad():
            margin = score(reference, chosen) - score(reference, rejected)
        return -nn.functional.logsigmoid(0.1 * (score(policy, chosen) - score(policy, rejected) - margin)).mean()

    for step in range(5):
        total = loss(rank, step) if stage is not None else torch.stack([loss(r, step) for r in range(n)]).mean()
        total.backward()
        optimizer.step()
        optimizer.zero_grad()
    if stage is None:
        return dict(policy.state_dict()) | {f"reference.{k}": v for k, v in reference.state_dict().items()}
    whole = zerostage.full_state_dict(policy, rank0_only=False)
    return whole | {f"reference.{k}": v for k, v in zerostage.full_state_dict(reference, rank0_only=False).items()}


@pytest.mark.parametrize("checkpointing", [False, True])
def test_N3_D5_a_policy_beside_a_frozen_reference(checkpointing: bool) -> None:
    plain = preferred(0, 2, None, checkpointing)
    for stage in range(4):
        for state in run(preferred, n=2, stage=stage, checkpointing=checkpointing):
            for key, value in plain.items():
                if key.startswith("reference."):
                    assert torch.equal(state[key], value)
                else:
                    assert torch.allclose(state[key], value, atol=1e-6, rtol=0), (stage, key)


def mixed(rank: int, n: int, stage: int) -> dict[str, torch.Tensor]:
    """bf16 linear layers, fp32 norms and a frozen uint8 parameter in one block."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16, dtype=torch.bfloat16), nn.LayerNorm(16)) for _ in range(2)))
    for block in model:
        block.packed = nn.Parameter(torch.arange(10, dtype=torch.uint8), requires_grad=False)
        block[1].register_forward_pre_hook(lambda m, args: (args[0].float(),))
        block[0].register_forward_pre_hook(lambda m, args: (args[0].bfloat16(),))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    zerostage.shard(model, optimizer, stage=stage)
    masters = {flat.dtype: flat.master_dtype for flat in zerostage.engine.engine_of(model).flats if flat.trainable}
    assert masters == {torch.bfloat16: torch.float32, torch.float32: torch.float32}
    for step in range(3):
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return zerostage.full_state_dict(model, rank0_only=False)


def test_J4_dtypes_mix_in_a_block_and_are_kept() -> None:
    reference = run(mixed, n=2, stage=0)[0]
    assert {key: value.dtype for key, value in reference.items() if key.startswith("0.")} == {
        "0.packed": torch.uint8, "0.0.weight": torch.bfloat16, "0.0.bias": torch.bfloat16,
        "0.1.weight": torch.float32, "0.1.bias": torch.float32,
    }  # fmt: skip
    assert torch.equal(reference["0.packed"], torch.arange(10, dtype=torch.uint8))
    for stage in (1, 2, 3):
        for state in run(mixed, n=2, stage=stage):
            assert all(torch.equal(state[key], value) for key, value in reference.items())


def buffers(rank: int, n: int, stage: int) -> dict[str, Any]:
    model = tiny_llama()
    before = model.model.rotary_emb.inv_freq.clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    zerostage.shard(model, optimizer, stage=stage, precision=Precision())
    model(**batch(rank, 0)).loss.backward()
    optimizer.step()
    return {"before": before, "after": model.model.rotary_emb.inv_freq.clone()}


def test_J1_rotary_tables_keep_their_dtype() -> None:
    for stage in (0, 3):
        for result in run(buffers, n=2, stage=stage):
            assert result["after"].dtype == torch.float32 and torch.equal(result["before"], result["after"])
