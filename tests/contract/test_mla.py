"""The three forms of multi-head latent attention: values, gradients, shapes, refusals and memory."""

from __future__ import annotations

import functools

import pytest
import torch

from glm5fn.dispatch import ContractError
from glm5fn.ops.mla import mla_decode, mla_prefill, mla_sparse
from glm5fn.testing.compare import assert_within_budget
from glm5fn.testing.inputs import mla as make
from glm5fn.testing.memory import peak_extra_mib
from glm5fn.testing.oracle import mla as exact
from glm5fn.testing.poison import guarded, nan_empty, strided, unchanged
from glm5fn.testing.trace import assert_traceable

DENSE = {"mla_prefill": mla_prefill, "mla_decode": mla_decode}
FORMS = DENSE | {"mla_sparse": mla_sparse}
PREFILL = pytest.param("mla_prefill", marks=pytest.mark.needs("kernel for mla_prefill"))
every_dense_form = pytest.mark.parametrize("form", [PREFILL, "mla_decode"])
every_form = pytest.mark.parametrize("form", [PREFILL, "mla_decode", "mla_sparse"])
SHAPES = {
    "full": {"T": 9, "S": 9},
    "continued": {"T": 5, "S": 9},
    "one": {"T": 1, "S": 9},
    "ragged": {"B": 4, "T": 5, "S": 9, "lengths": [9, 5, 2, 0]},
    "ragged_full": {"B": 3, "T": 6, "S": 6, "lengths": [6, 3, 0]},
    "values_narrower": {"Dk": 6, "Dv": 4},
    "same_width": {"Dk": 4, "Dv": 4, "H": 1},
    "more_queries_than_rows": {"T": 6, "S": 3},
}


def cases(form, *, lengths=None, J=6, **options):
    """Arguments of ``form``; each takes only one of ``lengths`` and ``J``."""
    return make.mla_sparse(J=J, **options) if form == "mla_sparse" else make.mla_dense(lengths=lengths, **options)


@pytest.mark.needs("float64")
@pytest.mark.parametrize("shape", SHAPES)
@every_form
def test_float64_is_the_definition(form, shape, backend):
    arguments = cases(form, dtype=torch.float64, **SHAPES[shape])
    found = FORMS[form](**arguments, backend=backend)
    torch.testing.assert_close(found, getattr(exact, form)(**arguments), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", [None, [150, 70]], ids=str)
@pytest.mark.parametrize("T", [7, 150])
@pytest.mark.needs("float64")
@every_form
def test_many_blocks_are_one(form, T, lengths, backend, monkeypatch):
    monkeypatch.setattr("glm5fn.kernels.reference.mla._BLOCK_BYTES", 8000)
    arguments = cases(form, T=T, S=150, J=9, H=2, lengths=lengths, dtype=torch.float64)
    found = FORMS[form](**arguments, backend=backend)
    torch.testing.assert_close(found, getattr(exact, form)(**arguments), rtol=1e-10, atol=1e-10)


@pytest.mark.needs("gradients")
@every_form
def test_many_blocks_have_the_gradients_of_one(form, backend, monkeypatch):
    grads = []
    for limit in (8000, 64 << 20):
        monkeypatch.setattr("glm5fn.kernels.reference.mla._BLOCK_BYTES", limit)
        arguments = cases(form, T=50, S=150, J=9, H=2, lengths=[150, 70], dtype=torch.float64)
        leaves = [arguments[n].detach().clone().requires_grad_() for n in ("q", "latent", "w_uk", "w_uv")]
        rest = [x for n, x in arguments.items() if n == "indices"]
        keywords = {n: x for n, x in arguments.items() if n == "lengths"}
        out = FORMS[form](*leaves, *rest, **keywords, backend=backend)
        grads.append(torch.autograd.grad(out.square().sum(), leaves))
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@every_form
def test_low_precision_stays_within_the_budget(form, dtype, backend):
    arguments = cases(form, dtype=dtype, B=2, T=17, S=33, H=2, Dk=16, Dv=8, R=32, lengths=[33, 20])
    found = FORMS[form](**arguments, scale=0.3, backend=backend)
    definition = functools.partial(getattr(exact, form), **arguments, scale=0.3)
    assert found.dtype == dtype
    assert_within_budget(found, definition(), definition(dtype=torch.float32).to(dtype), what=form)


@every_form
def test_large_scores_do_not_overflow(form, backend):
    arguments = cases(form, T=9, S=9)
    arguments["q"] = arguments["q"] * 1e4
    found = FORMS[form](**arguments, backend=backend)
    definition = functools.partial(getattr(exact, form), **arguments)
    assert_within_budget(found, definition(), definition(dtype=torch.float32).float(), what=form)


@pytest.mark.needs("gradients")
@pytest.mark.parametrize("shape", ["full", "ragged", "values_narrower"])
@every_form
def test_gradients(form, shape, backend):
    options = SHAPES[shape] | {"H": 2, "R": 3, "dtype": torch.float64}
    arguments = cases(form, **options)
    names = ("q", "latent", "w_uk", "w_uv")
    leaves = [arguments[n].detach().clone().requires_grad_() for n in names]
    rest = {n: x for n, x in arguments.items() if n not in names}
    torch.autograd.gradcheck(lambda *xs: FORMS[form](*xs, **rest, backend=backend), leaves)


@pytest.mark.needs("gradients")
@every_form
def test_gradient_of_unread_rows_is_zero_even_if_they_are_nan(form, backend):
    arguments = cases(form, B=2, T=3, S=9, J=3, lengths=[5, 4])
    if form == "mla_sparse":
        unread = torch.ones(2, 9, dtype=torch.bool)
        for b, row in enumerate(arguments["indices"].flatten(1).tolist()):
            unread[b, [i for i in row if i >= 0]] = False
    else:
        unread = torch.arange(9) >= torch.tensor([[5], [4]])
    latent = arguments["latent"].masked_fill(unread[..., None], torch.nan).requires_grad_()
    leaves = [arguments[n].detach().clone().requires_grad_() for n in ("q", "w_uk", "w_uv")]
    FORMS[form](**arguments | {"latent": latent, **dict(zip(("q", "w_uk", "w_uv"), leaves, strict=True))},
                backend=backend).sum().backward()  # fmt: skip
    assert unread.any()
    assert bool((latent.grad[unread] == 0).all())
    assert all(bool(x.grad.isfinite().all()) for x in (latent, *leaves))


@every_dense_form
def test_forms_agree(form, backend, widest):
    for lengths in ([9, 9], [7, 3]):
        arguments = make.mla_dense(B=2, T=5, S=9, lengths=lengths, dtype=widest)
        dense = DENSE[form](**arguments, backend=backend)
        rest = {n: x for n, x in arguments.items() if n != "lengths"}
        sparse = mla_sparse(**rest, indices=make.all_indices(2, 5, 9, lengths), backend=backend)
        assert_within_budget(dense, sparse, what=form)


@every_dense_form
def test_a_query_before_the_sequence_sees_nothing(form, backend):
    arguments = make.mla_dense(B=2, T=5, S=9, lengths=[2, 0])
    found = DENSE[form](**arguments, backend=backend)
    assert bool((found[0, :3] == 0).all())
    assert bool((found[0, 3:] != 0).all())
    assert bool((found[1] == 0).all())


def test_a_query_without_indices_gives_zeros(backend):
    arguments = make.mla_sparse()
    assert bool((arguments["indices"][0, 0] == -1).all())
    arguments["indices"][arguments["indices"] < 0] = -7
    arguments["latent"][0, 0] = torch.nan
    arguments["indices"][0] = torch.where(arguments["indices"][0] == 0, -1, arguments["indices"][0])
    found = mla_sparse(**arguments, backend=backend)
    assert bool((found[0, 0] == 0).all())
    assert bool(found.isfinite().all())


def test_a_repeated_index_counts_twice(backend):
    arguments = make.mla_sparse(B=1, T=1, J=3)
    arguments["indices"] = torch.tensor([[[4, 4, 2]]], dtype=torch.int32)
    torch.testing.assert_close(mla_sparse(**arguments, backend=backend), exact.mla_sparse(**arguments).float())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@every_dense_form
def test_nan_reaches_exactly_the_queries_that_see_it(form, value, backend):
    clean = make.mla_dense(B=2, T=6, S=9, lengths=[9, 7])
    broken = clean | {"latent": clean["latent"].clone()}
    broken["latent"][0, 6, 2] = value  # queries 3.. of row 0
    broken["latent"][1, 7:] = value  # beyond the length
    found, wanted = (DENSE[form](**a, backend=backend) for a in (broken, clean))
    assert bool(found[0, 3:].isnan().all())
    torch.testing.assert_close(found[0, :3], wanted[0, :3], rtol=0, atol=0)
    torch.testing.assert_close(found[1], wanted[1], rtol=0, atol=0)


def test_sparse_reads_only_selected_rows(backend):
    clean = make.mla_sparse(B=2, T=3, S=40, J=4)
    unread = torch.ones(2, 40, dtype=torch.bool)
    for b, row in enumerate(clean["indices"].flatten(1).tolist()):
        unread[b, [i for i in row if i >= 0]] = False
    poisoned = clean | {"latent": clean["latent"].masked_fill(unread[..., None], torch.nan)}
    assert unread.sum() > 40
    torch.testing.assert_close(
        mla_sparse(**poisoned, backend=backend), mla_sparse(**clean, backend=backend), rtol=0, atol=0
    )


@every_form
def test_nan_query_stays_in_its_place(form, backend):
    clean = cases(form, B=2, T=4, S=6)
    broken = clean | {"q": clean["q"].clone()}
    broken["q"][1, 2, 0] = torch.nan
    found, wanted = (FORMS[form](**a, backend=backend) for a in (broken, clean))
    assert bool(found[1, 2, 0].isnan().all())
    found[1, 2, 0] = wanted[1, 2, 0]
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.no_launch
@pytest.mark.parametrize("sizes", [{"T": 0}, {"B": 0}, {"S": 0}, {"H": 0}], ids=str)
@every_form
def test_empty(form, sizes, backend):
    arguments = cases(form, **{"B": 2, "T": 3, "S": 4, "H": 2, "Dk": 4, "Dv": 6} | sizes)
    found = FORMS[form](**arguments, backend=backend)
    assert found.shape == (*arguments["q"].shape[:3], 6)
    assert bool((found == 0).all())


@pytest.mark.no_launch
def test_no_index_columns(backend):
    arguments = make.mla_sparse(J=0)
    assert bool((mla_sparse(**arguments, backend=backend) == 0).all())


@every_form
def test_inputs_any_strides_unchanged_and_unaliased(form, backend):
    arguments = cases(form, T=4, S=6)
    wanted = FORMS[form](**arguments, backend=backend)
    for wrap in (strided, guarded):
        wrapped = {n: wrap(x) for n, x in arguments.items()}
        with unchanged(*wrapped.values()), nan_empty():
            found = FORMS[form](**wrapped, backend=backend)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert all(found.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() for x in wrapped.values())


@every_form
def test_traceable(form, backend):
    assert_traceable(FORMS[form], **cases(form, T=4, S=6, lengths=[6, 3]), backend=backend)


FLOATS = "bfloat16 or float16 or float32 or float64"
REFUSED = {
    "rank": ({"q": torch.zeros(2, 5, 3)}, "q must have 4 dimensions [B, T, H, Dk], got 3: [2, 5, 3]."),
    "batch": ({"latent": torch.zeros(3, 9, 8)}, "so its dimension 0 (B) must be 2, got 3: [3, 9, 8]."),
    "latent rank": ({"w_uk": torch.zeros(3, 4, 7)}, "so its dimension 2 (R) must be 8, got 7: [3, 4, 7]."),
    "key width": ({"w_uk": torch.zeros(3, 5, 8)}, "so its dimension 1 (Dk) must be 4, got 5: [3, 5, 8]."),
    "heads": ({"w_uv": torch.zeros(2, 6, 8)}, "so its dimension 0 (H) must be 3, got 2: [2, 6, 8]."),
    "dtype": (
        {"latent": torch.zeros(2, 9, 8).half()},
        "q and latent must have the same dtype, got float32 and float16.",
    ),
    "integer": ({"q": torch.zeros(2, 5, 3, 4, dtype=torch.int32)}, f"q must be {FLOATS}, got int32."),
    "device": (
        {"w_uv": torch.zeros(3, 6, 8, device="meta")},
        "q and w_uv must have the same device, got cpu and meta.",
    ),
    "list": ({"latent": [1.0]}, "latent must be a tensor [B, S, R], got list."),
}
REFUSED_LENGTHS = {
    "dtype": ([9, 9], torch.int64, "lengths must be int32, got int64."),
    "shape": ([9], torch.int32, "lengths must be [B] with "),
    "too long": ([9, 10], torch.int32, "lengths must lie in 0..9 (S=9 latent rows), got 10 at [1]."),
    "negative": ([-1, 9], torch.int32, "lengths must lie in 0..9 (S=9 latent rows), got -1 at [0]."),
}
REFUSED_INDICES = {
    "dtype": (torch.zeros(2, 5, 6, dtype=torch.int64), "indices must be int32, got int64."),
    "shape": (torch.zeros(2, 4, 6, dtype=torch.int32), "so its dimension 1 (T) must be 5, got 4: [2, 4, 6]."),
    "too large": (
        torch.full((2, 5, 6), 9, dtype=torch.int32),
        "..8 (S=9 latent rows; negative means unused), got 9 at [0, 0, 0].",
    ),
}


def refused(form, text, arguments):
    with pytest.raises(ContractError) as error:
        FORMS[form](**arguments)
    assert str(error.value).startswith(f"{form}: ")
    assert text in str(error.value)


@pytest.mark.nothing_runs
@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("form", FORMS)
def test_refusals(form, what, backend):
    change, text = REFUSED[what]
    refused(form, text, cases(form) | change | {"backend": backend})


@pytest.mark.nothing_runs
@pytest.mark.parametrize("what", REFUSED_LENGTHS)
@pytest.mark.parametrize("form", DENSE)
def test_refused_lengths(form, what, backend):
    values, dtype, text = REFUSED_LENGTHS[what]
    refused(form, text, make.mla_dense() | {"lengths": torch.tensor(values, dtype=dtype), "backend": backend})


@pytest.mark.nothing_runs
@pytest.mark.parametrize("what", REFUSED_INDICES)
def test_refused_indices(what, backend):
    indices, text = REFUSED_INDICES[what]
    refused("mla_sparse", text, make.mla_sparse() | {"indices": indices, "backend": backend})


@pytest.mark.serial
@pytest.mark.needs("gradients|kernel for mla_prefill")
@pytest.mark.parametrize("lengths", [None, [8192]], ids=str)
def test_prefill_never_holds_all_scores(lengths, backend):
    """All scores of these four heads would take 1024 MiB, the sequence itself takes 40."""
    arguments = make.mla_dense(B=1, T=8192, S=8192, H=4, Dk=64, Dv=64, R=64, lengths=lengths)
    arguments["q"].requires_grad_()
    extra = peak_extra_mib(lambda: mla_prefill(**arguments, backend=backend).sum().backward())
    assert extra < 200, f"{extra:.0f} MiB"


@pytest.mark.serial
@pytest.mark.long
def test_sparse_never_expands_what_was_not_selected(backend):
    """Keys and values of the whole cache would take 512 MiB, the cache in another layout 128, the chosen rows 32."""
    arguments = make.mla_dense(B=1, T=256, S=65536, H=16, Dk=64, Dv=64, R=512)
    arguments["indices"] = torch.randint(0, 65536, (1, 256, 64), dtype=torch.int32)
    extra = peak_extra_mib(lambda: mla_sparse(**arguments, backend=backend))
    assert extra < 100, f"{extra:.0f} MiB"
