"""Landing on reference on an accelerator is never silent unless asked."""

from __future__ import annotations

import warnings

import pytest
import torch

from glm5fn import BackendFallback, BackendUnavailable, Hardware, explain, register, reload_env
from glm5fn.dispatch.selection import assume_hardware


def run_all(toy, shapes):
    for shape in shapes:
        toy(torch.zeros(shape))


@pytest.fixture
def h100():
    with assume_hardware(Hardware.named("H100")):
        yield


@pytest.mark.usefixtures("h100")
def test_warns_once_per_operation_and_set_of_reasons(toy):
    toy.add("triton", unsupported=toy.wants_k(8))
    with pytest.warns(BackendFallback) as caught:
        run_all(toy, [(2, 4)] * 3)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert "toy runs on the slow reference backend although its tensors are on H100 (cuda, sm_90)" in text
    assert "K must be at least 8, got 4" in text
    assert "AscendC needs an Ascend NPU" in text
    assert "GLM5FN_FALLBACK=silent" in text
    with pytest.warns(BackendFallback, match="got 5") as caught:
        run_all(toy, [(2, 5), (3, 5)])
    assert len(caught) == 1, "another shape with the same reasons is not news"
    toy(torch.zeros(2, 8))


@pytest.mark.usefixtures("h100")
def test_the_warning_points_at_the_caller(toy):
    with pytest.warns(BackendFallback) as caught:
        toy.op(torch.zeros(2, 4))
    assert caught[0].filename == __file__


@pytest.mark.usefixtures("h100")
def test_silent(toy, set_env):
    set_env(GLM5FN_FALLBACK="silent")
    assert toy() == "reference"


@pytest.mark.usefixtures("h100")
def test_error(toy, set_env):
    toy.add("triton", unsupported=toy.wants_k(8))
    set_env(GLM5FN_FALLBACK="error")
    for _ in range(2):
        with pytest.raises(BackendUnavailable) as error:
            toy()
        assert "K must be at least 8, got 4" in str(error.value)
        assert "GLM5FN_FALLBACK=error does not let auto fall back to it on H100" in str(error.value)
    assert explain("toy", torch.zeros(2, 4)).backend is None
    assert toy(backend="reference") == "reference", "named is not fallen back to"
    assert toy(torch.zeros(2, 8)) == "triton"


@pytest.mark.usefixtures("h100")
def test_naming_reference_does_not_warn(toy):
    assert toy(backend="reference") == "reference"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_warning_without_an_accelerator(toy, device):
    toy.op(torch.zeros(2, 4, device=device))


@pytest.mark.usefixtures("h100")
def test_no_warning_when_something_better_runs(toy):
    toy.add("mine", priority=1)
    assert toy() == "mine"


@pytest.mark.usefixtures("h100")
def test_reload_env_makes_it_warn_again(toy):
    for _ in range(2):
        with pytest.warns(BackendFallback):
            toy()
        reload_env()


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("module_that_does_not_exist:toy", "cannot be imported: ModuleNotFoundError"),
        ("math:toy", "cannot be used: math has no function 'toy'"),
        ("math:sqrt", "cannot be used: toy: an implementation must have the operation's signature"),
    ],
)
def test_a_target_that_cannot_be_loaded_is_a_reason_in_auto_and_by_name(toy, target, reason):
    with register("toy", "triton", target):
        with pytest.warns(BackendFallback, match=f"{target} {reason}"):
            assert toy() == "reference"
        with pytest.raises(BackendUnavailable, match=f"{target} {reason}"):
            toy(backend="triton")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert toy() == "reference"
