"""The parameter tree: its types, the description of every leaf, initial values, and helpers over whole trees.

Every matrix is ``[out, in]`` as in the checkpoint. What the model always uses together is one leaf: q|k|v, gate|up, the
experts of a layer. Sizes in the comments: D hidden, H heads, K = V channels per KDA head, W conv width, r the rank of
the KDA gates, Rq and R the ranks of the MLA projections, Dk and Dv its head sizes, J indexer heads of I channels,
N streams, E experts, F the width of an MLP.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import attrs
import torch

from glm5fn.config import Config

__all__ = [
    "KDA",
    "MLA",
    "MLP",
    "MTP",
    "HyperConnection",
    "Indexer",
    "Layer",
    "MoE",
    "ParamInfo",
    "Params",
    "abstract",
    "cast",
    "count",
    "init_params",
    "map_leaves",
    "map_named_leaves",
    "named_leaves",
    "nbytes",
]

# A leaf is a tensor in a loaded tree and a ParamInfo in an abstract one.
Leaf = Any
Tree = TypeVar("Tree")


class HyperConnection(NamedTuple):
    """Weights of one hyper-connection: rows are N pre, N post, then N·N comb as [in, out]."""

    fn: Leaf  # [(2+N)·N, N·D], columns stream-major
    base: Leaf  # float32 [(2+N)·N]
    scale: Leaf  # float32 [3]: pre, post, comb


class KDA(NamedTuple):
    """Weights of a KDA (gated delta rule) block."""

    qkv_proj: Leaf  # [H·(2K+V), D], rows q|k|v
    conv: Leaf  # float32 [H·(2K+V), W], the last tap multiplies the current token
    b_proj: Leaf  # [H, D]
    f_a: Leaf  # [r, D]
    f_b: Leaf  # [H·K, r]
    g_a: Leaf  # [r, D]
    g_b: Leaf  # [H·V, r]
    A_log: Leaf  # float32 [H]
    dt_bias: Leaf  # float32 [H, K]
    o_norm: Leaf  # [V]
    o_proj: Leaf  # [D, H·V]


class Indexer(NamedTuple):
    """Weights of the indexer that picks the pools an MLA query attends to."""

    wq_b: Leaf  # [J·I, Rq]
    wk: Leaf  # [I, D]
    k_norm_weight: Leaf  # [I]
    k_norm_bias: Leaf  # [I]
    weights_proj: Leaf  # [J, D]
    compress_gate: Leaf  # [I, D]
    compress_ape: Leaf  # [kpool, I]


class MLA(NamedTuple):
    """Weights of an MLA block without positions; ``w_uk`` and ``w_uv`` are views of one tensor after loading."""

    q_a: Leaf  # [Rq, D]
    q_a_norm: Leaf  # [Rq]
    q_b: Leaf  # [H·Dk, Rq]
    kv_a: Leaf  # [R, D]
    kv_a_norm: Leaf  # [R]
    w_uk: Leaf  # [H, Dk, R]
    w_uv: Leaf  # [H, Dv, R]
    o_proj: Leaf  # [D, H·Dv]
    indexer: Indexer


class MLP(NamedTuple):
    """Weights of a clamped SwiGLU: rows of ``gate_up`` are gate, then up."""

    gate_up: Leaf  # [2F, D]
    down: Leaf  # [D, F]


class MoE(NamedTuple):
    """Weights of a mixture of experts with a shared expert."""

    gate: Leaf  # [E, D]
    bias: Leaf  # float32 [E], added to the scores for choosing only
    gate_up: Leaf  # [E, 2F, D]
    down: Leaf  # [E, D, F]
    shared: MLP


class Layer(NamedTuple):
    """Weights of a decoder layer; the hyper-connections are None when the config turns them off (``mhc: false``)."""

    attn_hc: HyperConnection | None
    attn_norm: Leaf  # [D]
    attn: KDA | MLA
    ffn_hc: HyperConnection | None
    ffn_norm: Leaf  # [D]
    ffn: MLP | MoE


class MTP(NamedTuple):
    """Weights of a multi-token-prediction layer, a plain pre-norm block; it has the model's embedding and head."""

    enorm: Leaf  # [D]
    hnorm: Leaf  # [D]
    eh_proj: Leaf  # [D, 2D], columns embedding|hidden
    attn_norm: Leaf  # [D]
    attn: MLA
    ffn_norm: Leaf  # [D]
    ffn: MLP | MoE
    norm: Leaf  # [D]


class Params(NamedTuple):
    """Weights of the text model. ``layers[i]`` is None where a layer was not loaded; tied heads are the same tensor."""

    embed: Leaf  # [Vocab, D]
    layers: tuple[Layer | None, ...]
    norm: Leaf  # [D]
    lm_head: Leaf  # [Vocab, D]
    mtp: tuple[MTP, ...]


@attrs.frozen
class ParamInfo:
    """What one leaf must be.

    Args:
        shape: sizes in the order of ``axes``.
        dtype: ``torch.float32`` for the leaves the model breaks without it, else None; see `dtype_for`.
        axes: logical names of the dimensions, for a table that maps them to a device mesh.
        init: name of the initialiser, see `init_params`.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    axes: tuple[str, ...]
    init: str

    def dtype_for(self, dtype: torch.dtype) -> torch.dtype:
        """Return the leaf's dtype in a model of ``dtype``: that, but at least float32 where the leaf must be."""
        return dtype if self.dtype is None else torch.promote_types(self.dtype, dtype)


# Rounding one of these to bfloat16 changes the model visibly: the gates and the router work by small differences, and
# the epsilon of the hyper-connections is below the resolution of bfloat16.
_FLOAT32 = {
    (HyperConnection, "base"),
    (HyperConnection, "scale"),
    (KDA, "conv"),
    (KDA, "A_log"),
    (KDA, "dt_bias"),
    (MoE, "bias"),
}

# Leaves of each type: "axes, initialiser". The width of an MLP depends on where it stands, so its axes are filled in.
_LEAVES: dict[type, dict[str, str]] = {
    Params: {"embed": "vocab hidden, normal", "norm": "hidden, ones", "lm_head": "vocab hidden, normal"},
    Layer: {"attn_norm": "hidden, ones", "ffn_norm": "hidden, ones"},
    HyperConnection: {"fn": "hc_out hc_in, normal", "base": "hc_out, hc_base", "scale": "hc_parts, hc_scale"},
    KDA: {
        "qkv_proj": "kda_qkv hidden, normal",
        "conv": "kda_qkv conv_width, conv",
        "b_proj": "kda_heads hidden, normal",
        "f_a": "kda_rank hidden, normal",
        "f_b": "kda_channels kda_rank, normal",
        "g_a": "kda_rank hidden, normal",
        "g_b": "kda_channels kda_rank, normal",
        "A_log": "kda_heads, kda_A_log",
        "dt_bias": "kda_heads kda_head_dim, kda_dt_bias",
        "o_norm": "kda_head_dim, ones",
        "o_proj": "hidden kda_channels, normal",
    },
    MLA: {
        "q_a": "q_rank hidden, normal",
        "q_a_norm": "q_rank, ones",
        "q_b": "q_channels q_rank, normal",
        "kv_a": "kv_rank hidden, normal",
        "kv_a_norm": "kv_rank, ones",
        "w_uk": "heads qk_head_dim kv_rank, normal",
        "w_uv": "heads v_head_dim kv_rank, normal",
        "o_proj": "hidden v_channels, normal",
    },
    Indexer: {
        "wq_b": "index_channels q_rank, normal",
        "wk": "index_head_dim hidden, normal",
        "k_norm_weight": "index_head_dim, ones",
        "k_norm_bias": "index_head_dim, zeros",
        "weights_proj": "index_heads hidden, normal",
        "compress_gate": "index_head_dim hidden, normal",
        "compress_ape": "kpool index_head_dim, zeros",
    },
    MLP: {"gate_up": "{width}_gate_up hidden, normal", "down": "hidden {width}, normal"},
    MoE: {
        "gate": "experts hidden, normal",
        "bias": "experts, zeros",
        "gate_up": "experts expert_ffn_gate_up hidden, normal",
        "down": "experts hidden expert_ffn, normal",
    },
    MTP: {
        "enorm": "hidden, ones",
        "hnorm": "hidden, ones",
        "eh_proj": "hidden hidden_pair, normal",
        "attn_norm": "hidden, ones",
        "ffn_norm": "hidden, ones",
        "norm": "hidden, ones",
    },
}


def _axis_sizes(cfg: Config) -> dict[str, int]:
    kda_channels = cfg.linear_num_heads * cfg.linear_head_dim
    sizes = {
        "vocab": cfg.vocab_size,
        "hidden": cfg.hidden_size,
        "hidden_pair": 2 * cfg.hidden_size,
        "hc_out": (2 + cfg.hc_mult) * cfg.hc_mult,
        "hc_in": cfg.hc_mult * cfg.hidden_size,
        "hc_parts": 3,
        "kda_heads": cfg.linear_num_heads,
        "kda_head_dim": cfg.linear_head_dim,
        "kda_rank": cfg.linear_head_dim,
        "kda_channels": kda_channels,
        "kda_qkv": 3 * kda_channels,
        "conv_width": cfg.linear_conv_kernel_dim,
        "heads": cfg.num_attention_heads,
        "qk_head_dim": cfg.qk_nope_head_dim,
        "v_head_dim": cfg.v_head_dim,
        "q_channels": cfg.num_attention_heads * cfg.qk_nope_head_dim,
        "v_channels": cfg.num_attention_heads * cfg.v_head_dim,
        "q_rank": cfg.q_lora_rank,
        "kv_rank": cfg.kv_lora_rank,
        "index_heads": cfg.index_n_heads,
        "index_head_dim": cfg.index_head_dim,
        "index_channels": cfg.index_n_heads * cfg.index_head_dim,
        "kpool": cfg.index_kpool,
        "experts": cfg.n_routed_experts,
        "ffn": cfg.intermediate_size,
        "expert_ffn": cfg.moe_intermediate_size,
        "shared_ffn": cfg.moe_intermediate_size * cfg.n_shared_experts,
    }
    return sizes | {f"{width}_gate_up": 2 * sizes[width] for width in ("ffn", "expert_ffn", "shared_ffn")}


def abstract(cfg: Config) -> Params:
    """Describe the parameters of ``cfg``: the tree that loading and `init_params` return, with `ParamInfo` leaves.

    Nothing is allocated, so this answers for the released model too.

    Example:
        >>> tree = abstract(Config(num_hidden_layers=4, index_kpool=4))
        >>> tree.layers[3].attn.w_uk.shape, tree.layers[0].attn.A_log.dtype
        ((64, 256, 512), torch.float32)
        >>> [type(layer.attn).__name__ for layer in tree.layers]
        ['KDA', 'KDA', 'KDA', 'MLA']
    """
    sizes = _axis_sizes(cfg)

    def node(kind: type, width: str = "", **children: Any) -> Any:
        for field, text in _LEAVES[kind].items():
            axes_text, init = text.format(width=width).split(", ")
            axes = tuple(axes_text.split())
            dtype = torch.float32 if (kind, field) in _FLOAT32 else None
            children[field] = ParamInfo(tuple(sizes[axis] for axis in axes), dtype, axes, init)
        return kind(**children)

    def mla() -> MLA:
        return node(MLA, indexer=node(Indexer))

    def ffn(kind: str) -> MLP | MoE:
        return node(MoE, shared=node(MLP, "shared_ffn")) if kind == "sparse" else node(MLP, "ffn")

    def layer(index: int) -> Layer:
        attn = node(KDA) if cfg.layer_types[index] == "linear_attention" else mla()
        attn_hc, ffn_hc = (node(HyperConnection), node(HyperConnection)) if cfg.mhc else (None, None)
        return node(Layer, attn_hc=attn_hc, attn=attn, ffn_hc=ffn_hc, ffn=ffn(cfg.mlp_layer_types[index]))

    layers = tuple(layer(index) for index in range(cfg.num_hidden_layers))
    mtp = tuple(node(MTP, attn=mla(), ffn=ffn(cfg.mtp_mlp_type)) for _ in range(cfg.num_nextn_predict_layers))
    tree: Params = node(Params, layers=layers, mtp=mtp)
    return tree._replace(lm_head=tree.embed) if cfg.tie_word_embeddings else tree


def named_leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Leaf]]:
    """Yield ``(path, leaf)`` of a tree in order, with paths such as ``"layers.3.attn.indexer.wk"``; None is skipped.

    A tied head is yielded under both of its paths.

    Example:
        >>> [path for path, _ in named_leaves(MLP(gate_up=1, down=2))]
        ['gate_up', 'down']
    """
    if tree is None:
        return
    if isinstance(tree, tuple):
        names = getattr(tree, "_fields", range(len(tree)))
        for name, child in zip(names, tree, strict=True):
            yield from named_leaves(child, f"{prefix}.{name}" if prefix else str(name))
    else:
        yield prefix, tree


def map_leaves(fn: Callable[[Leaf], Leaf], tree: Tree) -> Tree:
    """Return the tree with ``fn`` applied to each leaf; one that stands in two places is mapped once and stays shared.

    Example:
        >>> map_leaves(lambda x: x + 1, MLP(gate_up=1, down=2))
        MLP(gate_up=2, down=3)
    """
    return _map(lambda _place, leaf: fn(leaf), tree)


def map_named_leaves(fn: Callable[[str, Leaf], Leaf], tree: Tree) -> Tree:
    """Return the tree with ``fn(path, leaf)`` in place of each leaf; paths are those of `named_leaves`.

    A leaf that stands in two places is mapped once, under its first path, and stays shared.

    Example:
        >>> map_named_leaves(lambda path, x: path, MLP(gate_up=1, down=2))
        MLP(gate_up='gate_up', down='down')
    """
    return _map(lambda place, leaf: fn(place.path, leaf), tree)


class _Place(NamedTuple):
    path: str
    kind: type
    field: str


def _map(fn: Callable[[_Place, Leaf], Leaf], tree: Tree) -> Tree:
    done: dict[int, Leaf] = {}

    def walk(node: Any, place: _Place) -> Any:
        if node is None:
            return None
        path = f"{place.path}." if place.path else ""
        if hasattr(node, "_fields"):
            return type(node)(*(walk(getattr(node, f), _Place(path + f, type(node), f)) for f in node._fields))
        if isinstance(node, tuple):
            return tuple(walk(child, place._replace(path=f"{path}{i}")) for i, child in enumerate(node))
        if id(node) not in done:
            done[id(node)] = fn(place, node)
        return done[id(node)]

    return walk(tree, _Place("", object, ""))


def cast(params: Tree, dtype: torch.dtype) -> Tree:
    """Convert a tree to ``dtype``; leaves that must be float32 (see `ParamInfo`) become float32, or float64 with it.

    Example:
        >>> moe = MoE(torch.zeros(2, 4), torch.zeros(2), torch.zeros(2, 6, 4), torch.zeros(2, 4, 3), MLP(None, None))
        >>> moe = cast(moe, torch.bfloat16)
        >>> moe.gate.dtype, moe.bias.dtype
        (torch.bfloat16, torch.float32)
    """

    def convert(place: _Place, x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.promote_types(torch.float32, dtype) if (place.kind, place.field) in _FLOAT32 else dtype)

    return _map(convert, params)


def _dtype(leaf: Leaf, dtype: torch.dtype) -> torch.dtype:
    return leaf.dtype_for(dtype) if isinstance(leaf, ParamInfo) else leaf.dtype


def _distinct(tree: Any) -> list[Leaf]:
    return list({id(leaf): leaf for _, leaf in named_leaves(tree)}.values())


def count(tree: Any) -> int:
    """Return the number of parameters of a tree, loaded or abstract; a tied head counts once.

    Example:
        >>> count(abstract(Config(index_kpool=4, num_nextn_predict_layers=1))) // 10**9
        320
    """
    return sum(math.prod(leaf.shape) for leaf in _distinct(tree))


def nbytes(tree: Any, dtype: torch.dtype = torch.bfloat16) -> int:
    """Return the bytes of a tree; ``dtype`` is that of an abstract tree's leaves, the float32 ones aside."""
    return sum(math.prod(leaf.shape) * _dtype(leaf, dtype).itemsize for leaf in _distinct(tree))


def init_params(cfg: Config, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Make random parameters for training or tests, on the CPU.

    Each leaf has its own random stream, named by the seed and its path, so a value does not depend on the other leaves,
    on the number of layers or on ``dtype`` (values are drawn in float32 and rounded once).

    ==============  ================================================================================================
    initialiser     value
    ==============  ================================================================================================
    normal          normal with standard deviation ``initializer_range``: projections, embedding, head, router
    ones, zeros     norms; biases and the pool's position term
    conv            uniform within ±1/√W, the usual initial value of a depthwise convolution of width W
    kda_A_log       0 with a bounded gate, else log of uniform(1, 16)
    kda_dt_bias     softplus⁻¹ of a step that is log-uniform in (0.001, 0.1): long memories, some longer than others
    hc_base         pre 1/N each (the sub-block reads the mean), post 1 (its result is added to every stream), comb 99 %
                    on the diagonal (streams keep their content): together an ordinary residual connection
    hc_scale        0.01, so that the part that depends on the token starts small
    ==============  ================================================================================================

    Returns:
        the tree of `abstract`; leaves have ``dtype``, the ones that must be float32 at least that.

    Example:
        >>> cfg = Config(vocab_size=8, hidden_size=16, num_hidden_layers=1, linear_num_heads=2, linear_head_dim=4,
        ...              intermediate_size=32)
        >>> params = init_params(cfg, dtype=torch.bfloat16)
        >>> params.layers[0].attn.qkv_proj.shape, params.layers[0].attn.qkv_proj.dtype
        (torch.Size([24, 16]), torch.bfloat16)
    """

    def make(path: str, info: ParamInfo) -> torch.Tensor:
        digest = hashlib.sha256(f"{seed}/{path}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        value = torch.empty(info.shape, dtype=torch.float32)
        _INITIALISERS[info.init](value, generator, cfg)
        return value.to(info.dtype_for(dtype))

    return map_named_leaves(make, abstract(cfg))


def _conv(x: torch.Tensor, generator: torch.Generator, cfg: Config) -> None:
    bound = x.shape[-1] ** -0.5
    x.uniform_(-bound, bound, generator=generator)


def _kda_A_log(x: torch.Tensor, generator: torch.Generator, cfg: Config) -> None:
    # The bounded gate multiplies dt_bias by exp(A_log) inside the sigmoid: a factor of 16 would saturate most heads.
    if cfg.linear_lower_bound is not None:
        x.zero_()
    else:
        x.uniform_(1.0, 16.0, generator=generator).log_()


def _kda_dt_bias(x: torch.Tensor, generator: torch.Generator, cfg: Config) -> None:
    step = x.uniform_(math.log(1e-3), math.log(1e-1), generator=generator).exp()
    x.copy_(step + torch.log(-torch.expm1(-step)))


def _hc_base(x: torch.Tensor, generator: torch.Generator, cfg: Config) -> None:
    streams = cfg.hc_mult
    x.zero_()
    if streams > 1:
        x[:streams] = math.log(1 / (streams - 1))  # sigmoid of it is 1/N
        x[2 * streams :].view(streams, streams).fill_diagonal_(math.log(99 * (streams - 1)))


_INITIALISERS: dict[str, Callable[[torch.Tensor, torch.Generator, Config], object]] = {
    "normal": lambda x, generator, cfg: x.normal_(0.0, cfg.initializer_range, generator=generator),
    "ones": lambda x, generator, cfg: x.fill_(1.0),
    "zeros": lambda x, generator, cfg: x.zero_(),
    "conv": _conv,
    "kda_A_log": _kda_A_log,
    "kda_dt_bias": _kda_dt_bias,
    "hc_base": _hc_base,
    "hc_scale": lambda x, generator, cfg: x.fill_(0.01),
}
