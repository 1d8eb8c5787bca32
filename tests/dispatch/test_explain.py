"""explain says what would happen and why, for this machine and for any other, without running anything."""

from __future__ import annotations

import pytest
import torch

from glm5fn import BackendUnavailable, ContractError, Hardware, explain, register, use_backend
from glm5fn.dispatch.selection import assume_hardware

META = torch.empty(2, 4, device="meta")


def reasons(choice, backend):
    return next(v.reasons for v in choice.verdicts if v.backend == backend)


def test_every_reason_of_every_backend_with_value_and_limit(toy):
    toy.add(
        "mine", unsupported=toy.wants_k(8), available=lambda hardware: [f"wants sm_90, found {hardware}"], priority=1
    )
    with pytest.raises(BackendUnavailable) as error:
        toy(torch.zeros(2, 4, dtype=torch.float64), backend="mine")
    lines = str(error.value).splitlines()
    assert lines[0] == "toy: none  (asked 'mine' by backend argument)"
    text = str(error.value)
    for fragment in (
        "wants sm_90, found cpu",
        "K must be at least 8, got 4",
        "x must be float32, got torch.float64",
        "has no AscendC kernel for toy",
        "AscendC needs an Ascend NPU, found cpu",
        "has no Triton kernel for toy",
        "Triton needs a CUDA, ROCm or NPU device, found cpu",
    ):
        assert fragment in text
    assert lines[-1].split() == ["reference", "ok"]


def test_named_backends_can_be_explained_although_they_cannot_run(toy):
    choice = explain("toy", META, backend="triton")
    assert (choice.op, choice.backend, choice.asked, choice.source) == ("toy", None, "triton", "backend argument")
    assert {v.backend for v in choice.verdicts} == {"ascendc", "triton", "reference"}
    assert reasons(choice, "reference") == ()


def test_the_kernel_does_not_run(toy):
    def explode(x, y=None, *, eps=1e-6):
        raise AssertionError("ran")

    with register("toy", "exploding", explode):
        assert explain("toy", torch.zeros(2, 4), backend="exploding").backend == "exploding"


def test_the_operation_checks_its_arguments(toy):
    with pytest.raises(ContractError, match="x must have 2 dimensions"):
        explain("toy", META.flatten())
    with pytest.raises(TypeError, match="epz"):
        explain("toy", META, epz=1)


def test_operation_or_name(toy):
    assert explain(toy.op, META) == explain("toy", META)
    with pytest.raises(ValueError, match=r"No operation named 'toyy'\. Known: rms_norm"):
        explain("toyy", META)


def test_frames_count(toy):
    toy.add("mine")
    with use_backend("mine"):
        choice = explain("toy", META)
    assert (choice.backend, choice.asked, choice.source) == ("mine", "mine", "use_backend")


def test_meta_tensors_never_reach_an_accelerator_backend(toy):
    choice = explain("toy", META)
    assert choice.backend == "reference"
    assert any("found meta" in reason for reason in reasons(choice, "ascendc"))


def test_injected_hardware(toy):
    toy.add("triton", unsupported=toy.wants_k(8))
    toy.add(
        "ascendc",
        unsupported=toy.wants_k(2),
        available=lambda hw: [] if hw.soc == "A2" else [f"wants A2, found {hw.soc}"],
    )
    assert explain("toy", META, hardware="Ascend910B2").backend == "ascendc"
    on_a3 = explain("toy", META, hardware=Hardware.named("Ascend910_9391"))
    assert on_a3.backend == "reference"
    assert reasons(on_a3, "ascendc") == ("wants A2, found A3",)
    assert reasons(on_a3, "triton") == ("K must be at least 8, got 4",)
    on_h100 = explain("toy", torch.empty(2, 8, device="meta"), hardware="H100")
    assert on_h100.backend == "triton"
    assert reasons(on_h100, "ascendc") == (
        "AscendC needs an Ascend NPU, found H100 (cuda, sm_90)",
        "wants A2, found None",
    )
    on_310p = explain("toy", torch.empty(2, 8, device="meta"), hardware="Ascend310P3")
    assert on_310p.backend == "reference"
    assert any("310P" in reason for reason in reasons(on_310p, "ascendc"))
    assert any("310P" in reason for reason in reasons(on_310p, "triton"))


def test_injected_hardware_imports_no_kernel(toy):
    with register("toy", "triton", "module_that_does_not_exist:toy"):
        assert explain("toy", META, hardware="H100").backend == "triton"


def test_limits_see_the_whole_call(toy):
    seen = []

    def unsupported(spec):
        seen.append(spec)
        return []

    toy.add("mine", unsupported=unsupported)
    x = torch.zeros(4, 6, requires_grad=True).t()
    explain("toy", x, backend="mine", hardware="H100")
    explain("toy", torch.zeros(2, 3), torch.zeros(1, dtype=torch.int32), backend="mine", eps=0.5)
    first, second = seen
    assert first.op == "toy"
    assert first.hardware is Hardware.named("H100")
    assert first.shapes == {"x": (6, 4)}
    assert first.strides == {"x": (1, 6)}
    assert first.options == {"y": None, "eps": 1e-6}
    assert first.needs_grad
    assert not first.capturing
    assert not first.contiguous("x")
    assert second.dtypes == {"x": torch.float32, "y": torch.int32}
    assert second.options == {"eps": 0.5}
    assert not second.needs_grad
    assert second.contiguous("x")
    with torch.no_grad():
        explain("toy", x, backend="mine")
    assert not seen[-1].needs_grad


def test_errors_in_limits_are_not_swallowed(toy):
    def broken(spec):
        raise ZeroDivisionError

    toy.add("mine", unsupported=broken, priority=1)
    with pytest.raises(ZeroDivisionError):
        toy()
    with pytest.raises(ZeroDivisionError):
        explain("toy", META)


def test_html(toy):
    toy.add("mine", unsupported=lambda spec: ["K < 8"], priority=1)
    page = explain("toy", META)._repr_html_()
    assert "K &lt; 8" in page
    assert "<code>toy: reference" in page


def test_assumed_hardware_decides_what_runs(toy):
    toy.add("triton")
    assert toy() == "reference"
    with assume_hardware(Hardware.named("A100")):
        assert toy() == "triton"
    assert toy() == "reference"
