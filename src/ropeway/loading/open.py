"""A path to a checkpoint: which reader it takes."""

from __future__ import annotations

from pathlib import Path

from ropeway.errors import LoadError, Unsupported
from ropeway.loading.checkpoint import Checkpoint

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def open_checkpoint(path: Path) -> Checkpoint:
    """A ``.gguf`` file, a folder with safetensors files, or a folder with nothing but a ``.gguf`` file
    (its first part, if split). Raises ``LoadError``, and ``Unsupported`` for pickled weights."""
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf":
        return _open_gguf(path)
    if path.suffix in _PICKLES:
        raise Unsupported(_refusal(path.name))
    if not path.exists():
        raise LoadError(f"{path}: no such file or folder")
    if path.suffix == ".safetensors":
        raise LoadError(f"{path}: name the folder that holds it together with its config.json")
    raise Unsupported(f"{path}: a folder with safetensors files or a .gguf file is supported")


def _open_folder(folder: Path) -> Checkpoint:
    from ropeway.loading.safetensors import SafetensorsCheckpoint

    if any(folder.glob("*.safetensors*")):
        return SafetensorsCheckpoint(folder)
    ggufs = sorted(folder.glob("*.gguf"))
    whole = [file for file in ggufs if "-of-" not in file.stem]
    first = [file for file in ggufs if "-00001-of-" in file.stem]
    if len(whole + first) == 1:
        return _open_gguf((whole + first)[0])
    if len(ggufs) > 1:
        raise LoadError(f"{folder}: several .gguf files; name one: {', '.join(file.name for file in ggufs)}")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise Unsupported(f"{folder}: {_refusal(', '.join(pickles))}")
    return SafetensorsCheckpoint(folder)


def _open_gguf(path: Path) -> Checkpoint:
    from ropeway.loading.gguf.checkpoint import GGUFCheckpoint

    return GGUFCheckpoint(path)


def _refusal(names: str) -> str:
    return f"{names}: pickled weights can run any code when they are loaded; convert them to safetensors"
