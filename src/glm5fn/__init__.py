"""GLM-5.3-Flash as stateless pure functions on PyTorch tensors. Every public name is here."""

from importlib.metadata import version as _version
from warnings import catch_warnings as _catch_warnings
from warnings import filterwarnings as _filterwarnings

__version__ = _version("glm5fn")

try:
    with _catch_warnings():
        # torch says so at every import on a machine without NumPy, which nothing here needs.
        _filterwarnings("ignore", message="Failed to initialize NumPy")
        import torch as _torch  # noqa: F401 (to see whether it can be)
except Exception as _error:
    # A broken accelerator package can break torch itself; `glm5fn info` must still be able to say so.
    _torch_problem: str | None = f"{type(_error).__name__}: {_error}"

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module 'glm5fn' has no attribute {name!r}")
        raise ImportError(
            f"glm5fn needs torch, but `import torch` failed. `python -m glm5fn` says more. {_torch_problem}"
        )

else:
    _torch_problem = None
    from glm5fn.assets import shipped_checkpoint
    from glm5fn.cache import (
        IndexCache,
        KDACache,
        MLACache,
        ModelCache,
        cache_nbytes,
        capacity,
        describe,
        fork,
        init_cache,
        select,
    )
    from glm5fn.checkpoint import CheckpointError, inspect_checkpoint, load_checkpoint, save_checkpoint
    from glm5fn.config import Config, ConfigError, VisionConfig
    from glm5fn.dispatch import (
        BackendFallback,
        BackendUnavailable,
        Choice,
        ContractError,
        Hardware,
        OpSpec,
        Verdict,
        backends,
        explain,
        record_choices,
        register,
        reload_env,
        support_table,
        unregister,
        use_backend,
    )
    from glm5fn.donation import debug_donation
    from glm5fn.generate import Step, generate
    from glm5fn.model import decode_step, forward, prefill
    from glm5fn.ops.conv import ConvOut, causal_conv1d, causal_conv1d_update
    from glm5fn.ops.indexer import kpool_compress, kpool_select
    from glm5fn.ops.kda import KDAOut, kda_chunk, kda_gate, kda_recurrent, kda_verify
    from glm5fn.ops.mhc import MHCOut, mhc_post, mhc_pre, mhc_pre_norm
    from glm5fn.ops.mla import mla_decode, mla_prefill, mla_sparse
    from glm5fn.ops.moe import RouteOut, clamped_swiglu, moe_experts, moe_route
    from glm5fn.ops.norm import gated_rms_norm, l2_norm, rms_norm
    from glm5fn.ops.quant import QuantOut, hadamard_quant_fp8
    from glm5fn.params import Params, init_params
    from glm5fn.tokenizer import ByteTokenizer, load_tokenizer

__all__ = [
    "BackendFallback", "BackendUnavailable", "ByteTokenizer", "CheckpointError", "Choice", "Config", "ConfigError",
    "ContractError", "ConvOut", "Hardware", "IndexCache", "KDACache", "KDAOut", "MHCOut", "MLACache", "ModelCache",
    "OpSpec", "Params", "QuantOut", "RouteOut", "Step", "Verdict", "VisionConfig", "__version__", "backends",
    "cache_nbytes", "capacity", "causal_conv1d", "causal_conv1d_update", "clamped_swiglu", "debug_donation",
    "decode_step", "describe", "explain", "fork", "forward", "gated_rms_norm", "generate", "hadamard_quant_fp8",
    "init_cache", "init_params", "inspect_checkpoint", "kda_chunk", "kda_gate", "kda_recurrent", "kda_verify",
    "kpool_compress", "kpool_select", "l2_norm", "load_checkpoint", "load_tokenizer", "mhc_post", "mhc_pre",
    "mhc_pre_norm", "mla_decode", "mla_prefill", "mla_sparse", "moe_experts", "moe_route", "prefill", "record_choices",
    "register", "reload_env", "rms_norm", "save_checkpoint", "select", "shipped_checkpoint", "support_table",
    "unregister", "use_backend",
]  # fmt: skip
