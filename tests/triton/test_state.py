"""Gathering and scattering states by slot."""

from __future__ import annotations

import pytest
import torch

from glm5fn.kernels.triton import launch
from glm5fn.kernels.triton.state import gather_states, scatter_states
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise


def pages(P, *shape, gap=24, dtype=torch.float32):
    """P states in a pool with gaps of NaN between them."""
    inner = torch.Size(shape).numel()
    whole = torch.full((P, inner + gap), torch.nan, dtype=dtype)
    pool = whole.as_strided((P, *shape), (inner + gap, *torch.empty(shape).stride()))
    pool.copy_(torch.randn(P, *shape))
    return pool


SLOTS = [6, 1, -1, 3, 7, -(2**31), 0, 2**31 - 1]


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 129), (12, 16, 24), (5,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_gather(shape, dtype, index):
    pool, slots = pages(7, *shape, dtype=dtype), torch.tensor(SLOTS, dtype=index)
    with poison.unchanged(pool), poison.fenced(), launch.counted() as counter:
        rows = gather_states(pool, slots)
    assert counter == {"state_copy_kernel": 1}
    for row, slot in zip(rows, SLOTS, strict=True):
        assert_bitwise(row, pool[slot] if 0 <= slot < 7 else torch.zeros_like(row))


def test_gather_starts_anew_where_told():
    pool, slots = pages(3, 4, 5), torch.tensor([2, 2, 0])
    pool[2, 0] = torch.nan
    for keep in (torch.tensor([True, False, True]), torch.tensor([5, 0, 1], dtype=torch.int32)):
        rows = gather_states(pool, slots, keep)
        assert_bitwise(rows, torch.stack([pool[2], torch.zeros(4, 5), pool[0]]))
    strided = torch.tensor([2, 9, 1, 9])[::2]
    assert_bitwise(
        gather_states(pool, strided, torch.tensor([1, 1, 0, 0])[::2]), torch.stack([pool[2], torch.zeros(4, 5)])
    )


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 1, 129), (12, 16, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scatter(shape, dtype):
    pool, slots = pages(7, *shape, dtype=dtype), torch.tensor(SLOTS, dtype=torch.int32)
    rows = torch.randn(len(SLOTS), *shape).to(dtype)
    wanted = pool.new_tensor([]).set_(pool.untyped_storage()).clone()
    for row, slot in zip(rows, SLOTS, strict=True):
        if 0 <= slot < 7:
            wanted.as_strided(pool.shape, pool.stride())[slot] = row
    with poison.unchanged(rows):
        scatter_states(pool, slots, rows)
    assert_bitwise(pool.new_tensor([]).set_(pool.untyped_storage()), wanted)


def test_there_and_back():
    pool, slots = pages(5, 2, 6, 8), torch.tensor([4, 0, 2])
    before = pool.clone()
    scatter_states(pool, slots, gather_states(pool, slots))
    assert_bitwise(pool.contiguous(), before)


def test_nothing_to_copy():
    pool = pages(3, 4)
    assert gather_states(pool, torch.tensor([], dtype=torch.int32)).shape == (0, 4)
    assert not gather_states(pool[:0], torch.tensor([0, 1])).any()
    scatter_states(pool[:0], torch.tensor([0]), torch.ones(1, 4))


def test_refusals():
    pool, slots = pages(3, 4, 5), torch.tensor([0, 1])
    for call, text in (
        (lambda: gather_states(pool.mT, slots), "pool must be dense but for its first axis, got shape [3, 5, 4]"),
        (lambda: gather_states(pool, slots[None]), "slots must be integers [N] with N=1, got torch.int64 [1, 2]."),
        (lambda: gather_states(pool, slots, slots[:1]), "keep must be integers [N] with N=2"),
        (lambda: gather_states(pool, slots.float()), "got torch.float32 [2]."),
        (lambda: scatter_states(pool, slots, pool), "rows must be [2, 4, 5] torch.float32, got [3, 4, 5]"),
        (lambda: scatter_states(pool, slots, pool[:2].half()), "got [2, 4, 5] torch.float16."),
    ):
        with pytest.raises(ValueError, match="must be") as error:
            call()
        assert text in str(error.value)
