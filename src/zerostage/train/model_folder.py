"""Where a model's files are. Imports no torch, so that a wrong name is told before any rank starts."""

from __future__ import annotations

from pathlib import Path

from zerostage.mistakes import InputError


def find(name: str) -> Path:
    """The local folder of a model: `name` itself, or the copy of the hub's `name`, downloaded if need be."""
    folder = Path(name)
    if not folder.is_dir():
        if name.count("/") != 1 or name.startswith((".", "/", "~")):
            raise InputError(f"the model {name} is not a folder here, nor a hub name such as 'owner/model'")
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "tokenizer*", "*.txt"]))
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InputError(f"the model {name} is not a folder here and the hub does not give it: {reason}") from None
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} has no config.json: give the folder that save_pretrained wrote")
    if not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no .safetensors file: save the model again with save_pretrained")
    return folder
