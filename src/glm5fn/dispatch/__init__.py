"""Choosing who runs an operation. See :mod:`glm5fn.dispatch.engine` for the way from a call to a function."""

from glm5fn.dispatch.choice import Choice, Verdict
from glm5fn.dispatch.engine import dispatch, explain
from glm5fn.dispatch.errors import BackendFallback, BackendUnavailable, ContractError
from glm5fn.dispatch.hardware import Hardware
from glm5fn.dispatch.registry import backends, op, register, unregister
from glm5fn.dispatch.selection import record_choices, reload_env, use_backend
from glm5fn.dispatch.spec import OpSpec
from glm5fn.dispatch.support import support_table

__all__ = [
    "BackendFallback",
    "BackendUnavailable",
    "Choice",
    "ContractError",
    "Hardware",
    "OpSpec",
    "Verdict",
    "backends",
    "dispatch",
    "explain",
    "op",
    "record_choices",
    "register",
    "reload_env",
    "support_table",
    "unregister",
    "use_backend",
]
