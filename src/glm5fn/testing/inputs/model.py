"""Small models to test the whole with: every kind of layer, random weights that keep activations near 1."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import torch

from glm5fn.config import Config
from glm5fn.params import ParamInfo, Params, abstract, map_leaves, map_named_leaves

__all__ = ["SMALL", "config", "draw", "meta_params", "params", "prompts"]

SMALL = Config(
    vocab_size=61, hidden_size=24, intermediate_size=40, moe_intermediate_size=12, num_hidden_layers=4,
    num_attention_heads=3, n_routed_experts=6, num_experts_per_tok=2, q_lora_rank=14, kv_lora_rank=10,
    qk_nope_head_dim=8, v_head_dim=6, index_topk=8, index_head_dim=4, index_n_heads=16, index_kpool=4,
    linear_head_dim=8, linear_num_heads=2, linear_conv_kernel_dim=4, hc_mult=3, pad_token_id=0, eos_token_id=60,
    layer_types=("linear_attention", "indexed_attention", "indexed_attention", "linear_attention"),
    mlp_layer_types=("dense", "sparse", "dense", "sparse"), max_position_embeddings=4096,
)  # fmt: skip
"""Two layers of each kind, two of each feed-forward, selection from 9 tokens on."""


def config(kinds: str | None = None, **changes: Any) -> Config:
    """:data:`SMALL` with other values; ``kinds`` names the layers by letters, K for KDA and M for MLA.

    Example:
        >>> config("KM", index_topk=16).layer_types
        ('linear_attention', 'indexed_attention')
    """
    if kinds is not None:
        types = tuple({"K": "linear_attention", "M": "indexed_attention"}[kind] for kind in kinds)
        ffns = tuple("sparse" if i % 2 else "dense" for i in range(len(kinds)))
        changes = {
            "num_hidden_layers": len(kinds),
            "layer_types": types,
            "indexer_types": ("full",) * len(kinds),
            "mlp_layer_types": ffns,
        } | changes
    return attrs.evolve(SMALL, **changes)


def draw(path: str, shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    """Random values for the leaf or parameter named ``path``: matrices keep the size of what they multiply, norms are
    near 1, everything else is near 0 but never exactly a neutral value, so that a weight that is not applied shows.
    The names may be this library's or transformers'."""
    x = torch.randn(tuple(shape), generator=generator)
    name = path.removesuffix(".weight").split(".")[-1]
    if name == "scale":
        return 0.3 + 0.1 * x
    if name == "dt_bias":
        return x - 3  # a decay of about 0.8 per token: a state that remembers, so that a wrong one shows
    if "norm" in name and not path.endswith("bias"):
        return 1 + 0.2 * x
    if "embed" in name:
        return x
    # Blocks add less than the streams hold: rounding errors grow from layer to layer otherwise.
    size = 0.5 if name.startswith(("o_proj", "down")) or len(shape) < 2 else 1.0
    return size * x / math.sqrt(shape[-1] if len(shape) > 1 else 1)


def params(cfg: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Random parameters for ``cfg``, by :func:`draw`."""
    generator = torch.Generator().manual_seed(seed)
    return map_named_leaves(
        lambda path, info: draw(path, info.shape, generator).to(info.dtype_for(dtype)), abstract(cfg)
    )


def meta_params(cfg: Config, *, dtype: torch.dtype = torch.bfloat16) -> Params:
    """Parameters without memory, to run shapes of any size."""

    def make(info: ParamInfo) -> torch.Tensor:
        return torch.empty(info.shape, dtype=info.dtype_for(dtype), device="meta")

    return map_leaves(make, abstract(cfg))


def prompts(cfg: Config, *lengths: int, seed: int = 0) -> list[torch.Tensor]:
    """Random token ids, one ``[1, T]`` tensor per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(cfg.vocab_size, (1, n), generator=generator) for n in lengths]
