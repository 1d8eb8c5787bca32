"""Autocast never reaches an operation's arithmetic: it is float32 inside whatever the caller has switched on."""

import pytest
import torch
from torch.utils import _pytree as pytree

import glm5fn
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import indexer, mhc, mla, moe

ROUTING = {"top_k": 2, "n_group": 1, "topk_group": 1, "norm_topk": True, "scale": 2.5}
CASES = {
    "mla_prefill": lambda: mla.mla_dense(),
    "mla_decode": lambda: mla.mla_dense(),
    "mla_sparse": lambda: mla.mla_sparse(),
    "kpool_compress": lambda: indexer.kpool_compress(),
    "kpool_select": lambda: indexer.kpool_select(),
    "mhc_pre": lambda: mhc.mhc_pre(),
    "mhc_post": lambda: mhc.mhc_post(),
    "moe_route": lambda: moe.moe_route() | ROUTING,
    "moe_experts": lambda: moe.moe_experts() | {"limit": 10.0},
}


@pytest.mark.parametrize("name", CASES)
def test_autocast_changes_nothing(backend, name):
    function, call = getattr(glm5fn, name), CASES[name]()
    expected = function(**call, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = function(**call, backend=backend)
    assert_bitwise(pytree.tree_leaves(result), pytree.tree_leaves(expected))
