"""Other names of text fields mean the same inside ``text_config`` and at the top level of a nested file."""

import pytest

from glm5fn import Config, ConfigError

ALIASES = {
    "num_local_experts": (8, "n_routed_experts", 8),
    "linear_attn_config": ({"head_dim": 64}, "linear_head_dim", 64),
    "first_k_dense_replace": (1, "mlp_layer_types", ("dense",) + ("sparse",) * 44),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("place", ["text_config", "top", "flat", "both"])
def test_alias(alias, place):
    value, field, expected = ALIASES[alias]
    inside = {alias: value} if place in ("text_config", "both") else {}
    outside = {alias: value} if place in ("top", "both") else {}
    data = {alias: value} if place == "flat" else {"text_config": inside, **outside}
    cfg = Config.from_dict(data)
    assert getattr(cfg, field) == expected
    assert not cfg.extra


@pytest.mark.parametrize("alias", ALIASES)
def test_alias_that_differs(alias):
    value = ALIASES[alias][0]
    other = {"head_dim": 32} if isinstance(value, dict) else value + 1
    with pytest.raises(ConfigError, match=f"{alias} must be the same in both places"):
        Config.from_dict({"text_config": {alias: value}, alias: other})
