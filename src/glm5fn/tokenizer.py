"""Text to token ids and back, for whichever tokenizer a checkpoint folder holds."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

__all__ = ["ByteTokenizer", "Tokenizer", "load_tokenizer", "stream_text"]


class Tokenizer(Protocol):
    """What generation needs of a tokenizer."""

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``, without special tokens."""

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 bytes of ``ids``; special tokens have none."""


class ByteTokenizer:
    """One token per UTF-8 byte; ids from 256 on are special and have no text.

    Example:
        >>> ByteTokenizer().encode("Hé")
        [72, 195, 169]
        >>> ByteTokenizer().decode_bytes([72, 195, 169, 256]).decode()
        'Hé'
    """

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``: its UTF-8 bytes."""
        return list(text.encode())

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The bytes of ``ids``."""
        return bytes(i for i in ids if 0 <= i < 256)


class _HFTokenizer:
    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer as HFTokenizer
        except ImportError as error:
            raise ImportError(f"{path} needs the package `tokenizers`: pip install tokenizers") from error
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the package raises no narrower class
            raise ValueError(f"{path} cannot be read as a tokenizer: {error}") from error

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self._tokenizer.decode(list(ids)).encode()


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of the checkpoint folder ``path``.

    A folder whose ``tokenizer_config.json`` names the class ``ByteTokenizer`` gets that; one with a ``tokenizer.json``
    needs the package ``tokenizers``.

    Raises:
        FileNotFoundError: if there is no such folder, or it holds neither.
        NotADirectoryError: if ``path`` is a file.
        ValueError: if a file cannot be read as what it is named; the text names it.
        ImportError: if ``tokenizers`` is needed and not installed.
    """
    folder = Path(path)
    if not folder.exists():
        raise FileNotFoundError(f"{folder} does not exist; expected the folder of a checkpoint.")
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; expected the folder of a checkpoint.")
    if _class_name(folder / "tokenizer_config.json") == "ByteTokenizer":
        return ByteTokenizer()
    if (folder / "tokenizer.json").is_file():
        return _HFTokenizer(folder / "tokenizer.json")
    raise FileNotFoundError(
        f"{folder} has no tokenizer: expected tokenizer.json, or tokenizer_config.json with class ByteTokenizer."
    )


def _class_name(settings: Path) -> object:
    if not settings.is_file():
        return None
    try:
        content = json.loads(settings.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{settings} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{settings} must hold a JSON object, got {type(content).__name__}.")
    return content.get("tokenizer_class")


def stream_text(tokenizer: Tokenizer, ids: Iterable[int]) -> Iterator[str]:
    """Text of ``ids`` as it comes, one piece per token;

    a character whose bytes are split over tokens comes with its last byte.
    """
    if isinstance(tokenizer, ByteTokenizer):
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for i in ids:
            yield decoder.decode(tokenizer.decode_bytes([i]))
        yield decoder.decode(b"", final=True)
        return
    # Some tokenizers decode a token differently at the start of a text, so what was shown last stays in front of it.
    context: list[int] = []
    pending: list[int] = []

    def piece() -> str:
        before, after = (tokenizer.decode_bytes(part).decode(errors="replace") for part in (context, context + pending))
        return after[len(before) :]

    for i in ids:
        pending.append(i)
        text = piece()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            yield ""  # perhaps a character whose last bytes are still to come
            continue
        yield text
        if text:
            context, pending = pending, []
    yield piece()
