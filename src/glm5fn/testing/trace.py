"""Make reads of device values on the host, graph breaks and wrong abstract shapes visible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from glm5fn.testing.compare import assert_bitwise

__all__ = ["assert_traceable", "no_host_reads"]


class _NoHostReads(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise AssertionError(f"{func} makes the host wait for a value on the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_reads() -> Iterator[None]:
    """Inside, ``.item()``, ``bool(tensor)``, ``nonzero`` and whatever else would stall an accelerator raise.

    Example:
        >>> with no_host_reads():
        ...     torch.ones(3).sum().item()
        Traceback (most recent call last):
        AssertionError: aten._local_scalar_dense.default makes the host wait for a value on the device
    """
    with _NoHostReads():
        yield


def assert_traceable(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` and assert that it runs without host reads, compiled to one graph and on meta tensors; return
    its result.

    The compiled call must give the same bits, the meta call the same shapes and dtypes. With a ``backend`` other than
    reference there is no meta call: kernels for a device refuse meta tensors.

    Example:
        >>> assert_traceable(torch.add, torch.ones(2), 1)
        tensor([2., 2.])
    """
    with no_host_reads():
        result = function(*args, **kwargs)
    torch.compiler.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True)
    assert_bitwise(pytree.tree_leaves(compiled(*args, **kwargs)), pytree.tree_leaves(result), what="compiled result")
    if kwargs.get("backend") not in (None, "reference"):
        return result
    to_meta = lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x  # noqa: E731
    abstract = function(*pytree.tree_map(to_meta, args), **pytree.tree_map(to_meta, kwargs))
    for meta, real in zip(pytree.tree_leaves(abstract), pytree.tree_leaves(result), strict=True):
        found, wanted = (meta.device.type, meta.shape, meta.dtype), ("meta", real.shape, real.dtype)
        assert found == wanted, f"on meta tensors: found {found}, wanted {wanted}"
    return result
