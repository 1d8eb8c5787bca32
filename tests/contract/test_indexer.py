"""The kpool indexer: pooled keys, chosen tokens, gradients and refusals."""

from __future__ import annotations

import functools

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.ops.indexer import kpool_compress, kpool_select
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import indexer as make
from glm5fn.testing.memory import peak_extra_mib
from glm5fn.testing.oracle import indexer as exact
from glm5fn.testing.poison import guarded, nan_empty, strided, unchanged
from glm5fn.testing.trace import assert_traceable

OPS = {"kpool_compress": kpool_compress, "kpool_select": kpool_select}
DTYPES = [pytest.param(torch.float64, marks=pytest.mark.needs("float64")), torch.float32, torch.bfloat16, torch.float16]
TIES = pytest.mark.parametrize("ties", [False, True])

# --- kpool_compress


@pytest.mark.parametrize("sizes", [{}, {"kpool": 1}, {"kpool": 16, "P": 1}, {"I": 1}], ids=str)
def test_compress_is_the_definition(sizes, backend, widest):
    arguments = make.kpool_compress(**sizes, dtype=widest)
    found = kpool_compress(**arguments, backend=backend)
    low = exact.kpool_compress(**arguments, dtype=widest)
    assert_within_budget(found, exact.kpool_compress(**arguments), low, what="kpool_compress")


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("ape_dtype", ["own", "float32"])
def test_compress_in_low_precision(dtype, ape_dtype, backend):
    arguments = make.kpool_compress(dtype=dtype, I=32)
    if ape_dtype == "float32":
        arguments["ape"] = make.kpool_compress(I=32)["ape"]
    found = kpool_compress(**arguments, backend=backend)
    low = exact.kpool_compress(**arguments, dtype=torch.float32).to(dtype)
    assert found.dtype == dtype
    assert_within_budget(found, exact.kpool_compress(**arguments), low, what="kpool_compress")


def test_compress_weighs_every_channel_by_itself(backend):
    k = torch.tensor([[1.0, 10.0], [2.0, 20.0]]).view(1, 1, 2, 2)
    gate = torch.tensor([[1e4, 0.0], [0.0, 1e4]]).view(1, 1, 2, 2)
    assert kpool_compress(k, gate, torch.zeros(2, 2), backend=backend).flatten().tolist() == [1.0, 20.0]
    ape = torch.tensor([[-1e5, 0.0], [0.0, 0.0]])
    assert kpool_compress(k, gate, ape, backend=backend).flatten().tolist() == [2.0, 20.0]


@pytest.mark.needs("gradients")
def test_compress_gradients(backend):
    arguments = make.kpool_compress(B=1, P=2, kpool=3, I=2, dtype=torch.float64)
    arguments["gate"] /= 50
    leaves = [x.requires_grad_() for x in arguments.values()]
    torch.autograd.gradcheck(functools.partial(kpool_compress, backend=backend), leaves)


def test_compress_nan_stays_in_its_pool(backend):
    clean = make.kpool_compress()
    broken = clean | {"k": clean["k"].clone()}
    broken["k"][1, 1, 2] = torch.nan
    found, wanted = (kpool_compress(**a, backend=backend) for a in (broken, clean))
    assert bool(found[1, 1].isnan().all())
    found[1, 1] = wanted[1, 1]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


# --- kpool_select


@TIES
@pytest.mark.parametrize("tail", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_select_is_the_definition(dtype, tail, ties, backend):
    arguments = make.kpool_select(T=19, P=5, ties=ties, dtype=dtype) | {"tail": tail}
    assert_bitwise(kpool_select(**arguments, backend=backend), exact.kpool_select(**arguments))


@TIES
@pytest.mark.parametrize(
    "sizes",
    [
        {"kpool": 1, "topk": 3},
        {"kpool": 16, "topk": 32, "P": 4, "T": 40},
        {"topk": 400},
        pytest.param({"P": 0, "T": 3}, marks=pytest.mark.no_launch),
        {"P": 1, "T": 7},
        {"T": 1},
        {"J": 1, "I": 1},
        {"J": 16, "I": 64, "P": 30, "topk": 16},
    ],
    ids=str,
)
def test_select_for_any_size(sizes, ties, backend):
    arguments = make.kpool_select(**sizes, ties=ties)
    assert_bitwise(kpool_select(**arguments, backend=backend), exact.kpool_select(**arguments))


def test_select_in_many_blocks(backend, monkeypatch):
    monkeypatch.setattr(f"glm5fn.kernels.{backend}.indexer._BLOCK_BYTES", 900)
    arguments = make.kpool_select(T=23, P=7, topk=12)
    assert_bitwise(kpool_select(**arguments, backend=backend), exact.kpool_select(**arguments))


@pytest.mark.parametrize(
    ("position", "pools", "tail"),
    [(2, 0, [0, 1, 2]), (3, 1, []), (4, 1, [4]), (6, 1, [4, 5, 6]), (7, 2, []), (-1, 0, []), (-9, 0, [])],
)
def test_select_pools_and_tail_by_hand(position, pools, tail, backend):
    q, weights, pooled = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1), torch.ones(1, 2, 4)
    found = kpool_select(q, weights, pooled, torch.tensor([[position]]), topk=8, kpool=4, backend=backend)
    history = list(range(4 * pools))
    assert found[0, 0].tolist() == history + [-1] * (8 - len(history)) + tail + [-1] * (3 - len(tail))


def test_select_own_pool_competes(backend):
    """At the last token of a pool there is no tail, and nothing guarantees that the query selects itself."""
    q, weights = torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1)
    found = kpool_select(
        q, weights, torch.tensor([[[5.0], [1.0]]]), torch.tensor([[7]]), topk=4, kpool=4, backend=backend
    )
    assert found[0, 0].tolist() == [0, 1, 2, 3, -1, -1, -1]


def test_select_equal_scores_go_to_the_lower_pool(backend):
    """Most scores are exactly zero behind the relu, some are negative through their weight."""
    q, weights = torch.ones(1, 1, 2, 1), torch.tensor([[[1.0, -1.0]]])
    pooled = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 0.0]).view(1, 6, 1)
    found = kpool_select(q, weights, pooled, torch.tensor([[12]]), topk=6, kpool=2, backend=backend)
    assert found[0, 0].tolist() == [0, 1, 2, 3, 4, 5, 12]
    found = kpool_select(q[:, :, :1], -weights[..., :1], pooled + torch.tensor([9.0, 1, 1, 0, 0, 1]).view(1, 6, 1),
                         torch.tensor([[12]]), topk=6, kpool=2, backend=backend)  # fmt: skip
    assert found[0, 0].tolist() == [2, 3, 6, 7, 8, 9, 12]


def test_select_never_reads_pools_that_are_not_complete(backend):
    arguments = make.kpool_select(B=2, T=3, P=6, positions=[[9, 10, 11], [3, 4, 5]])
    wanted = kpool_select(**arguments, backend=backend)
    poisoned = arguments | {"pooled": arguments["pooled"].clone()}
    poisoned["pooled"][0, 3:] = torch.nan
    poisoned["pooled"][1, 1:] = torch.inf
    assert_bitwise(kpool_select(**poisoned, backend=backend), wanted)
    poisoned["pooled"][0, 2] = torch.nan  # visible to the last query of row 0 only
    assert_bitwise(kpool_select(**poisoned, backend=backend)[0, :2], wanted[0, :2])


def test_select_a_broken_key_is_chosen(backend):
    arguments = make.kpool_select(B=1, T=1, P=6, positions=[[23]], topk=4)
    for pool in range(6):
        broken = arguments | {"pooled": arguments["pooled"].clone()}
        broken["pooled"][0, pool, 0] = torch.nan
        found = kpool_select(**broken, backend=backend)
        assert found[0, 0].tolist() == [4 * pool + i for i in range(4)] + [-1] * 3


def test_select_positions_may_be_int64(backend):
    arguments = make.kpool_select()
    wide = arguments | {"positions": arguments["positions"].long()}
    assert_bitwise(kpool_select(**wide, backend=backend), kpool_select(**arguments, backend=backend))


@pytest.mark.serial
@pytest.mark.long
def test_select_never_holds_all_scores(backend):
    """Scores per head would take 1024 MiB, the head sum 128."""
    q, weights = torch.randn(1, 4096, 8, 4), torch.randn(1, 4096, 8)
    pooled, positions = torch.randn(1, 8192, 4), torch.arange(28668, 32764)[None]
    call = functools.partial(kpool_select, q, weights, pooled, positions, topk=64, kpool=4, backend=backend)
    extra = peak_extra_mib(call)
    assert extra < 100, f"{extra:.0f} MiB"


# --- both


@pytest.mark.no_launch
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}], ids=str)
def test_select_empty(sizes, backend):
    arguments = make.kpool_select(**{"B": 2, "T": 3} | sizes)
    found = kpool_select(**arguments, backend=backend)
    assert found.shape == (*arguments["positions"].shape, 11)


@pytest.mark.no_launch
@pytest.mark.parametrize("sizes", [{"P": 0}, {"B": 0}], ids=str)
def test_compress_empty(sizes, backend):
    arguments = make.kpool_compress(**sizes)
    assert kpool_compress(**arguments, backend=backend).shape == (*arguments["k"].shape[:2], 8)


def tensors(arguments):
    return {n: x for n, x in arguments.items() if isinstance(x, torch.Tensor)}


@pytest.mark.parametrize("op", OPS)
def test_inputs_any_strides_unchanged_and_unaliased(op, backend):
    arguments = getattr(make, op)()
    wanted = OPS[op](**arguments, backend=backend)
    for wrap in (strided, guarded):
        wrapped = {n: wrap(x) for n, x in tensors(arguments).items()}
        with unchanged(*wrapped.values()), nan_empty():
            found = OPS[op](**arguments | wrapped, backend=backend)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert all(found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in wrapped.values())


@pytest.mark.parametrize("op", OPS)
def test_traceable(op, backend):
    assert_traceable(OPS[op], **getattr(make, op)(), backend=backend)


REFUSED = {
    "kpool_compress": {
        "rank": ({"k": torch.zeros(2, 3, 8)}, "k must have 4 dimensions [B, P, kpool, I], got 3: [2, 3, 8]."),
        "gate": ({"gate": torch.zeros(2, 3, 4, 7)}, "so its dimension 3 (I) must be 8, got 7: [2, 3, 4, 7]."),
        "ape": ({"ape": torch.zeros(3, 8)}, "so its dimension 0 (kpool) must be 4, got 3: [3, 8]."),
        "gate dtype": (
            {"gate": torch.zeros(2, 3, 4, 8).half()},
            "k and gate must have the same dtype, got float32 and",
        ),
        "ape dtype": ({"ape": torch.zeros(4, 8).half()}, "ape must be float32, got float16."),
        "device": ({"ape": torch.zeros(4, 8, device="meta")}, "k and ape must have the same device, got cpu and meta."),
        "no members": (
            {"k": torch.zeros(2, 3, 0, 8), "gate": torch.zeros(2, 3, 0, 8), "ape": torch.zeros(0, 8)},
            "kpool (dimension 2 of k) must be at least 1, got 0.",
        ),
    },
    "kpool_select": {
        "rank": ({"q": torch.zeros(2, 9, 4)}, "q must have 4 dimensions [B, T, J, I], got 3: [2, 9, 4]."),
        "weights": ({"weights": torch.zeros(2, 9, 3)}, "so its dimension 2 (J) must be 4, got 3: [2, 9, 3]."),
        "pooled": ({"pooled": torch.zeros(2, 5, 3)}, "so its dimension 2 (I) must be 4, got 3: [2, 5, 3]."),
        "positions": (
            {"positions": torch.zeros(9, dtype=torch.int32)},
            "positions must have 2 dimensions [B, T], got 1",
        ),
        "float positions": ({"positions": torch.zeros(2, 9)}, "positions must be int32 or int64, got float32."),
        "dtype": (
            {"pooled": torch.zeros(2, 5, 4).half()},
            "q and pooled must have the same dtype, got float32 and float16.",
        ),
        "weights dtype": ({"weights": torch.zeros(2, 9, 4).half()}, "weights must be float32, got float16."),
        "device": ({"pooled": torch.zeros(2, 5, 4, device="meta")}, "q and pooled must have the same device"),
        "kpool": ({"kpool": 0}, "kpool must be at least 1, got 0."),
        "topk": ({"topk": 6}, "topk must be a positive multiple of kpool=4, got 6."),
        "no topk": ({"topk": 0}, "topk must be a positive multiple of kpool=4, got 0."),
        "missing pools": (
            {"positions": torch.full((2, 9), 23, dtype=torch.int32)},
            "..22 (P=5 pools of 4; negative means padding), got 23 at [0, 0].",
        ),
    },
}


@pytest.mark.nothing_runs
@pytest.mark.parametrize(("op", "what"), [(op, what) for op, changes in REFUSED.items() for what in changes])
def test_refusals(op, what, backend):
    change, text = REFUSED[op][what]
    with pytest.raises(ContractError) as error:
        OPS[op](**getattr(make, op)() | change, backend=backend)
    assert str(error.value).startswith(f"{op}: ")
    assert text in str(error.value)
