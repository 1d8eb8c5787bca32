"""What a user can meet, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from glm5fn.dispatch.choice import Choice

__all__ = ["BackendFallback", "BackendUnavailable", "ContractError"]


class ContractError(ValueError):
    """An argument breaks the contract of an operation.

    The text says which argument of which operation, what it was, what it must be and, where that is not obvious, what
    to do. It is raised before a backend is chosen, so it reads the same on every backend, and before anything is
    written.
    """


class BackendUnavailable(RuntimeError):
    """No backend that was allowed to run an operation can run it.

    The text is every reason of every backend. ``choice`` holds the same as data.
    """

    def __init__(self, choice: Choice):
        super().__init__(str(choice))
        self.choice = choice


class BackendFallback(UserWarning):
    """``auto`` chose the slow reference backend although the tensors are on an accelerator."""
