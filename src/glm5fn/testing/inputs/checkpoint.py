"""A small checkpoint to test readers and writers with, and ways to change its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from glm5fn.config import Config
from glm5fn.params import Params, init_params, map_leaves
from glm5fn.testing.oracle.fp8 import dequantize

__all__ = ["PREFIX", "TINY", "edit_file", "make_params", "quantise_file", "random_fp8"]

PREFIX = "model.language_model."

# Sizes are all different, and some matrices are larger than one FP8 block, with a partial last block.
TINY = Config(
    vocab_size=37, hidden_size=136, intermediate_size=130, moe_intermediate_size=12, num_hidden_layers=5,
    num_attention_heads=3, n_routed_experts=4, num_experts_per_tok=2, q_lora_rank=14, kv_lora_rank=10,
    qk_nope_head_dim=8, v_head_dim=6, index_topk=8, index_head_dim=4, index_n_heads=5, index_kpool=4,
    linear_head_dim=7, linear_num_heads=2, linear_conv_kernel_dim=3, hc_mult=3, num_nextn_predict_layers=1,
    pad_token_id=0, mlp_layer_types=("dense", "sparse", "dense", "sparse", "sparse"),
)  # fmt: skip
"""One or more layers of each kind and a multi-token-prediction layer."""


def make_params(cfg: Config = TINY, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Params:
    """Return parameters that are random everywhere, norms and biases too, so that a mix-up of two tensors shows."""
    generator = torch.Generator().manual_seed(seed)
    return map_leaves(
        lambda x: torch.randn(x.shape, generator=generator).to(x.dtype), init_params(cfg, seed=seed, dtype=dtype)
    )


def edit_file(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite a safetensors file after ``change`` has changed the dictionary of its tensors."""
    tensors = load_file(path)
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path)


def random_fp8(shape: tuple[int, int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return any finite float8_e4m3fn values [M, N] with positive float32 scales of their 128 × 128 blocks."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    blocks = ((shape[0] + 127) // 128, (shape[1] + 127) // 128)
    return codes.view(torch.float8_e4m3fn), torch.rand(blocks, generator=generator) + 0.01


def quantise_file(path: Path, wanted: Callable[[str], object], suffix: str = "_scale_inv") -> dict[str, torch.Tensor]:
    """Replace the matrices whose name is ``wanted`` by random FP8; return what they mean (float64), by name."""
    meaning: dict[str, torch.Tensor] = {}

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for seed, name in enumerate(sorted(tensors)):
            if wanted(name):
                rows, columns = tensors[name].shape
                values, scale = random_fp8((rows, columns), seed)
                tensors |= {name: values, name + suffix: scale}
                meaning[name] = dequantize(values, scale)

    edit_file(path, change)
    return meaning
