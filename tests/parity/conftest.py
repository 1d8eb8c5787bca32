"""A tiny model of transformers, saved by it and loaded by this library."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from glm5fn import Config, Params, load_checkpoint
from glm5fn.testing.inputs.model import draw

VISION = {"depth": 1, "hidden_size": 16, "num_heads": 1, "intermediate_size": 8, "out_hidden_size": 24,
          "projection_intermediate_size": 8}  # fmt: skip
TEXT = {
    "vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "moe_intermediate_size": 16,
    "num_attention_heads": 3, "num_key_value_heads": 3, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "kv_lora_rank": 10, "q_lora_rank": 14, "qk_nope_head_dim": 8, "v_head_dim": 6, "index_topk": 16,
    "index_head_dim": 4, "index_n_heads": 16, "index_kpool": 4, "linear_head_dim": 8, "linear_num_heads": 2,
    "linear_conv_kernel_dim": 4, "hc_mult": 3, "pad_token_id": 0,
}  # fmt: skip
KINDS = {"K": "linear_attention", "M": "indexed_attention", "d": "dense", "s": "sparse"}


class Pair(NamedTuple):
    """The same weights on both sides."""

    theirs: Any
    cfg: Config
    params: Params

    def logits(self, tokens: torch.Tensor, **options: Any) -> torch.Tensor:
        """Logits ``[B, T, Vocab]`` of transformers, without a cache."""
        with torch.no_grad():
            return self.theirs(input_ids=tokens, use_cache=False, **options).logits

    def layer(self, index: int) -> Any:
        return self.theirs.model.language_model.layers[index]


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """``pair(attention, ffn, dtype=..., seed=..., **text)`` with a letter per layer: K or M; d(ense) or s(parse)."""
    transformers = pytest.importorskip("transformers")
    made: dict[tuple, Pair] = {}

    def random_model(text: dict[str, Any], seed: int) -> Any:
        config = transformers.Glm5NextConfig(text_config=TEXT | text, vision_config=VISION)
        model = transformers.Glm5NextForConditionalGeneration(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, x in [*model.named_parameters(), *model.named_buffers()]:
                if x.is_floating_point():
                    x.copy_(draw(name, x.shape, generator))
        return model.eval()

    def make(attention: str, ffn: str, *, dtype: torch.dtype = torch.float32, seed: int = 0, **text: Any) -> Pair:
        key = (attention, ffn, dtype, seed, *sorted(text.items()))
        if key not in made:
            text |= {
                "num_hidden_layers": len(attention),
                "layer_types": [KINDS[k] for k in attention],
                "mlp_layer_types": [KINDS[k] for k in ffn],
            }
            folder = tmp_path_factory.mktemp("model")
            theirs = random_model(text, seed)
            if dtype != torch.float32:
                theirs.save_pretrained(folder / "float32")
                theirs = type(theirs).from_pretrained(folder / "float32", dtype=dtype)
            theirs.save_pretrained(folder)
            made[key] = Pair(theirs, *load_checkpoint(folder))
        return made[key]

    return make


@pytest.fixture
def close():
    """``close(actual, expected)``: equal within 2e-5 of the largest value, the bound for float32 everywhere here."""

    def check(actual: torch.Tensor, expected: torch.Tensor) -> None:
        assert actual.dtype == expected.dtype == torch.float32
        error = (actual - expected).abs().amax() / expected.abs().amax()
        assert actual.shape == expected.shape
        assert error <= 2e-5, f"relative error {error:.2e}"

    return check
