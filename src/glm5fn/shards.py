"""The safetensors files of a checkpoint folder: which there are, what they hold, and reading single tensors of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

__all__ = ["INDEX_NAME", "SINGLE_NAME", "Shards", "ShardsError", "Stored"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class ShardsError(ValueError):
    """A folder whose files cannot be told apart or trusted."""


class Stored(NamedTuple):
    """What a file's header says of a tensor; ``dtype`` is the format's name, such as ``"BF16"``."""

    shape: tuple[int, ...]
    dtype: str


class Shards:
    """The tensors of a folder. Files are mapped into memory when they are first needed, and read when a tensor is used.

    Args:
        folder: holds either ``model.safetensors.index.json`` and the files that it names, or one safetensors file.

    Attributes:
        files: file name by tensor name.
        unreadable: reason by name of the files that were needed and could not be opened.

    Raises:
        ShardsError: if there is no safetensors file, or no way to tell which files belong to the model, or if the only
            file or the index is broken, or if the index names a file outside the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.unreadable: dict[str, str] = {}
        self._open: dict[str, Any] = {}
        self._headers: dict[str, dict[str, Stored]] = {}
        index = folder / INDEX_NAME
        self.index = index if index.is_file() else None
        if self.index is not None:
            self.files = _read_index(self.index)
        else:
            name = _single_file(folder)
            self.files = dict.fromkeys(self.header(name), name)
            if name in self.unreadable:
                raise ShardsError(f"{folder / name} cannot be read: {self.unreadable[name]}.")

    def header(self, file: str) -> dict[str, Stored]:
        """Return what a file holds; empty, with an entry in ``unreadable``, if it cannot be opened."""
        if file not in self._headers:
            self._headers[file] = self._read_header(file)
        return self._headers[file]

    def _read_header(self, file: str) -> dict[str, Stored]:
        path = self.folder / file
        if not path.is_file():
            self.unreadable[file] = "the file is missing"
            return {}
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            self.unreadable[file] = f"truncated, or not a safetensors file ({error})"
            return {}
        self._open[file] = handle
        return {name: Stored(tuple(s.get_shape()), s.get_dtype()) for name, s in slices.items()}

    def stored(self, name: str) -> Stored | None:
        """Return a tensor's shape and dtype; None if the file that should hold it does not."""
        return self.header(self.files[name]).get(name)

    def opened(self) -> Iterable[tuple[str, dict[str, Stored]]]:
        """Return the headers that have been read, by file."""
        return self._headers.items()

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor that is mapped: its bytes are read when they are used, and writing changes only a copy."""
        return self._open[self.files[name]].get_tensor(name)


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ShardsError(f"{path} is not valid JSON: {error}.") from error
    files = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ShardsError(f'{path} must hold an object "weight_map" that gives the file of every tensor.')
    for file in set(files.values()):
        # Checked as text and for both systems: links inside the folder are fine, and are how download caches work.
        parts = PurePosixPath(file).parts + PureWindowsPath(file).parts
        absolute = PurePosixPath(file).is_absolute() or PureWindowsPath(file).anchor
        if absolute or ".." in parts or not file.endswith(".safetensors"):
            raise ShardsError(
                f"{path} places tensors in {file!r}; it may only name .safetensors files inside its own folder. "
                f"Nothing was read."
            )
    return files


def _single_file(folder: Path) -> str:
    names = sorted(file.name for file in folder.iterdir() if file.suffix == ".safetensors")
    if SINGLE_NAME in names or len(names) == 1:
        return SINGLE_NAME if SINGLE_NAME in names else names[0]
    if names:
        raise ShardsError(
            f"{folder} holds {len(names)} safetensors files ({', '.join(names[:3])}, …) but no {INDEX_NAME}, which "
            f"says what belongs together; get the index from where the checkpoint comes from."
        )
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise ShardsError(
            f"{folder} holds no safetensors file, only {', '.join(pickles[:3])}. Pickled files can run code when they "
            f"are read, so they are never opened; convert the checkpoint to safetensors where you trust it."
        )
    raise ShardsError(f"{folder} holds no safetensors file: expected {SINGLE_NAME}, or {INDEX_NAME} and its files.")
