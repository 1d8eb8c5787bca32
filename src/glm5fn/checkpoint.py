"""Reading and writing checkpoints in the official layout: safetensors files, perhaps an index, and config.json.

Reading is strict. Every header is compared with what the configuration demands before a single weight is read, and
whatever is missing, unexpected or of the wrong shape or type is reported at once, in full.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from glm5fn.checkpoint_report import STORED, CheckpointReport, check, scale_name, text_prefix
from glm5fn.config import Config
from glm5fn.dims import FLOATS
from glm5fn.disk_names import Entry, Slot, entries
from glm5fn.dispatch import ContractError
from glm5fn.fp8 import dequantize_blocks
from glm5fn.params import ParamInfo, Params, abstract, map_named_leaves, named_leaves
from glm5fn.shards import INDEX_NAME, SINGLE_NAME, Shards, ShardsError

__all__ = ["CheckpointError", "CheckpointReport", "inspect_checkpoint", "load_checkpoint", "save_checkpoint"]

_SHOWN = 10


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written; ``report`` lists every problem with its tensors, if it has any."""

    def __init__(self, text: str, report: CheckpointReport | None = None):
        super().__init__(text)
        self.report = report


# --- reading --------------------------------------------------------------------------------------------------------


def load_checkpoint(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    layers: Iterable[int] | None = None,
    mtp: bool | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> tuple[Config, Params]:
    """Read a checkpoint: ``config.json`` and safetensors files in the official layout, block-wise FP8 included.

    Every header is checked first; then each leaf is allocated once and filled. On the CPU, a leaf that needs no
    conversion stays mapped to its file: it costs no memory until it is used, and writing to it never changes the file.
    The file must not be truncated meanwhile; replacing or deleting it is fine.

    Args:
        path: folder with ``config.json`` and either ``model.safetensors`` or ``model.safetensors.index.json`` with its
            files.
        device: where the parameters go.
        dtype: dtype of the parameters; None keeps what is stored and turns FP8 into bfloat16. Leaves that must be
            float32 (see `ParamInfo`) are at least that in any case. Each value is rounded once.
        layers: main layers to read; the others are None in the tree, and only files that hold something needed are
            opened. Embedding, final norm and head are always read.
        mtp: whether to read the multi-token-prediction layers; by default if ``layers`` is None. If not,
            ``params.mtp`` is empty.
        progress: called with the bytes read and to be read, after every leaf.

    Returns:
        the configuration and the parameters.

    Raises:
        FileNotFoundError: there is no such folder, or it holds no config.json.
        ConfigError: config.json cannot be used.
        CheckpointError: the files are broken or do not hold exactly what the configuration demands; its ``report`` has
            the full list. Nothing is returned in part.
        ContractError: ``layers`` or ``dtype`` is not allowed.

    Example:
        >>> import tempfile
        >>> from glm5fn.params import init_params
        >>> cfg = Config(vocab_size=8, hidden_size=16, num_hidden_layers=2, linear_num_heads=2, linear_head_dim=4,
        ...              intermediate_size=32)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(cfg, init_params(cfg), f"{folder}/tiny")
        ...     cfg, params = load_checkpoint(f"{folder}/tiny", dtype=torch.bfloat16, layers=[1])
        >>> params.layers[0], params.layers[1].attn.qkv_proj.dtype, params.layers[1].attn.A_log.dtype
        (None, torch.bfloat16, torch.float32)
    """
    if dtype is not None and dtype not in FLOATS:
        allowed = ", ".join(str(d).removeprefix("torch.") for d in FLOATS)
        raise ContractError(f"load_checkpoint: dtype must be one of {allowed} or None, got {dtype}.")
    cfg, tree, shards, report = _open(Path(path), layers, mtp)
    if not report.ok:
        raise CheckpointError(str(report), report)
    plan = [(entry, _target_dtype(entry, dtype, shards)) for entry in entries(tree, text_prefix(shards))]
    total = sum(prod(entry.shape) * target.itemsize for entry, target in plan)
    done = 0
    values: dict[str, torch.Tensor] = {}
    for entry, target in plan:
        values |= entry.split(_read(entry, shards, torch.device(device), target))
        done += prod(entry.shape) * target.itemsize
        if progress is not None:
            progress(done, total)
    return cfg, map_named_leaves(lambda leaf, _info: values[leaf], tree)


def inspect_checkpoint(
    path: str | os.PathLike[str], *, layers: Iterable[int] | None = None, mtp: bool | None = None
) -> CheckpointReport:
    """Compare a checkpoint's headers with its configuration, without reading weights.

    Arguments are those of `load_checkpoint`.

    Raises:
        FileNotFoundError, ConfigError, ContractError: as `load_checkpoint`.
        CheckpointError: only if it cannot be told which files make up the checkpoint, or none can be read; other
            problems are in the report.
    """
    return _open(Path(path), layers, mtp)[-1]


def _open(
    path: Path, layers: Iterable[int] | None, mtp: bool | None
) -> tuple[Config, Params, Shards, CheckpointReport]:
    if not path.is_dir():
        what = "is a file" if path.exists() else "does not exist"
        raise FileNotFoundError(f"{path} {what}; give the folder that holds config.json and the safetensors files.")
    cfg = Config.from_pretrained(path)
    tree = _select(abstract(cfg), layers, mtp)
    try:
        shards = Shards(path)
        return cfg, tree, shards, check(cfg, tree, shards)
    except ShardsError as error:
        raise CheckpointError(str(error)) from error


def _select(tree: Params, layers: Iterable[int] | None, mtp: bool | None) -> Params:
    if layers is not None:
        wanted = list(layers)
        count = len(tree.layers)
        for index in wanted:
            if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < count:
                raise ContractError(f"load_checkpoint: layers must be integers from 0 to {count - 1}, got {index!r}.")
        tree = tree._replace(layers=tuple(x if i in wanted else None for i, x in enumerate(tree.layers)))
    keep_mtp = layers is None if mtp is None else mtp
    return tree if keep_mtp else tree._replace(mtp=())


def _target_dtype(entry: Entry, dtype: torch.dtype | None, shards: Shards) -> torch.dtype:
    if dtype is not None:
        return entry.info.dtype_for(dtype)
    if entry.info.dtype is not None:
        return entry.info.dtype
    stored = {shards.header(shards.files[slot.name])[slot.name].dtype for slot in entry.slots}
    return reduce(torch.promote_types, (STORED.get(name, torch.bfloat16) for name in stored))


def _read(entry: Entry, shards: Shards, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    if len(entry.slots) == 1:
        value = shards.tensor(entry.slots[0].name)
        if value.dtype != torch.float8_e4m3fn:
            return value.to(device, dtype).view(entry.shape)
    storage = torch.empty(entry.shape, dtype=dtype, device=device)
    for slot in entry.slots:
        value = shards.tensor(slot.name).to(device)
        part = storage[slot.part].view(slot.shape)
        if value.dtype == torch.float8_e4m3fn:
            dequantize_blocks(value, shards.tensor(scale_name(slot.name, shards)).to(device), part)
        else:
            part.copy_(value)
    return storage


# --- writing --------------------------------------------------------------------------------------------------------


def save_checkpoint(
    cfg: Config,
    params: Params,
    path: str | os.PathLike[str],
    *,
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> None:
    """Write a checkpoint in the official layout, readable by `load_checkpoint`, transformers and serving engines.

    Values are stored in the dtype that they have; use `cast` first for another. The folder appears at its path only
    when it is complete.

    Args:
        cfg: the configuration, written as `Config.to_dict` without a quantisation and with the dtype stored.
        params: the parameters, complete, on any device.
        path: the folder to make.
        shard_bytes: start a new file when one would exceed this size; with more than one there is an index.
        overwrite: replace the checkpoint that is at ``path``. Files there that are not part of a checkpoint, such as
            a tokenizer, are kept.

    Raises:
        FileExistsError: there is something at ``path`` and ``overwrite`` is False, or it is not a checkpoint.
        CheckpointError: the parameters are not those of the configuration, or not of a dtype that can be stored.

    Example:
        See `load_checkpoint`.
    """
    path = Path(path).resolve()
    _check_params(cfg, params)
    occupied = path.exists() and (not path.is_dir() or any(path.iterdir()))
    if occupied and not overwrite:
        raise FileExistsError(f"{path} already exists; choose another folder or pass overwrite=True.")
    if occupied and not (path / "config.json").is_file():
        raise FileExistsError(f"{path} holds no config.json, so it is not a checkpoint and is not overwritten.")
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    temporary.mkdir(parents=True)
    try:
        _write(cfg, params, temporary, shard_bytes)
        if not occupied:
            temporary.replace(path)
            return
        _copy_others(path, temporary)
        _swap(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _swap(new: Path, path: Path) -> None:
    old = new.with_suffix(".old")
    path.rename(old)
    try:
        new.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old)


def _check_params(cfg: Config, params: Params) -> None:
    found, wanted = dict(named_leaves(params)), dict(named_leaves(abstract(cfg)))
    problems = [f"{name}: missing" for name in wanted if name not in found]
    problems += [f"{name}: not part of this configuration" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        problems += [f"{name}: {problem}" for problem in _leaf_problems(found[name], wanted[name])]
    if cfg.tie_word_embeddings and params.lm_head is not params.embed:
        problems.append("lm_head: must be the embedding itself, because tie_word_embeddings is true")
    if problems:
        shown = "\n".join(f"  {problem}" for problem in sorted(problems)[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise CheckpointError(f"The parameters do not fit the configuration; nothing was written.\n{shown}{more}")


def _leaf_problems(found: torch.Tensor, wanted: ParamInfo) -> Iterator[str]:
    if tuple(found.shape) != wanted.shape:
        yield f"shape {list(found.shape)}, must be {list(wanted.shape)}"
    allowed = STORED.values() if wanted.dtype is None else (wanted.dtype,)
    if found.dtype not in allowed:
        yield f"{found.dtype}, must be {' or '.join(map(str, allowed))}"


def _write(cfg: Config, params: Params, folder: Path, shard_bytes: int) -> None:
    values = dict(named_leaves(params))
    shards: list[list[tuple[Entry, Slot]]] = [[]]
    size = total = 0
    for entry in entries(abstract(cfg)):
        itemsize = values[next(iter(entry.leaves))].dtype.itemsize
        for slot in entry.slots:
            nbytes = prod(slot.shape) * itemsize
            if shards[-1] and size + nbytes > shard_bytes:
                shards.append([])
                size = 0
            shards[-1].append((entry, slot))
            size, total = size + nbytes, total + nbytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = SINGLE_NAME if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {slot.name: _stored_tensor(entry, slot, values) for entry, slot in shard}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        (folder / file).chmod(0o644)  # save_file makes it readable by its owner alone
        weight_map |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        _write_json(folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(folder / "config.json", _config_dict(cfg, params))


def _stored_tensor(entry: Entry, slot: Slot, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    storage = entry.join({path: values[path].detach() for path in entry.leaves})
    return storage[slot.part].reshape(slot.shape).cpu().contiguous()


def _config_dict(cfg: Config, params: Params) -> dict[str, Any]:
    data = cfg.to_dict()
    data.pop("quantization_config", None)
    data.pop("torch_dtype", None)
    data.setdefault("architectures", ["Glm5NextForConditionalGeneration"])
    return data | {"dtype": str(params.embed.dtype).removeprefix("torch.")}


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def _copy_others(old: Path, new: Path) -> None:
    for item in old.iterdir():
        if item.suffix == ".safetensors" or item.name in (INDEX_NAME, "config.json"):
            continue
        if item.is_dir():
            shutil.copytree(item, new / item.name, symlinks=True)
        else:
            shutil.copy2(item, new / item.name, follow_symlinks=False)
