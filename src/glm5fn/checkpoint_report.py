"""What a checkpoint's files hold against what its configuration demands, from the headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import attrs
import torch

from glm5fn.config import Config
from glm5fn.disk_names import PREFIXES, VISION_PREFIX, Slot, entries, vision_names
from glm5fn.fp8 import scale_shape
from glm5fn.params import Params, abstract
from glm5fn.shards import INDEX_NAME, Shards, ShardsError

__all__ = ["FP8", "STORED", "CheckpointReport", "check", "scale_name", "text_prefix"]

STORED = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
"""Dtypes that tensors may be stored in, by the format's names; matrices may be FP8 as well."""

FP8 = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")  # after "….weight": the released spelling, then that of Quark exports
_SHOWN = 10


@attrs.frozen(kw_only=True)
class CheckpointReport:
    """What the files of a checkpoint hold, compared with what its configuration demands. ``str()`` is readable.

    Args:
        path: the folder.
        tensors: number of tensors that will be read, scales included.
        fp8: names of the matrices that are block-wise FP8.
        not_loaded: tensors that are known but not read: the vision tower.
        unreadable: (file, reason) of files that are missing or broken.
        missing: names of tensors that no file holds.
        misplaced: (name, file) of tensors that the index places in a file that does not hold them.
        unexpected: names that the model does not have, or that the index does not list.
        wrong_shape: (name, shape found, shape wanted).
        wrong_dtype: (name, dtype found, dtypes allowed).
        hints: what may have happened, and what to do.
    """

    path: Path
    tensors: int = 0
    fp8: tuple[str, ...] = ()
    not_loaded: tuple[str, ...] = ()
    unreadable: tuple[tuple[str, str], ...] = ()
    missing: tuple[str, ...] = ()
    misplaced: tuple[tuple[str, str], ...] = ()
    unexpected: tuple[str, ...] = ()
    wrong_shape: tuple[tuple[str, tuple[int, ...], tuple[int, ...]], ...] = ()
    wrong_dtype: tuple[tuple[str, str, str], ...] = ()
    hints: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the checkpoint can be loaded."""
        return not (
            self.unreadable or self.missing or self.misplaced or self.unexpected or self.wrong_shape or self.wrong_dtype
        )

    def __str__(self) -> str:
        groups: tuple[tuple[str, list[str]], ...] = (
            ("unreadable file", [f"{file}: {reason}" for file, reason in self.unreadable]),
            ("missing", list(self.missing)),
            ("not in the file that the index names", [f"{name}, placed in {file}" for name, file in self.misplaced]),
            ("unexpected", list(self.unexpected)),
            ("wrong shape", [f"{n}: {list(found)}, must be {list(wanted)}" for n, found, wanted in self.wrong_shape]),
            ("wrong dtype", [f"{n}: {found}, must be {allowed}" for n, found, allowed in self.wrong_dtype]),
        )
        if self.ok:
            lines = [f"{self.path}: {self.tensors} tensors, {len(self.fp8)} of them FP8 matrices"]
            if self.not_loaded:
                lines.append(f"not loaded: {len(self.not_loaded)} tensors of the vision tower")
            return "\n".join(lines)
        lines = [f"{self.path} does not fit its config.json; nothing was loaded."]
        for title, items in groups:
            if items:
                lines.append(f"{title} ({len(items)}):")
                lines += [f"  {item}" for item in items[:_SHOWN]]
                lines += [f"  … and {len(items) - _SHOWN} more"] if len(items) > _SHOWN else []
        return "\n".join([*lines, *self.hints])


def check(cfg: Config, tree: Params, shards: Shards) -> CheckpointReport:
    """Compare the files with ``tree``, the abstract tree of ``cfg`` or a part of it; nothing but headers is read."""
    prefix = text_prefix(shards)
    known = {slot.name: slot for entry in entries(abstract(cfg), prefix) for slot in entry.slots}
    problems = _Problems(shards)
    for entry in entries(tree, prefix):
        for slot in entry.slots:
            problems.compare(slot)
    vision = None if cfg.vision is None else vision_names(cfg.vision)
    not_loaded = []
    for name in shards.files:
        if name.startswith(VISION_PREFIX) and (vision is None or name in vision):
            not_loaded.append(name)
        elif name not in problems.expected and not _belongs(name, known, problems.seen):
            problems.unexpected.append(name)
    for file, header in shards.opened():
        strays = [name for name in header if name not in shards.files]
        problems.unexpected += [f"{name} (in {file}, but not in {INDEX_NAME})" for name in strays]
    return CheckpointReport(
        path=shards.folder,
        tensors=len(problems.expected),
        fp8=tuple(problems.fp8),
        not_loaded=tuple(not_loaded),
        unreadable=tuple(shards.unreadable.items()),
        missing=tuple(problems.missing),
        misplaced=tuple(problems.misplaced),
        unexpected=tuple(problems.unexpected),
        wrong_shape=tuple(problems.wrong_shape),
        wrong_dtype=tuple(problems.wrong_dtype),
        hints=tuple(_hints(cfg, problems, prefix)),
    )


def _belongs(name: str, known: Mapping[str, Slot], seen: set[str]) -> bool:
    """Whether a name that was not looked for is a tensor of another part of the model, or a scale that may be one's."""
    if name in known:
        return True
    matrices = [name.removesuffix(suffix) for suffix in _SCALES if name.endswith(suffix)]
    return any(matrix in known and matrix not in seen and known[matrix].is_matrix for matrix in matrices)


class _Problems:
    """Compares tensors one by one and collects what does not fit."""

    def __init__(self, shards: Shards):
        self.shards = shards
        self.expected: set[str] = set()
        self.seen: set[str] = set()  # those whose header was found
        self.fp8: list[str] = []
        self.missing: list[str] = []
        self.misplaced: list[tuple[str, str]] = []
        self.unexpected: list[str] = []
        self.wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.wrong_dtype: list[tuple[str, str, str]] = []

    def compare(self, slot: Slot) -> None:
        dtypes = ("F32",) if slot.float32 else (*STORED, FP8) if slot.is_matrix else tuple(STORED)
        if self._compare(slot.name, slot.shape, dtypes) == FP8 and slot.is_matrix:
            self.fp8.append(slot.name)
            self._compare(scale_name(slot.name, self.shards), scale_shape(slot.shape), ("F32",))

    def _compare(self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> str | None:
        self.expected.add(name)
        if name not in self.shards.files:
            self.missing.append(name)
            return None
        stored = self.shards.stored(name)
        file = self.shards.files[name]
        if stored is None:
            if file not in self.shards.unreadable:
                self.misplaced.append((name, file))
            return None
        self.seen.add(name)
        if stored.shape != shape:
            self.wrong_shape.append((name, stored.shape, shape))
        if stored.dtype not in dtypes:
            self.wrong_dtype.append((name, stored.dtype, " or ".join(dtypes)))
        return stored.dtype


def scale_name(matrix: str, shards: Shards) -> str:
    """Return the name of the scales of an FP8 matrix, in whichever of its spellings the files have it."""
    names = [matrix + suffix for suffix in _SCALES]
    return next((name for name in names if name in shards.files), names[0])


def _hints(cfg: Config, problems: _Problems, prefix: str) -> Iterator[str]:
    n, mtp = cfg.num_hidden_layers, cfg.num_nextn_predict_layers
    heads = tuple(f"{prefix}layers.{n + i}." for i in range(max(mtp, 1)))
    if mtp and problems.missing and all(name.startswith(heads) for name in problems.missing):
        yield (
            f"Only tensors of the multi-token-prediction layers ({n} and up) are missing: some programs drop them when "
            f"they save. Load with mtp=False, or set num_nextn_predict_layers to 0 in config.json."
        )
    if not mtp and any(name.startswith(heads) for name in problems.unexpected):
        yield f"Layer {n} looks like a multi-token-prediction layer: set num_nextn_predict_layers to 1 in config.json."
    if any(".attn_hc." in name or name.endswith("experts.gate_up_proj") for name in problems.unexpected):
        yield "Names such as attn_hc.fn are those in memory; save with transformers' save_original_format=True."


def text_prefix(shards: Shards) -> str:
    """Return what the names of the text tensors start with in these files."""
    found = [prefix for prefix in PREFIXES if f"{prefix}embed_tokens.weight" in shards.files]
    if len(found) > 1:
        raise ShardsError(
            f"{shards.folder} holds text tensors under two prefixes, {' and '.join(map(repr, found))}; it must be one."
        )
    return found[0] if found else PREFIXES[0]
