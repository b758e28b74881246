"""Checkpoints as Hugging Face folders: `zerostage export` and `zerostage inspect`, on checkpoints of real ranks."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tracemalloc
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from allocations import recorded
from click.testing import CliRunner
from models import batch, tiny_llama
from ranks import run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

import zerostage
from zerostage import Precision
from zerostage.checkpoint import commands, tensor_file
from zerostage.checkpoint.damage import DamagedError
from zerostage.checkpoint.exporting import export
from zerostage.checkpoint.saving import save
from zerostage.checkpoint.source import Piece, Source, Stored
from zerostage.checkpoint.stored import StoredSource
from zerostage.checkpoint.tensor_file import Item
from zerostage.mistakes import InputError

WORDS = ["<pad>", "<s>", "</s>", "zero", "stage", "shards"]
SIZES = (5, 7, 13)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


class Wrapped(nn.Module):
    """The model under the prefix a.b."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.a = nn.Module()
        self.a.b = model

    def forward(self, **inputs: Any) -> Any:
        return self.a.b(**inputs)


class Odd(nn.Module):
    """Parameters of 5, 7 and 13 elements, one of them a matrix, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        for size in SIZES:
            setattr(self, f"w{size}", nn.Parameter(torch.arange(size, dtype=torch.float32) + size))
        self.matrix = nn.Parameter(torch.arange(35, dtype=torch.float32).view(5, 7))
        self.empty, self.scalar = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.tensor(2.5))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("passing", torch.ones(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(p.sum() for p in self.parameters()) * x.sum()


def trained(model: nn.Module, rank: int, steps: int = 2) -> tuple[nn.Module, torch.optim.Optimizer]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    zerostage.shard(model, optimizer, stage=3, precision=Precision())
    for step in range(steps):
        model(**batch(rank, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(**batch(0, 9)).logits


def adapted(base: nn.Module) -> nn.Module:
    """LoRA on attention, on the embedding, a head that is trained whole, and trained biases."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "embed_tokens"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        config = LoraConfig(r=2, target_modules=targets, modules_to_save=["lm_head"], bias="lora_only")
        model = get_peft_model(base, config)
    return model


def save_all(rank: int, n: int, folder: str) -> dict[str, Any]:
    """Checkpoints of stage 3, and what the models say after training."""
    place, found = Path(folder), {}
    for name in ("tied", "untied"):
        model = LlamaForCausalLM.from_pretrained(place / f"hf-{name}").train()
        model, optimizer = trained(model, rank)
        save(place / name / "step-2", model, optimizer, {"epoch": 3, "seen": 12}, beside=[tokenizer()] if name == "tied" else [])
        found[name] = logits(model), zerostage.full_state_dict(model)
    model, optimizer = trained(Wrapped(tiny_llama(tie=True)), rank)
    save(place / "wrapped", model, optimizer)
    found["wrapped"] = zerostage.full_state_dict(model)
    return found


def save_lora(rank: int, n: int, folder: str) -> Any:
    model, optimizer = trained(adapted(LlamaForCausalLM.from_pretrained(Path(folder) / "hf-biased").train()), rank)
    save(Path(folder) / "lora", model, optimizer)
    return logits(model), zerostage.full_state_dict(model)


def save_odd(rank: int, n: int, folder: str) -> None:
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    zerostage.shard(model, optimizer, stage=3, precision=Precision.full())
    save(Path(folder) / f"odd-{n}", model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The checkpoints of four ranks (LoRA's of two), and what rank 0 knows of them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name in ("tied", "untied", "biased"):
        model = tiny_llama(tie=name == "tied", attention_bias=name == "biased", dtype=torch.bfloat16)
        model.save_pretrained(folder / f"hf-{name}")
    return folder, {**run(save_all, n=4, folder=str(folder))[0], "lora": run(save_lora, n=2, folder=str(folder))[0]}


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the library warns of, line by line."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    monkeypatch.setattr(logging.getLogger("zerostage"), "handlers", [handler])
    return lines


def exported(*arguments: Any) -> str:
    """What `zerostage export` prints."""
    done = CliRunner().invoke(commands.export, [str(argument) for argument in arguments], catch_exceptions=False)
    assert done.exit_code == 0 and not torch.distributed.is_initialized()
    return done.stdout


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Of all safetensors files of a folder, none of which has anything but tensors."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        part = load_file(file)
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert header % 8 == 0 and file.stat().st_size == 8 + header + sum(tensor.nbytes for tensor in part.values())
        with safe_open(file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        assert not found.keys() & part.keys()
        found.update(part)
    return found


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape and torch.equal(found[name], value), name


def read_back(folder: Path, **options: Any) -> nn.Module:
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    return model


def test_H19_H11_A4_one_command_from_four_ranks_to_a_hugging_face_folder(saved: Any, tmp_path: Path, warned: list[str]) -> None:
    from transformers import AutoTokenizer

    folder, told = saved
    expected_logits, state = told["tied"]
    printed = exported(folder / "tied", tmp_path / "out")  # the newest whole checkpoint of the folder
    reference = load_file(folder / "hf-tied" / "model.safetensors")
    found = tensors(tmp_path / "out")
    same(found, {name: state[name] for name in reference})
    assert "lm_head.weight" in state and "lm_head.weight" not in found
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((folder / "hf-tied" / "config.json").read_text()) and config["dtype"] == "bfloat16"
    model = read_back(tmp_path / "out")
    assert torch.equal(logits(model), expected_logits) and model.lm_head.weight is model.model.embed_tokens.weight
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("zero stage shards")["input_ids"] == [3, 4, 5]
    size = sum(tensor.nbytes for tensor in found.values())
    assert printed.splitlines()[0] == f"wrote {len(found)} tensors ({len(found)} of bfloat16), {size:,} bytes, to {tmp_path}/out"
    assert all(f" {name}," in f"{printed}," for name in ("model.safetensors", "config.json", "tokenizer.json")) and not warned

    exported(folder / "tied" / "step-2", tmp_path / "out", "--dtype", "fp32")  # in the place of the other
    source, masters = StoredSource(folder / "tied" / "step-2"), tensors(tmp_path / "out")
    assert masters.keys() == found.keys()
    for name, value in masters.items():
        master = torch.empty(value.numel())
        source.read("master", [Piece(name, 0, value.numel(), master)])
        assert value.dtype == torch.float32 and torch.equal(value, master.view(value.shape))
        assert torch.equal(value.bfloat16(), found[name]) and not torch.equal(value, found[name].float())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert logits(read_back(tmp_path / "out")).dtype == torch.float32
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out"]


def test_H19_a_small_shard_size_gives_many_files_and_the_index_that_transformers_writes(saved: Any, tmp_path: Path) -> None:
    folder, told = saved
    model = read_back(folder / "hf-untied")
    for size, limit in (("1kB", 1000), ("0.02MB", 20_000)):
        report = export(folder / "untied" / "step-2", tmp_path / "out", max_shard_size=size)
        model.save_pretrained(tmp_path / "reference", max_shard_size=size)
        mine, theirs = (json.loads((tmp_path / one / "model.safetensors.index.json").read_text()) for one in ("out", "reference"))
        assert mine["metadata"] == theirs["metadata"] and mine["weight_map"].keys() == theirs["weight_map"].keys()
        files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
        assert len(files) > 1 and files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
        assert files == sorted(set(mine["weight_map"].values())) == [f for f in report["files"] if f.endswith(".safetensors")]
        for file in files:
            inside = load_file(tmp_path / "out" / file)
            assert inside.keys() == {name for name, home in mine["weight_map"].items() if home == file}
            assert len(inside) == 1 or sum(tensor.nbytes for tensor in inside.values()) <= limit
        same(tensors(tmp_path / "out"), told["untied"][1])
        assert torch.equal(logits(read_back(tmp_path / "out")), told["untied"][0])


def test_A4_a_head_that_only_the_config_ties_is_kept_where_it_differs(saved: Any, tmp_path: Path, warned: list[str]) -> None:
    folder, told = saved
    state = told["untied"][1]
    export(folder / "untied", tmp_path / "out", assets=folder / "hf-tied")
    same(tensors(tmp_path / "out"), state)
    assert read_back(tmp_path / "out").lm_head.weight is not read_back(tmp_path / "out").model.embed_tokens.weight
    parts = ("tie_word_embeddings", "'model.embed_tokens.weight'", "'lm_head.weight'", "both are written")
    assert len(warned) == 1 and all(part in warned[0] for part in parts)
    # A checkpoint that does not know what was shared, as torch.distributed.checkpoint's.
    source = StoredSource(folder / "tied" / "step-2")
    source.names = ["lm_head.weight", *source.names]
    export(source, tmp_path / "out")
    same(tensors(tmp_path / "out"), {name: value for name, value in told["tied"][1].items() if name != "lm_head.weight"})
    assert len(warned) == 1


def load_wrapped(rank: int, n: int, folder: str) -> tuple[dict[str, torch.Tensor], str]:
    with torch.device("meta"):
        model = Wrapped(tiny_llama(tie=True))
    zerostage.shard(model, stage=0, precision=Precision())
    zerostage.load_weights(model, Path(folder) / "out")
    state = zerostage.full_state_dict(model)
    with pytest.raises(KeyError) as caught:
        zerostage.load_weights(model, Path(folder) / "lacking.safetensors")
    return state, str(caught.value)


def test_A5_tied_weights_under_a_prefix_and_a_missing_key(saved: Any, tmp_path: Path, warned: list[str]) -> None:
    folder, told = saved
    export(folder / "wrapped", tmp_path / "out", dtype="bf16")
    assert len(warned) == 1 and "no config.json, which from_pretrained needs" in warned[0]
    found = tensors(tmp_path / "out")
    same(found, {name: value for name, value in told["wrapped"].items() if name != "a.b.lm_head.weight"})
    key = "a.b.model.layers.1.mlp.up_proj.weight"
    save_file({name: value for name, value in found.items() if name != key}, tmp_path / "lacking.safetensors")
    ((state, message),) = run(load_wrapped, n=1, folder=str(tmp_path))
    same(state, told["wrapped"])
    assert f"'{key}'" in message
    source = StoredSource(folder / "wrapped")
    del source.parameters[key]
    with pytest.raises(KeyError, match=key):
        export(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_L5_sizes_that_no_number_of_ranks_divides_keep_their_shapes(tmp_path: Path) -> None:
    expected = {name: value for name, value in Odd().state_dict().items()}
    assert "passing" not in expected and expected["count"].dtype == torch.int64
    for n in (2, 3, 4):
        run(save_odd, n=n, folder=str(tmp_path))
        report = export(tmp_path / f"odd-{n}", tmp_path / f"out-{n}", max_shard_size=60)
        same(tensors(tmp_path / f"out-{n}"), expected)
        assert report["tensors"] == len(expected) and report["dtypes"] == {"float32": 6, "int64": 1}
        assert report["bytes"] == sum(value.nbytes for value in expected.values())


def test_a_lora_checkpoint_is_exported_as_base_model_and_adapter(saved: Any, tmp_path: Path, warned: list[str]) -> None:
    from peft import PeftModel

    folder, told = saved
    expected, state = told["lora"]
    printed = exported(folder / "lora", tmp_path / "out", "--dtype", "bf16")
    base = read_back(folder / "hf-biased")
    clean = {re.sub(r"base_model\.model\.|\.base_layer|\.original_module", "", name): value for name, value in state.items()}
    same(tensors(tmp_path / "out"), {name: clean[name] for name in base.state_dict()})
    model = read_back(tmp_path / "out")
    assert type(model).__name__ == "LlamaForCausalLM" and not (tmp_path / "out" / "adapter_config.json").exists()
    assert not torch.equal(logits(model), expected)
    model = PeftModel.from_pretrained(model, tmp_path / "out" / "adapter", autocast_adapter_dtype=False)
    assert torch.equal(logits(model), expected)
    assert ": the base model; its adapter, " in printed and printed.count("\n") == 2 and not warned

    reference = adapted(base)
    reference.load_state_dict(state)
    reference.save_pretrained(tmp_path / "reference")
    report = export(folder / "lora", tmp_path / "alone", adapter=True, dtype=torch.bfloat16)
    found = tensors(tmp_path / "alone")
    written = load_file(tmp_path / "reference" / "adapter_model.safetensors")  # by peft, with adapters in fp32
    same(found, {name: value.bfloat16() for name, value in written.items()})
    assert any("lora_embedding_A" in name for name in found) and "base_model.model.lm_head.weight" in found
    assert any(name.endswith("q_proj.base_layer.bias") for name in found)
    assert report["files"] == ["adapter_model.safetensors", "adapter_config.json"] and report["tensors"] == len(found)
    same(tensors(tmp_path / "out" / "adapter"), found)
    model = PeftModel.from_pretrained(read_back(tmp_path / "out"), tmp_path / "alone", autocast_adapter_dtype=False)
    assert torch.equal(logits(model), expected)

    # What was fp32 in the model that was loaded is so by default, out of the masters.
    report = export(folder / "lora", tmp_path / "out")
    assert report["dtypes"] == {"bfloat16": report["tensors"]} and "float32" in report["adapter"]["dtypes"]
    assert all(file.startswith("adapter/") for file in report["adapter"]["files"])
    for name, value in tensors(tmp_path / "out" / "adapter").items():
        assert torch.equal(value.bfloat16(), found[name])
    trained = StoredSource(folder / "lora")
    report = export(trained, tmp_path / "trained", trainable_only=True)
    names = {name for name in trained.names if trained.parameters[name].trainable}
    assert tensors(tmp_path / "trained").keys() == names and report["files"] == ["model.safetensors"] and not warned
    with pytest.raises(ValueError, match="has no PEFT adapter"):
        export(folder / "tied", tmp_path / "none", adapter=True)


def test_an_adapter_has_the_names_that_peft_gives_it() -> None:
    import peft
    from peft.utils.save_and_load import get_peft_model_state_dict

    from zerostage.checkpoint.adapter_names import split

    lora, q = peft.LoraConfig, ["q_proj"]
    configs = [
        lora(r=2, target_modules=q, use_dora=True, bias="all"), lora(r=2, target_modules="all-linear"),
        lora(r=2, target_modules=q, trainable_token_indices=[1, 2]),
        lora(r=2, target_modules=q, modules_to_save=["embed_tokens", "lm_head"]),
        lora(r=2, target_modules=q, target_parameters=["mlp.up_proj.weight"]),
        peft.IA3Config(target_modules=q, feedforward_modules=[]),
    ]  # fmt: skip
    for number, config in enumerate(configs):
        tie = number != 2  # where PEFT writes shared rows twice
        model = peft.get_peft_model(tiny_llama(tie=tie, attention_bias=True), config)
        every = dict(model.named_parameters(remove_duplicate=False))
        first = dict(model.named_parameters())
        names = split(first, every, {name for name in first if first[name].requires_grad})
        assert list(names.adapters) == ["default"] and names.folder("default") == ""
        assert set(names.adapters["default"].values()) == get_peft_model_state_dict(model).keys()
        expected = dict(tiny_llama(tie=tie, attention_bias=True).named_parameters())
        assert set(names.base.values()) == expected.keys()
        assert all(first[name].shape == expected[clean].shape for name, clean in names.base.items())
    model = peft.get_peft_model(tiny_llama(), lora(r=2, target_modules=q))
    model.add_adapter("other", lora(r=3, target_modules=["v_proj"]))
    names = split(name for name, _ in model.named_parameters())
    assert {one: names.folder(one) for one in names.adapters} == {"default": "", "other": "other"}
    for one, keys in names.adapters.items():
        assert set(keys.values()) == get_peft_model_state_dict(model, adapter_name=one).keys()
    injected = peft.inject_adapter_in_model(lora(r=2, target_modules=q), tiny_llama())  # it has no base_model around it
    inner = split(dict(injected.named_parameters())).adapters["default"].values()
    assert "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight" in inner
    assert split(dict(tiny_llama().named_parameters())) is None
    assert split(["q.base_layer.weight", "q.lora_A.weight", "base_model.model.x"]) is None  # someone's own LoRA


class Made(Source):
    """A checkpoint whose values are computed: every element of parameter i is known from its place."""

    def __init__(self, parameters: dict[str, Stored], buffers: dict[str, torch.Tensor] | None = None) -> None:
        self.what, self.parameters, self.names = "a made checkpoint", parameters, list(parameters)
        self.held, self._buffers = 0, buffers or {}

    def read(self, term: str, pieces: Sequence[Piece]) -> None:
        self.held = max(self.held, sum(piece.out.nbytes for piece in pieces))
        for piece in pieces:
            assert term in self.parameters[piece.name].terms and piece.out.numel() == piece.stop - piece.start
            for first in range(piece.start, piece.stop, 1 << 16):
                out = piece.out[first - piece.start : first - piece.start + (1 << 16)]
                out.copy_(self.values(term, piece.name, first, first + out.numel()))

    def values(self, term: str, name: str, start: int, stop: int) -> torch.Tensor:
        exact = (torch.arange(start, stop) * 2654435761 + zlib.crc32(f"{name} {term}".encode()) % 1000) % (1 << 24)
        dtype = self.parameters[name].terms[term]
        return exact.float().mul_(2**-20).to(dtype) if dtype.is_floating_point else exact.to(dtype)

    def buffers(self) -> dict[str, torch.Tensor]:
        return self._buffers


def test_an_export_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    shapes = {f"block.{i}.weight": (1024, 512 + 512 * (i == 7)) for i in range(24)}
    source = Made({name: Stored(shape, {"weights": torch.bfloat16, "master": torch.float32}) for name, shape in shapes.items()})
    largest = 1024 * 1024 * 4
    tracemalloc.start()
    with recorded() as allocations:
        report = export(source, tmp_path / "out", max_shard_size="20MB")
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report["bytes"] == 25 * 1024 * 512 * 4 > 12 * largest and source.held <= largest
    assert allocations.peak <= largest + 2**21, f"{allocations.peak:,} bytes of tensors for a largest one of {largest:,}"
    assert python <= 2**20
    for name, value in tensors(tmp_path / "out").items():
        assert torch.equal(value.view(-1), source.values("master", name, 0, value.numel())), name


def test_every_dtype_size_and_window_comes_out_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("bfloat16", "float32", "float16", "float64", "int8", "int64", "uint8", "float8_e4m3fn")
    dtypes, parameters = [getattr(torch, name) for name in names], {}
    for i, size in enumerate((0, 1, 3, 64, 1001, 5, 17, 1, 4096, 7, 2, 30, 31, 33, 999, 1)):
        dtype = dtypes[i % len(dtypes)]
        parameters[f"p{i}"] = Stored((size, 1) if i % 3 else (size,), {"weights": dtype}, source=dtype)
    mask = torch.tensor([True, False, True])
    buffers = {"mean": torch.randn(7), "n": torch.tensor(3), "mask": mask, "view": torch.randn(4, 6).t()}
    source = Made(parameters, buffers)
    for window in (8, 24, 1 << 20):
        monkeypatch.setattr(tensor_file, "MOST", window)
        monkeypatch.setattr(tensor_file, "LEAST", window)
        export(source, tmp_path / "out")
        found = tensors(tmp_path / "out")
        assert found.keys() == parameters.keys() | buffers.keys() and source.held <= window
        for name, stored in parameters.items():
            value, expected = found[name], source.values("weights", name, 0, found[name].numel())
            assert value.shape == stored.shape and value.dtype == stored.source
            assert torch.equal(value.view(-1).view(torch.uint8), expected.view(torch.uint8)), name
        same({name: found[name] for name in buffers}, buffers)
        source.held = 0


def test_H11_values_come_from_the_term_that_holds_them(tmp_path: Path, warned: list[str]) -> None:
    both = {"weights": torch.bfloat16, "master": torch.float32}
    source = Made({
        "both": Stored((300,), both, source=torch.bfloat16), "lost": Stored((300,), both),
        "weights": Stored((300,), {"weights": torch.bfloat16}),
        "count": Stored((3,), {"weights": torch.int64}, source=torch.int64),
        "master": Stored((300,), {"master": torch.float32}, source=torch.bfloat16),
    })  # fmt: skip
    b16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
    plain = {"both": ("weights", b16), "lost": ("master", f32), "weights": ("weights", f32), "master": ("master", b16)}
    wide, narrow, half = ({name: (term if name != "both" else kind, dtype) for name, (term, _) in plain.items()}
                          for kind, dtype in (("master", f32), ("weights", b16), ("master", f16)))  # fmt: skip
    narrow["lost"] = ("weights", b16)
    for dtype, expected in ((None, plain), ("fp32", wide), (b16, narrow), ("fp16", half)):
        export(source, tmp_path / "out", dtype=dtype)
        found = tensors(tmp_path / "out")
        assert found.pop("count").dtype == torch.int64
        same(found, {name: source.values(term, name, 0, 300).to(kind) for name, (term, kind) in expected.items()})
    assert len(warned) == 4 and all("no config.json" in line for line in warned)
    config = {"torch_dtype": "float16", "text_config": {"dtype": "float32"}, "quantization_config": {"dtype": "int8"}}
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets" / "config.json").write_text(json.dumps(config))
    export(source, tmp_path / "out", dtype=b16, assets=tmp_path / "assets")
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config
    source.values = lambda term, name, start, stop: torch.full((stop - start,), 1e6)
    export(source, tmp_path / "out", dtype="fp16")
    assert sum("that fp16 cannot hold" in line for line in warned) == 4


def test_H17_what_cannot_be_exported_is_refused_and_leaves_no_trace(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved
    one = Made({"w": Stored((4,), {"weights": torch.float32})})

    def refused(kind: type[Exception], *parts: str, source: Any = one, out: str = "new", **options: Any) -> None:
        with pytest.raises(kind) as caught:
            export(source, tmp_path / out, **options)
        message = str(caught.value)
        assert all(part in message for part in parts) and "\n" not in message, message

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo.txt").write_text("mine")
    (tmp_path / "file").write_text("")
    export(one, tmp_path / "mixed")
    (tmp_path / "mixed" / "README.md").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    refused(ValueError, "nothing to export", source=Made({}))
    frozen = Made({"w": Stored((4,), {"weights": torch.float32}, trainable=False)})
    refused(ValueError, "no trainable parameter", source=frozen, trainable_only=True)
    refused(ValueError, "int4", "bf16, fp16, fp32", dtype="int4")
    refused(ValueError, "'0GB'", "5GB (1e9 bytes)", max_shard_size="0GB")
    refused(ValueError, "'5 bananas'", max_shard_size="5 bananas")
    refused(ValueError, "give one of them", adapter=True, trainable_only=True)
    refused(ValueError, "not empty and holds no earlier export", out="notes")
    refused(ValueError, "also README.md", out="mixed")
    refused(ValueError, "is a file", out="file")
    refused(ValueError, "is not a folder", assets=tmp_path / "file")
    odd = Made({"w": Stored((4,), {"weights": torch.complex128}, source=torch.complex128)})
    refused(ValueError, "torch.complex128", "'w'", source=odd)
    refused(KeyError, "'w'", "neither weights nor a master", source=Made({"w": Stored((4,), {"exp_avg": torch.float32})}))
    refused(OSError, "GB free: make room", source=Made({"w": Stored((1 << 50,), {"weights": torch.float32})}))
    refused(FileNotFoundError, "there is no checkpoint at", source=tmp_path / "nowhere")
    failing = Made({"w": Stored((4,), {"weights": torch.float32})})
    failing.read = lambda *_: exec('raise OSError("the disk is gone")')
    refused(OSError, "the disk is gone", source=failing)
    assert sorted(tmp_path.rglob("*")) == before and len(before) == 6
    for arguments in ([tmp_path / "nowhere"], [folder / "tied", "--dtype", "int4"], [tmp_path / "notes"]):
        with pytest.raises(InputError) as caught:
            exported(arguments[0], tmp_path / "new", *arguments[1:])
        assert "\n" not in str(caught.value)


def test_H17_a_written_file_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pytest.raises(OSError, match="model.safetensors was written, but"):
        patch.setattr(os, "fsync", lambda file: os.truncate(file, os.fstat(file).st_size - 1))  # a disk that loses a byte
        export(Made({"w": Stored((4,), {"weights": torch.float32})}), tmp_path / "out")
    assert not list(tmp_path.iterdir())
    items = [Item("a", (3, 2), torch.float32), Item("b", (5,), torch.bfloat16)]
    file = tmp_path / "model.safetensors"
    tensor_file.write(file, items, lambda parts: [part.out.fill_(1) for part in parts])
    tensor_file.check(file, items)
    a, b = items
    for wrong in ([a], [a, b, Item("c", (1,), torch.int8)], [a, b._replace(dtype=torch.float16)], [a._replace(shape=(2, 3)), b]):
        with pytest.raises(OSError, match="model.safetensors was written, but has 2 tensors"):
            tensor_file.check(file, wrong)
    whole = file.read_bytes()
    for broken in (whole[:-1], whole + b" ", whole[:20]):
        file.write_bytes(broken)
        with pytest.raises(OSError, match="model.safetensors was written, but"):
            tensor_file.check(file, items)


def inspected(*arguments: Any) -> tuple[int, str]:
    done = CliRunner().invoke(commands.inspect, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout


def test_inspect_tells_what_is_in_a_checkpoint_and_whether_it_is_whole(saved: Any, tmp_path: Path) -> None:
    folder, _ = saved
    path = folder / "tied" / "step-2"
    code, text = inspected(path, "--names", "--json")
    found, model = json.loads(text), tiny_llama(tie=True)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert code == 0 and found["problems"] == [] and found["checked"] == "checksums"
    assert (found["stage"], found["ranks"], found["partition"], found["step"]) == (3, 4, [4, 4, 4], 2)
    assert (found["parameters"], found["trainable"], found["optimizer"]) == (count, count, "AdamW")
    assert found["groups"][0]["lr"] == 1e-2 and found["groups"][0]["parameters"] == len(list(model.parameters()))
    kinds = {"weights": "bfloat16", "master": "float32", "exp_avg": "float32", "exp_avg_sq": "float32"}
    assert found["precision"] == {term: {dtype: count} for term, dtype in kinds.items()}
    assert set(found["bytes_by_term"]) == set(kinds) and found["extra"] == ["epoch", "seen"] and "config.json" in found["assets"]
    on_disk = {str(file.relative_to(path)): file.stat().st_size for file in path.rglob("*") if file.is_file()}
    assert found["files"].items() <= on_disk.items() and found["bytes"] == sum(found["files"].values())
    listed = {entry["name"]: entry for entry in found["names"]}
    assert listed.keys() == {name for name, _ in model.named_parameters()}
    assert all(entry["shape"] == list(model.get_parameter(name).shape) for name, entry in listed.items())
    assert all(entry["terms"] == kinds and entry["source"] == "bfloat16" for entry in listed.values())
    assert [entry["also"] for entry in listed.values() if entry["also"]] == [["lm_head.weight"]]
    code, text = inspected(path, "--names")
    parts = ["checkpoint of 4 ranks at stage 3", "AdamW", "lr=0.01", "epoch, seen", f"{count:,}", "__3_0.distcp"]
    assert code == 0 and all(part in text for part in [*parts, "also lm_head.weight", "whole: the checksums"]), text

    shutil.copytree(path, tmp_path / "step-2")
    shutil.copytree(folder / "wrapped", tmp_path / "step-1")
    code, text = inspected(tmp_path)
    assert code == 0 and text.count("yes") == 2 and "step-1" in text and "step-2" in text
    file = tmp_path / "step-2" / "__1_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    code, text = inspected(tmp_path / "step-2")
    assert code == 1 and f"damaged: {file} was altered" in text
    assert inspected(tmp_path / "step-2", "--fast")[0] == 0
    code, text = inspected(tmp_path, "--json")
    assert code == 1 and sorted(len(one["problems"]) for one in json.loads(text)) == [0, 1]
    with pytest.raises(DamagedError, match="__1_0.distcp was altered"):
        export(tmp_path / "step-2", tmp_path / "out")
    export(tmp_path, tmp_path / "out")  # the other one, which is whole
    assert "a.b.model.embed_tokens.weight" in tensors(tmp_path / "out")
    (tmp_path / "step-1" / "manifest.json").unlink()
    code, text = inspected(tmp_path)
    assert code == 1 and text.count("damaged") == 2 and f"{tmp_path}/step-1/manifest.json is missing" in text
    mistakes = {"no checkpoint": [tmp_path / "nowhere"], "not a checkpoint": [tmp_path / "out"], "several": [tmp_path, "--names"]}
    for part, arguments in mistakes.items():
        with pytest.raises(InputError, match=part):
            inspected(*arguments)


def test_H19_a_checkpoint_of_torch_is_inspected_and_exported_too(saved: Any, tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    folder, told = saved
    expected, state = told["tied"]
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)  # it has the shared weight twice
    code, text = inspected(tmp_path / "dcp", "--json")
    found = json.loads(text)
    size = sum(value.nbytes for value in state.values())
    assert code == 0 and found["bytes_by_term"] == {"weights": size} and found["tensors"] == len(state)
    assert found["checked"] is None and found["problems"] == []
    exported(tmp_path / "dcp", tmp_path / "out", "--assets", folder / "hf-tied", "--dtype", "bf16")
    same(tensors(tmp_path / "out"), {name: value for name, value in state.items() if name != "lm_head.weight"})
    assert torch.equal(logits(read_back(tmp_path / "out")), expected)
    next((tmp_path / "dcp").glob("*.distcp")).unlink()
    code, text = inspected(tmp_path / "dcp")
    assert code == 1 and "damaged: " in text and "is missing" in text
