"""What the machine is, as a value that can be cached, printed and injected."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from typing import Any

import attrs
import torch

__all__ = ["Hardware", "probe"]


@attrs.frozen(kw_only=True)
class Hardware:
    """One kind of device, and the software that could drive it.

    ``triton_problem`` and ``torch_npu_problem`` say in words why that package cannot be used for it; ``None`` means
    that it can.
    """

    device_type: str
    """The torch device type: ``"cpu"``, ``"cuda"`` (NVIDIA and AMD), ``"npu"``, ``"meta"``, …"""
    name: str
    """The chip, as its driver calls it."""
    capability: tuple[int, int] | None = None
    """NVIDIA compute capability."""
    gfx: str | None = None
    """AMD architecture, for instance ``"gfx942"``."""
    soc: str | None = None
    """Ascend family: ``"A2"``, ``"A3"``, ``"A5"`` or ``"310P"``."""
    driver: bool = True
    """A driver answers, and at least one such device is there."""
    triton: str | None = None
    """Version of the installed Triton (for an NPU: of triton-ascend)."""
    triton_problem: str | None = None
    torch_npu: str | None = None
    """Version of the installed torch-npu."""
    torch_npu_problem: str | None = None
    interpreter: bool = False
    """TRITON_INTERPRET=1: Triton kernels run in Python on the CPU."""

    @property
    def accelerator(self) -> bool:
        """Whether this is neither the CPU nor the shape-only meta device."""
        return self.device_type not in ("cpu", "meta")

    def __str__(self) -> str:
        kind = f"sm_{self.capability[0]}{self.capability[1]}" if self.capability else self.gfx or self.soc
        words = ", ".join(filter(None, (self.device_type, kind)))
        return self.name if self.name == words else f"{self.name} ({words})"

    @staticmethod
    def named(name: str) -> Hardware:
        """A chip by name, whether or not this machine has one, presuming that its software is installed and works.

        Raises:
            ValueError: for a name not known, listing those that are.

        Example:
            >>> print(Hardware.named("Ascend910B2"))
            Ascend910B2 (npu, A2)
        """
        if name.lower() not in _CHIPS:
            known = ", ".join(chip.name for chip in _CHIPS.values())
            raise ValueError(
                f"No hardware named {name!r}. Known: {known}. Or describe it: Hardware(device_type=..., name=...)."
            )
        return _CHIPS[name.lower()]


def _nvidia(name: str, major: int, minor: int) -> Hardware:
    return Hardware(device_type="cuda", name=name, capability=(major, minor))


def _ascend(name: str, soc: str) -> Hardware:
    return Hardware(device_type="npu", name=name, soc=soc)


_CHIPS: dict[str, Hardware] = {
    chip.name.lower(): chip
    for chip in (
        Hardware(device_type="cpu", name="cpu"),
        _ascend("Ascend910B2", "A2"),
        _ascend("Ascend910B3", "A2"),
        _ascend("Ascend910_9391", "A3"),
        _ascend("Ascend950PR_9589", "A5"),
        _ascend("Ascend310P3", "310P"),
        _nvidia("A100", 8, 0),
        _nvidia("H100", 9, 0),
        _nvidia("H200", 9, 0),
        _nvidia("B200", 10, 0),
        Hardware(device_type="cuda", name="MI300X", gfx="gfx942"),
    )
}

_SOC_FAMILIES = {
    "A2": range(220, 226),
    "A3": range(250, 256),
    "310P": range(200, 206),
    "A5": range(260, 261),
}
"""What ``torch_npu.npu.get_soc_version()`` returns for each family."""


@functools.lru_cache(maxsize=64)
def probe(device_type: str, *, interpreter: bool = False) -> Hardware:
    """What this machine has behind ``device_type``. It never raises: what is missing or broken becomes a problem in
    words.

    The answer is kept for the life of the process. Triton is imported only for a device it could drive, torch-npu
    never.
    """
    facts: dict[str, Any] = {"name": device_type, "driver": device_type in ("cpu", "meta")}
    try:
        facts |= _cuda() if device_type == "cuda" else _npu() if device_type == "npu" else {}
    except Exception as error:  # a driver may fail in any way at all, and none of them may stop a call on the CPU
        facts |= {"name": f"{device_type}, whose driver fails with {_show(error)}", "driver": False}
    triton, triton_problem = _triton(device_type, interpreter)
    torch_npu, torch_npu_problem = _torch_npu()
    return Hardware(
        device_type=device_type,
        triton=triton,
        triton_problem=triton_problem,
        torch_npu=torch_npu,
        torch_npu_problem=torch_npu_problem,
        interpreter=interpreter,
        **facts,
    )


def _cuda() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    facts: dict[str, Any] = {"name": properties.name, "driver": True}
    if torch.version.hip:
        return facts | {"gfx": properties.gcnArchName.partition(":")[0]}
    return facts | {"capability": (properties.major, properties.minor)}


def _npu() -> dict[str, Any]:
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return {}
    version = npu.get_soc_version()
    family = next((name for name, versions in _SOC_FAMILIES.items() if version in versions), None)
    return {"name": npu.get_device_name(), "soc": family, "driver": True}


def _triton(device_type: str, interpreter: bool) -> tuple[str | None, str | None]:
    """Version of the Triton that could drive ``device_type``, and why it cannot."""
    package = "triton-ascend" if device_type == "npu" else "triton"
    extra = "ascend" if device_type == "npu" else "triton"
    if not _installed("triton"):
        return None, f"{package} is not installed (pip install 'glm5fn[{extra}]')"
    version = _version(package)
    if device_type == "npu" and version is None:
        return (
            None,
            "triton is installed but triton-ascend is not, and only that drives an NPU (pip install 'glm5fn[ascend]')",
        )
    if device_type not in ("cuda", "npu") and not interpreter:
        return version, None
    try:
        runtime = importlib.import_module("triton").runtime
        if not interpreter:
            runtime.driver.active.get_current_target()
    except Exception as error:  # whatever a broken installation raises is what there is to say about it
        return version, f"{package} {version or '(unknown version)'} is installed but does not work: {_show(error)}"
    return version, None


def _torch_npu() -> tuple[str | None, str | None]:
    if not _installed("torch_npu"):
        return None, "torch-npu is not installed (pip install 'glm5fn[ascend]')"
    version = _version("torch-npu")
    if not hasattr(torch, "npu"):
        return (
            version,
            f"torch-npu {version or '(unknown version)'} is installed but did not load with torch (is CANN set up?)",
        )
    return version, None


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
