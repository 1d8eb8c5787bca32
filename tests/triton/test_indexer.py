"""The indexer and its quantisation on Triton, beyond what every backend is asked: tiles, bit patterns, memory."""

from __future__ import annotations

import pytest
import torch

from glm5fn.dispatch import explain
from glm5fn.kernels.triton import indexer, launch
from glm5fn.ops.indexer import kpool_compress, kpool_select
from glm5fn.ops.quant import hadamard_quant_fp8
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import indexer as make
from glm5fn.testing.inputs.quant import hadamard_rows
from glm5fn.testing.oracle import indexer as exact
from glm5fn.testing.oracle import quant as exact_quant

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_what_starts():
    for run, kernel in (
        (lambda: kpool_compress(**make.kpool_compress(), backend="triton"), "kpool_compress_kernel"),
        (lambda: kpool_select(**make.kpool_select(), backend="triton"), "kpool_score_kernel"),
        (lambda: hadamard_quant_fp8(hadamard_rows(), backend="triton"), "hadamard_quant_fp8_kernel"),
    ):
        with launch.counted() as counter:
            run()
        assert counter == {kernel: 1}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ties", [False, True])
def test_many_pools_and_queries(dtype, ties):
    """Several tiles of pools and of queries; some see no pool of a tile."""
    T, P = 40, 150
    positions = [[4 * ((7 * t + b) % (P + 1)) + t % 4 - 1 for t in range(T)] for b in range(2)]
    arguments = make.kpool_select(T=T, P=P, topk=64, positions=positions, ties=ties, dtype=dtype)
    assert_bitwise(kpool_select(**arguments, backend="triton"), exact.kpool_select(**arguments))


@pytest.mark.parametrize("dtype", DTYPES)
def test_scores(dtype):
    """Random ones, of which reference only sees the order."""
    q, weights, pooled = (torch.randn(*s).to(dtype) for s in ((2, 5, 6, 20), (2, 5, 6), (2, 40, 20)))
    positions = torch.randint(0, 160, (2, 5))
    found = torch.full((2, 5, 40), torch.nan)
    indexer._score(q, weights, pooled, positions, found, 0, 4)

    def scores(wide):
        dots = torch.einsum("btji,bpi->btjp", q.to(wide) * 20**-0.5, pooled.to(wide)).relu()
        return torch.einsum("btj,btjp->btp", weights.to(wide) * 6**-0.5, dots)

    seen = torch.arange(40) < (positions[..., None] + 1) // 4
    assert (found[~seen] == -torch.inf).all()
    assert_within_budget(found[seen], scores(torch.float64)[seen], scores(torch.float32)[seen])


@pytest.mark.parametrize("sizes", [{"P": 70, "I": 300, "kpool": 3}, {"P": 1, "I": 1, "kpool": 1}], ids=str)
def test_compress_fills_no_tile(sizes):
    arguments = make.kpool_compress(**sizes, dtype=torch.bfloat16)
    low = exact.kpool_compress(**arguments, dtype=torch.float32).bfloat16()
    assert_within_budget(kpool_compress(**arguments, backend="triton"), exact.kpool_compress(**arguments), low)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_read_or_written_beside_any_tensor(dtype):
    for op, arguments in ((kpool_compress, make.kpool_compress), (kpool_select, make.kpool_select)):
        given = {n: poison.guarded(x) if isinstance(x, torch.Tensor) else x for n, x in arguments(dtype=dtype).items()}
        with poison.unchanged(*(x for x in given.values() if isinstance(x, torch.Tensor))), poison.fenced():
            found = op(**given, backend="triton")
        assert_bitwise(found, op(**arguments(dtype=dtype), backend="triton"))
    x = poison.guarded(hadamard_rows(size=64, dtype=dtype))
    with poison.unchanged(x), poison.fenced():
        found = hadamard_quant_fp8(x, backend="triton")
    assert_bitwise(found, exact_quant.hadamard_quant_fp8(x))


@pytest.mark.parametrize("position", [10**6, 2**31 - 1, -(2**31), 2**62])
def test_a_bad_position_reaches_no_other_memory(position):
    """On an accelerator positions are not checked: too late sees every pool. (The launcher is called.)"""
    arguments = make.kpool_select(B=1, T=1, P=5) | {"positions": torch.tensor([[position]])}
    given = [poison.guarded(arguments[n]) for n in ("q", "weights", "pooled")]
    scores = torch.empty(1, 1, 5)
    with poison.unchanged(*given), poison.fenced():
        indexer._score(*given, arguments["positions"], scores, 0, 4)
    assert scores.isfinite().all() if position > 0 else (scores == -torch.inf).all()


def test_what_is_too_large_is_refused():
    def reasons(op, **arguments):
        verdicts = explain(op, **arguments, backend="triton").verdicts
        return next(v.reasons for v in verdicts if v.backend == "triton")

    assert any(
        "J must be 1 to 128" in r and r.endswith("got 256") for r in reasons(kpool_select, **make.kpool_select(J=256))
    )
    assert any(
        "I must be 1 to 256" in r and r.endswith("got 1024") for r in reasons(kpool_select, **make.kpool_select(I=1024))
    )
    assert any("I must be at most 1024" in r for r in reasons(hadamard_quant_fp8, x=torch.zeros(2, 2048)))
    apart = torch.zeros(2, 3, 4, 5, 8)[:, ::2, ::3, ::2]
    assert any("at most 3 strides" in r for r in reasons(hadamard_quant_fp8, x=apart))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_number_is_quantised_as_by_definition(dtype):
    """All finite bit patterns, each as a row of its own and 128 to a row."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = x[x.isfinite()]
    for rows in (x[:, None], x[: len(x) // 128 * 128].view(-1, 128)):
        if dtype == torch.bfloat16:
            rows = rows[(rows.abs() < 1e30).all(-1)]  # sums of larger ones overflow
        assert_bitwise(hadamard_quant_fp8(rows, backend="triton"), hadamard_quant_fp8(rows, backend="reference"))


def test_rows_of_any_size_are_quantised_as_by_definition():
    """Elements from far below the least float8 to the largest one of the row, also halfway cases."""
    x = torch.randn(400, 64) * torch.randint(-14, 3, (400, 64)).double().exp2().float()
    x = torch.cat([x, x.mul(16).round(), torch.randint(-9, 9, (200, 64)).float()])
    for size in (64, 2):
        rows = x.view(-1, size)
        assert_bitwise(hadamard_quant_fp8(rows, backend="triton"), hadamard_quant_fp8(rows, backend="reference"))
