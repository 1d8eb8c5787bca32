"""The record of a device: what is probed, what is injected, and that nothing broken gets through as an exception."""

from __future__ import annotations

import sys
import types

import pytest
import torch

from glm5fn import Hardware
from glm5fn.dispatch import hardware
from glm5fn.dispatch.hardware import probe
from glm5fn.kernels import ascendc, triton

CHIPS = {
    "cpu": ("cpu", None, None),
    "Ascend910B2": ("npu", "A2", None),
    "Ascend910_9391": ("npu", "A3", None),
    "Ascend950PR_9589": ("npu", "A5", None),
    "Ascend310P3": ("npu", "310P", None),
    "A100": ("cuda", None, (8, 0)),
    "H100": ("cuda", None, (9, 0)),
    "B200": ("cuda", None, (10, 0)),
    "MI300X": ("cuda", None, None),
}


@pytest.fixture(autouse=True)
def _fresh_probe():
    probe.cache_clear()
    yield
    probe.cache_clear()


@pytest.fixture
def installed(monkeypatch):
    """Pretend that packages are installed: ``installed("triton", "3.7.1", module)``; an error as module is raised."""

    def install(package, version, module):
        name = {"torch-npu": "torch_npu", "triton-ascend": "triton"}.get(package, package)
        versions[package] = version
        modules[name] = module

    versions: dict[str, str] = {}
    modules: dict[str, object] = {}
    really_import = hardware.importlib.import_module

    def import_module(name):
        if isinstance(modules.get(name), Exception):
            raise modules[name]
        return modules[name] if name in modules else really_import(name)

    monkeypatch.setattr(hardware, "_installed", lambda module: module in modules)
    monkeypatch.setattr(hardware, "_version", versions.get)
    monkeypatch.setattr(hardware.importlib, "import_module", import_module)
    return install


def working_triton(target="cuda"):
    active = types.SimpleNamespace(get_current_target=lambda: target)
    return types.SimpleNamespace(runtime=types.SimpleNamespace(driver=types.SimpleNamespace(active=active)))


@pytest.fixture
def h100(monkeypatch):
    properties = types.SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)


def pretend_npu(monkeypatch, soc=223, name="Ascend910B3"):
    npu = types.SimpleNamespace(is_available=lambda: True, get_soc_version=lambda: soc, get_device_name=lambda: name)
    monkeypatch.setattr(torch, "npu", npu, raising=False)


@pytest.mark.parametrize("name", CHIPS)
def test_named_chips(name):
    chip = Hardware.named(name.upper())
    assert (chip.device_type, chip.soc, chip.capability) == CHIPS[name]
    assert chip.name == name
    assert chip.driver
    assert chip.triton_problem is None
    assert chip.torch_npu_problem is None


def test_an_unknown_chip_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"No hardware named 'H1000'\. Known: cpu, Ascend910B2, .* MI300X"):
        Hardware.named("H1000")


def test_text():
    assert str(Hardware.named("MI300X")) == "MI300X (cuda, gfx942)"
    assert str(Hardware.named("Ascend310P3")) == "Ascend310P3 (npu, 310P)"
    assert str(Hardware.named("cpu")) == "cpu"
    assert str(Hardware.named("B200")) == "B200 (cuda, sm_100)"


@pytest.mark.parametrize(("name", "ascendc_runs", "triton_runs"), [
    ("cpu", False, False), ("Ascend910B2", True, True), ("Ascend910_9391", True, True),
    ("Ascend950PR_9589", True, True), ("Ascend310P3", False, False), ("A100", False, True), ("H200", False, True),
    ("B200", False, True), ("MI300X", False, True),
])  # fmt: skip
def test_what_backends_say_about_chips(name, ascendc_runs, triton_runs):
    chip = Hardware.named(name)
    assert (ascendc.available(chip) == []) is ascendc_runs
    assert (triton.available(chip) == []) is triton_runs


def test_the_cpu_of_this_machine():
    chip = probe("cpu")
    assert (chip.device_type, chip.name, chip.driver, chip.accelerator) == ("cpu", "cpu", True, False)
    assert probe("cpu") is chip
    assert not probe("meta").accelerator


def test_missing_packages_are_reasons(installed):
    assert "triton is not installed (pip install 'glm5fn[triton]')" in triton.available(probe("cuda"))
    assert "triton-ascend is not installed (pip install 'glm5fn[ascend]')" in triton.available(probe("npu"))
    assert "torch-npu is not installed (pip install 'glm5fn[ascend]')" in ascendc.available(probe("npu"))


def test_a_device_that_does_not_answer_is_a_reason(installed, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no cuda device answers: cuda" in triton.available(probe("cuda"))
    assert "no npu device answers: npu" in ascendc.available(probe("npu"))


@pytest.mark.usefixtures("h100")
def test_an_nvidia_chip(installed):
    installed("triton", "3.7.1", working_triton())
    chip = probe("cuda")
    assert chip.capability == (9, 0)
    assert str(chip) == "NVIDIA H100 80GB HBM3 (cuda, sm_90)"
    assert chip.triton == "3.7.1"
    assert triton.available(chip) == []


@pytest.mark.usefixtures("h100")
def test_an_amd_chip(installed, monkeypatch):
    installed("triton", "3.7.1", working_triton())
    monkeypatch.setattr(torch.version, "hip", "6.2")
    properties = types.SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    assert str(probe("cuda")) == "AMD Instinct MI300X (cuda, gfx942)"
    assert probe("cuda").capability is None


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("module", [
    RuntimeError("libtriton.so: undefined symbol"),
    types.SimpleNamespace(),
    working_triton(),
], ids=["import", "empty", "driver"])  # fmt: skip
def test_a_broken_triton_is_a_reason(installed, module):
    if hasattr(module, "runtime"):
        module.runtime.driver.active.get_current_target = lambda: 1 / 0
    installed("triton", "3.7.1", module)
    (reason,) = triton.available(probe("cuda"))
    assert reason.startswith("triton 3.7.1 is installed but does not work: ")
    assert any(word in reason for word in ("undefined symbol", "AttributeError", "ZeroDivisionError"))


@pytest.mark.usefixtures("installed")
def test_a_broken_driver_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1 // 0)
    assert any("whose driver fails with ZeroDivisionError" in reason for reason in triton.available(probe("cuda")))


@pytest.mark.parametrize(("soc", "family"), [
    (220, "A2"), (225, "A2"), (250, "A3"), (255, "A3"), (200, "310P"), (205, "310P"), (260, "A5"), (100, None),
])  # fmt: skip
def test_npu_families(installed, monkeypatch, soc, family):
    pretend_npu(monkeypatch, soc)
    installed("torch-npu", "2.13.0", types.SimpleNamespace())
    installed("triton-ascend", "3.2.0", working_triton("npu"))
    chip = probe("npu")
    assert (chip.soc, chip.name, chip.torch_npu, chip.triton) == (family, "Ascend910B3", "2.13.0", "3.2.0")
    assert (ascendc.available(chip) == []) is (family in ("A2", "A3", "A5"))


def test_upstream_triton_does_not_drive_an_npu(installed, monkeypatch):
    pretend_npu(monkeypatch)
    installed("torch-npu", "2.13.0", types.SimpleNamespace())
    installed("triton", "3.7.1", working_triton())
    assert any("triton is installed but triton-ascend is not" in reason for reason in triton.available(probe("npu")))


def test_torch_npu_that_did_not_load_is_a_reason(installed):
    installed("torch-npu", "2.13.0", ImportError("libhccl.so"))
    assert "torch-npu 2.13.0 is installed but did not load with torch (is CANN set up?)" in ascendc.available(
        probe("cpu")
    )


def test_triton_is_not_imported_for_a_device_it_cannot_drive(installed):
    installed("triton", "3.7.1", RuntimeError("imported"))
    assert probe("cpu").triton_problem is None
    assert "imported" in (probe("cpu", interpreter=True).triton_problem or "")


def test_nothing_optional_is_imported_by_probing():
    before = {name for name in ("triton", "torch_npu") if name in sys.modules}
    for device_type in ("cpu", "meta", "npu"):
        probe(device_type)
    assert {name for name in ("triton", "torch_npu") if name in sys.modules} == before


def test_the_interpreter_runs_only_where_it_is_named(toy, installed, set_env):
    installed("triton", "3.7.1", working_triton())
    set_env(TRITON_INTERPRET="1")
    toy.add("triton")
    assert toy() == "reference"
    assert toy(backend="triton") == "triton"
