"""What ``glm5fn info`` shows. Everything that may be broken is asked in a guarded step, and no step stops the rest."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import glm5fn

__all__ = ["autoload_breaks_torch", "collect", "run_without_autoload", "text"]

PACKAGES = {
    "torch": "torch", "attrs": "attr", "einops": "einops", "safetensors": "safetensors", "numpy": "numpy",
    "triton": "triton", "triton-ascend": "triton", "torch-npu": "torch_npu", "transformers": "transformers",
    "matplotlib": "matplotlib",
}  # fmt: skip
"""Distribution and the module it brings."""

TRIED = ("triton", "torch_npu")
"""Modules that are imported to see whether they work; nothing here needs the others that are optional."""

VARIABLES = (
    "GLM5FN_BACKEND", "GLM5FN_FALLBACK", "TRITON_INTERPRET", "TORCH_DEVICE_BACKEND_AUTOLOAD", "CUDA_VISIBLE_DEVICES",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME", "OMP_NUM_THREADS",
)  # fmt: skip


def autoload_breaks_torch() -> bool:
    """Whether ``import torch`` failed while it may load accelerator packages by itself.

    Installed without CANN, torch-npu does that.
    """
    return glm5fn._torch_problem is not None and os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0"


def run_without_autoload(options: Sequence[str]) -> int:
    """Run ``glm5fn info`` in another process without auto-loading: a failed import cannot be repeated in the same one.

    Returns:
        The exit code of that process.
    """
    command = [sys.executable, "-m", "glm5fn", "info", *options, f"--torch-problem={glm5fn._torch_problem}"]
    return subprocess.run(command, env=os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}, check=False).returncode


def collect(hardware: str | None = None, torch_problem: str | None = None) -> dict[str, Any]:
    """Everything there is to know, as plain data. A part that cannot be found out is ``{"problem": text}``.

    Args:
        hardware: name of a chip to answer for instead of this machine's.
        torch_problem: what ``import torch`` said before auto-loading was switched off.

    Raises:
        ValueError: for a chip that is not known.
    """
    problems = {name: _try_import(name) for name in TRIED if _installed(name)}
    problems["torch"] = glm5fn._torch_problem
    if torch_problem is not None:
        problems["torch"] = f"{torch_problem} (the rest was found out with TORCH_DEVICE_BACKEND_AUTOLOAD=0)"
    report: dict[str, Any] = {
        "glm5fn": glm5fn.__version__,
        "location": os.path.dirname(__file__),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "packages": {name: _package(name, module, problems) for name, module in PACKAGES.items()},
        "environment": {name: os.environ.get(name) for name in VARIABLES},
    }
    if glm5fn._torch_problem is not None:
        return report
    if hardware is not None:
        from glm5fn.dispatch.hardware import Hardware

        Hardware.named(hardware)
    return report | {
        "hardware": _guarded(_hardware),
        "selection": _guarded(_selection),
        "support": _guarded(lambda: _support(hardware)),
    }


def _guarded(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception as error:
        return {"problem": _show(error)}


def _hardware() -> list[dict[str, Any]]:
    import attrs

    from glm5fn.dispatch.choosing import here, local

    return [attrs.asdict(here(kind)) for kind in dict.fromkeys(["cpu", local().device_type])]


def _selection() -> dict[str, Any]:
    from glm5fn.dispatch import backends
    from glm5fn.dispatch.selection import environment

    env = environment()
    return {
        "backends": list(backends()),
        "everything": env.everything or "auto",
        "per_op": dict(env.per_op),
        "fallback": env.fallback,
    }


def _support(hardware: str | None) -> dict[str, Any]:
    from glm5fn.dispatch import support_table

    table = support_table(hardware)
    return table.to_dict() | {"text": str(table)}


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _try_import(module: str) -> str | None:
    """What importing ``module`` raises, or None. SystemExit too: a broken package must not end the report."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        return _show(error)
    return None


def _package(name: str, module: str, problems: dict[str, str | None]) -> dict[str, Any]:
    try:
        version: str | None = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        version = None
    # Without a version this may be the other distribution of the same module; then it is reported there.
    stray = version is None and name.replace("-", "_") == module and _installed(module)
    return {
        "version": version or ("unknown" if stray else None),
        "problem": problems.get(module) if version or stray else None,
    }


def _show(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def text(report: dict[str, Any]) -> str:
    """The report for people."""
    lines = [f"glm5fn {report['glm5fn']}  {report['location']}", f"python {report['python']}", report["platform"]]
    lines += ["", "packages"]
    for name, found in report["packages"].items():
        lines.append(f"  {name:<14} {found['version'] or 'not installed'}")
        if found["problem"]:
            lines.append(f"  {'':<14} does not work: {found['problem']}")
    lines += [
        "",
        "environment",
        *(f"  {name}={value}" for name, value in report["environment"].items() if value is not None),
    ]
    if all(value is None for value in report["environment"].values()):
        lines.append("  none of the variables that matter is set")
    if "hardware" in report:
        lines += ["", *_part("hardware", report["hardware"], _hardware_lines)]
        lines += ["", *_part("selection", report["selection"], _selection_lines)]
        lines += ["", *_part("support", report["support"], lambda support: support["text"].splitlines())]
    else:
        lines += ["", "torch cannot be imported, so there is nothing to say about hardware and backends."]
    return "\n".join(lines)


def _part(title: str, data: Any, show: Callable[[Any], list[str]]) -> list[str]:
    if isinstance(data, dict) and "problem" in data:
        return [title, f"  could not be found out: {data['problem']}"]
    return [title, *(f"  {line}" for line in show(data))]


def _hardware_lines(devices: list[dict[str, Any]]) -> list[str]:
    from glm5fn.dispatch.hardware import Hardware

    lines = []
    for device in devices:
        lines.append(str(Hardware(**device)))
        lines += [f"  {device[name]}" for name in ("triton_problem", "torch_npu_problem") if device[name]]
    return lines


def _selection_lines(selection: dict[str, Any]) -> list[str]:
    per_op = [f"{op}: {backend}" for op, backend in selection["per_op"].items()]
    return [
        f"every operation: {selection['everything']}",
        *per_op,
        f"on falling back to reference on an accelerator: {selection['fallback']}",
        f"known backends: {', '.join(selection['backends'])}",
    ]
