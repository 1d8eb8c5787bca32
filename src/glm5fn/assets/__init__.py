"""The checkpoint that ships with the package."""

from __future__ import annotations

from pathlib import Path

__all__ = ["shipped_checkpoint"]


def shipped_checkpoint() -> Path:
    """The folder of the small trained checkpoint inside the package, in the official on-disk layout.

    It has every kind of layer of GLM-5.3-Flash, reads bytes, and writes text that sounds like Python's documentation.
    Its ``README.md`` is the model card.

    Example:
        >>> sorted(path.name for path in shipped_checkpoint().iterdir() if path.suffix == ".json")
        ['config.json', 'tokenizer_config.json']
    """
    return Path(__file__).parent / "pydoc-3m"
