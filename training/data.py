"""The text: Python's language reference and the docstrings of its modules, as every CPython carries (PSF licence)."""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import torch

__all__ = ["EOS", "VOCAB", "Corpus", "batches", "corpus"]

_SKIPPED = {"site-packages", "idlelib", "ensurepip", "pydoc_data", "lib2to3"}

EOS = 256
"""The token after each document; tokens below it are bytes."""
VOCAB = 258


class Corpus(NamedTuple):
    """Documents for training, in two kinds, and reference topics held out."""

    topics: list[str]
    docstrings: list[str]
    held_out: list[str]


def corpus(*, held_out_share: float = 0.07) -> Corpus:
    """The reference topics, split into training and held-out documents, and the docstrings.

    Topics repeat each other (``compound`` holds ``if``, ``while`` and more), so every paragraph of a held-out topic is
    removed from the training documents: what is held out has not been seen.
    """
    names = sorted(topics, key=lambda name: hashlib.sha256(name.encode()).digest())
    budget = held_out_share * sum(len(text) for text in topics.values())
    held_out: list[str] = []
    for name in names:
        # Very long topics would make the held-out set one document, very short ones make it noise.
        if 1_000 < len(topics[name]) < 12_000 and sum(len(topics[n]) for n in held_out) < budget:
            held_out.append(name)
    hidden = {key for name in held_out for key in map(_key, _paragraphs(topics[name]))}

    def unseen(text: str) -> str:
        return "\n\n".join(p for p in _paragraphs(text) if _key(p) not in hidden)

    train = [unseen(topics[name]) for name in sorted(topics) if name not in held_out]
    return Corpus(
        [text for text in train if text.strip()],
        [unseen(text) for text in _docstrings()],
        [topics[name] for name in sorted(held_out)],
    )


def _docstrings() -> Iterator[str]:
    """One document per standard-library module: its longer docstrings, in source order."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED & set(parts) or any("test" in part for part in parts[:-1]):
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        nodes = (n for n in ast.walk(tree) if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
        docs = [text for text in map(ast.get_docstring, nodes) if text and len(text) > 200]
        if docs:
            yield "\n\n".join(docs)


def _paragraphs(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text.strip("\n"))


def _key(paragraph: str) -> str:
    return " ".join(paragraph.split())


def batches(text: Corpus, *, batch: int, tokens: int, seed: int, start: int = 0) -> Iterator[torch.Tensor]:
    """Endless random windows int64 ``[batch, tokens]``: half of them from the topics, half from the docstrings.

    Batch number n depends on ``seed`` and n alone, so a resumed run sees what an uninterrupted one would have seen.
    """
    streams = [
        torch.tensor([t for doc in docs for t in (*doc.encode(), EOS)]) for docs in (text.topics, text.docstrings)
    ]
    step = start
    while True:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = []
        for row in range(batch):
            stream = streams[row % 2]
            offset = int(torch.randint(0, len(stream) - tokens, (1,), generator=generator))
            rows.append(stream[offset : offset + tokens])
        yield torch.stack(rows)
        step += 1
