"""Where values may not be read, in captured graphs and on devices, an index out of range is clamped, not followed."""

import pytest
import torch

from glm5fn import mla_decode, mla_prefill, mla_sparse, moe_experts
from glm5fn.testing.compare import assert_bitwise
from glm5fn.testing.inputs import mla, moe


def compiled(function, call, backend):
    torch.compiler.reset()
    return torch.compile(function, fullgraph=True, backend="eager")(**call, backend=backend)


def test_selected_tokens(backend):
    call = mla.mla_sparse(S=9)
    inside = call["indices"].clone()
    inside[inside == 8] = 8
    outside = torch.where(inside == 8, 70, inside)
    assert (outside == 70).any()
    expected = mla_sparse(**call | {"indices": inside}, backend=backend)
    assert_bitwise(compiled(mla_sparse, call | {"indices": outside}, backend), expected)


@pytest.mark.parametrize("function", [mla_prefill, mla_decode])
def test_lengths(backend, function):
    call = mla.mla_dense(S=9)
    expected = function(**call, lengths=torch.full((2,), 9, dtype=torch.int32), backend=backend)
    found = compiled(function, call | {"lengths": torch.full((2,), 99, dtype=torch.int32)}, backend)
    assert_bitwise(found, expected)


@pytest.mark.parametrize("few", [True, False])
def test_experts(backend, few, monkeypatch):
    if not few:
        monkeypatch.setattr("glm5fn.kernels.reference.moe._FEW_BYTES", 0)
    call = moe.moe_experts() | {"limit": 10.0}
    E = call["w_gate_up"].shape[0]
    inside = torch.full_like(call["ids"], E - 1)
    expected = compiled(moe_experts, call | {"ids": inside}, backend)
    assert_bitwise(compiled(moe_experts, call | {"ids": inside + 50}, backend), expected)
