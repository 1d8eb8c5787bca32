"""Latent attention on Triton beyond what every backend is asked: splits, sizes, bad metadata, other memory."""

from __future__ import annotations

import functools

import pytest
import torch

from glm5fn.dispatch import explain
from glm5fn.kernels.triton import launch, mla
from glm5fn.ops.mla import mla_decode, mla_prefill, mla_sparse
from glm5fn.testing import poison
from glm5fn.testing.compare import assert_bitwise, assert_within_budget
from glm5fn.testing.inputs import mla as make
from glm5fn.testing.oracle import mla as exact

FORMS = {"mla_decode": mla_decode, "mla_sparse": mla_sparse}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_form = pytest.mark.parametrize("form", FORMS)


def cases(form, *, lengths=None, J=6, **options):
    return make.mla_sparse(J=J, **options) if form == "mla_sparse" else make.mla_dense(lengths=lengths, **options)


def assert_defined(found, form, arguments):
    definition = functools.partial(getattr(exact, form), **arguments)
    assert_within_budget(found, definition(), definition(dtype=torch.float32).to(found.dtype), what=form)


@every_form
@pytest.mark.parametrize("S", [20, 300])
def test_what_starts(form, S):
    """A long context is split; a short one needs no merge."""
    arguments = cases(form, B=1, T=1, S=S, J=S)
    with launch.counted() as counter:
        found = FORMS[form](**arguments, backend="triton")
    merge = {"mla_merge_kernel": 1} if S == 300 else {}
    assert counter == {"mla_project_kernel": 2, "mla_attend_kernel": 1} | merge
    assert_defined(found, form, arguments)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
def test_splits_are_one_attention(form, dtype, monkeypatch):
    """Whatever the number of splits, and where rows have very different numbers of visible latents."""
    arguments = cases(form, B=2, T=1, S=300, J=300, H=3, R=40, lengths=[300, 5], dtype=dtype)
    for splits in (1, 2, 3):
        monkeypatch.setattr(mla, "_MOST_SPLITS", splits)
        with launch.counted() as counter:
            found = FORMS[form](**arguments, backend="triton")
        assert counter["mla_merge_kernel"] == (splits > 1)
        assert_defined(found, form, arguments)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("row", [0, 70, 299])
def test_a_broken_row_shows_in_every_split(value, row):
    """It is in one split and reaches the whole result; beyond the length it reaches nothing."""
    arguments = make.mla_dense(B=2, T=1, S=300, H=2, lengths=[300, row])
    arguments["latent"][:, row] = value
    found = mla_decode(**arguments, backend="triton")
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@every_form
@pytest.mark.parametrize(
    "sizes", [{"H": 17, "R": 512, "Dk": 130, "Dv": 150}, {"H": 1, "R": 1, "Dk": 1, "Dv": 1}], ids=str
)
def test_sizes_that_fill_no_tile(form, sizes):
    arguments = cases(form, B=1, T=2, S=33, J=29, dtype=torch.bfloat16, **sizes)
    assert_defined(FORMS[form](**arguments, backend="triton"), form, arguments)


@every_form
def test_a_rank_that_is_too_large_is_refused(form):
    verdicts = explain(FORMS[form], **cases(form, R=513), backend="triton").verdicts
    reasons = next(v.reasons for v in verdicts if v.backend == "triton")
    assert any("R must be at most 512" in reason and reason.endswith("got 513") for reason in reasons)


@every_form
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("S", [9, 150])
def test_nothing_is_read_or_written_beside_any_tensor(form, dtype, S):
    arguments = {n: poison.guarded(x) for n, x in cases(form, B=2, T=3, S=S, J=S, lengths=[S, 4], dtype=dtype).items()}
    with poison.unchanged(*arguments.values()), poison.fenced():
        found = FORMS[form](**arguments, backend="triton")
    assert_defined(found, form, arguments)


def test_bad_lengths_and_indices_reach_no_other_memory():
    """On an accelerator they are not checked; they are clamped. (The launchers are called: operations check on the
    CPU.)"""
    arguments = {n: poison.guarded(x) for n, x in make.mla_dense(B=4, T=2, S=20).items()}
    good, bad = (torch.tensor(x, dtype=torch.int32) for x in ([0, 20, 20, 0], [-5, 21, 2**31 - 1, -(2**31)]))
    with poison.unchanged(*arguments.values()), poison.fenced():
        found = mla.mla_decode(**arguments, lengths=bad)
    assert_bitwise(found, mla.mla_decode(**arguments, lengths=good))
    bad = torch.tensor([20, 2**31 - 1, -(2**31), 3], dtype=torch.int32).expand(4, 2, 4)
    with poison.unchanged(*arguments.values()), poison.fenced():
        found = mla.mla_sparse(**arguments, indices=bad)
    assert_bitwise(found, mla.mla_sparse(**arguments, indices=bad.clamp(max=19)))


def test_other_form_other_backend():
    """Prefill on the reference backend, decode here, over the same latents."""
    arguments = make.mla_dense(B=2, T=9, S=12, lengths=[12, 9], dtype=torch.bfloat16)
    whole = mla_prefill(**arguments, backend="reference")
    last = arguments | {"q": arguments["q"][:, -2:]}
    assert_within_budget(mla_decode(**last, backend="triton"), exact.mla_prefill(**last), whole[:, -2:])


@every_form
def test_same_bits_every_time(form):
    arguments = cases(form, B=1, T=2, S=300, J=200, dtype=torch.bfloat16)
    assert_bitwise(FORMS[form](**arguments, backend="triton"), FORMS[form](**arguments, backend="triton"))
