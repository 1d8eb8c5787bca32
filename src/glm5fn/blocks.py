"""The blocks of a layer: ``(params, cfg, x, cache, rows) -> (y, cache)``.

A block sees its tokens as ``[B, T, D]``, row b continuing the sequence of cache row b, or packed as ``[1, T, D]`` with
the sequences one after another. :class:`Rows` says which.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch.utils import _pytree as pytree

from glm5fn.cache import IndexCache, KDACache, LayerCache, MLACache
from glm5fn.config import Config
from glm5fn.dims import compute_dtype
from glm5fn.donation import check_state, settle
from glm5fn.ops.conv import causal_conv1d
from glm5fn.ops.indexer import kpool_compress, kpool_select
from glm5fn.ops.kda import kda_chunk, kda_gate, kda_recurrent
from glm5fn.ops.mhc import mhc_post, mhc_pre_norm
from glm5fn.ops.mla import mla_decode, mla_prefill, mla_sparse
from glm5fn.ops.moe import clamped_swiglu, moe_experts, moe_route
from glm5fn.ops.norm import gated_rms_norm, l2_norm, rms_norm
from glm5fn.params import KDA, MLA, MLP, MTP, HyperConnection, Indexer, Layer, MoE

__all__ = [
    "IndexInputs", "Rows", "autocast_off", "decoder_layer", "index_inputs",
    "kda_block", "mla_block", "mlp_block", "moe_block", "mtp_block", "positions",
]  # fmt: skip


class Rows(NamedTuple):
    """Where the tokens of one call sit in their sequences.

    Attributes:
        start: int32 ``[N]`` tokens that each sequence already holds.
        counts: None when every sequence has T tokens here; for packed calls the number of tokens of each sequence.
        cu_seqlens: int32 ``[N+1]`` offsets of the packed sequences; None when not packed.
        longest: an upper bound, known on the host, of any sequence's length after this call; None means only the
            cache's capacity is known. It decides whether attention is dense (it is when no sequence can exceed
            ``index_topk``).
    """

    start: torch.Tensor
    counts: tuple[int, ...] | None = None
    cu_seqlens: torch.Tensor | None = None
    longest: int | None = None


def autocast_off(x: torch.Tensor) -> AbstractContextManager:
    """A context in which autocast does not change the dtypes of operations on the device of ``x``.

    Every result has the dtype that the types of parameters and caches say; a cache in another one would not fit.
    """
    device = x.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def positions(rows: Rows, tokens: int) -> torch.Tensor:
    """The position in its sequence of each token of a call: ``[N, tokens]``, or ``[1, tokens]`` when packed."""
    offset = torch.arange(tokens, device=rows.start.device, dtype=torch.int32)
    if rows.cu_seqlens is None:
        return rows.start[:, None] + offset
    sequence = torch.searchsorted(rows.cu_seqlens[1:], offset, right=True)
    return (rows.start[sequence] + offset - rows.cu_seqlens[sequence])[None]


# ------------------------------------------------------------------------------------------------------------ attention


def kda_block(
    p: KDA, cfg: Config, x: torch.Tensor, cache: KDACache, rows: Rows, *, donate: bool = False
) -> tuple[torch.Tensor, KDACache]:
    """Kimi Delta Attention: causal convolution, normalised q and k, gated delta rule, gated output norm.

    Args:
        p: the layer's parameters.
        cfg: the model's configuration.
        x: ``[B, T, D]`` normalised input.
        cache: this layer's cache.
        rows: where the tokens sit; only ``cu_seqlens`` matters here.
        donate: the old cache's memory may be reused.

    Returns:
        ``[B, T, D]`` and the next cache.

    Source: Kimi Linear (arXiv:2510.26692), section 3; the bounded gate is GLM-5.3-Flash's.
    """
    H = cfg.linear_num_heads
    speculative = cache.state.dim() == 5
    conv = causal_conv1d(F.linear(x, p.qkv_proj), p.conv, None, cache.conv, cu_seqlens=rows.cu_seqlens, donate=donate)
    q, k, v = rearrange(conv.out, "b t (n h k) -> n b t h k", n=3, h=H)
    q, k = l2_norm(q), l2_norm(k)
    f = rearrange(F.linear(F.linear(x, p.f_a), p.f_b), "b t (h k) -> b t h k", h=H)
    g = kda_gate(f, p.A_log, p.dt_bias, lower_bound=cfg.linear_lower_bound)
    beta = F.linear(x, p.b_proj).to(compute_dtype(x.dtype)).sigmoid()

    attend = kda_recurrent if x.shape[1] == 1 else kda_chunk
    state = cache.state[:, 0] if speculative else cache.state
    out, new_state = attend(q, k, v, g, beta, state, cu_seqlens=rows.cu_seqlens, donate=donate and not speculative)
    if speculative:
        states = cache.state if donate else cache.state.clone()
        states[:, 0] = new_state
        new_state = states

    z = rearrange(F.linear(F.linear(x, p.g_a), p.g_b), "b t (h v) -> b t h v", h=H)
    y = gated_rms_norm(out, z, p.o_norm, eps=cfg.rms_norm_eps)
    return F.linear(rearrange(y, "b t h v -> b t (h v)"), p.o_proj), KDACache(conv.state, new_state)


class IndexInputs(NamedTuple):
    """What the indexer reads of each token: ``query [B,T,J,I]``, ``key`` and ``gate [B,T,I]``, ``weights [B,T,J]``."""

    query: torch.Tensor
    key: torch.Tensor
    gate: torch.Tensor
    weights: torch.Tensor


def index_inputs(p: Indexer, cfg: Config, x: torch.Tensor, q_latent: torch.Tensor) -> IndexInputs:
    """The indexer's projections of ``x [B,T,D]`` and of the normalised query latent ``q_latent [B,T,Rq]``."""
    dtype = compute_dtype(x.dtype)
    key = F.layer_norm(
        F.linear(x, p.wk).to(dtype), (cfg.index_head_dim,), p.k_norm_weight.to(dtype), p.k_norm_bias.to(dtype), eps=1e-6
    )
    return IndexInputs(
        query=rearrange(F.linear(q_latent, p.wq_b), "b t (j i) -> b t j i", j=cfg.index_n_heads),
        key=key.to(x.dtype),
        gate=F.linear(x, p.compress_gate),
        weights=F.linear(x.to(dtype), p.weights_proj.to(dtype)),
    )


class _MLAInputs(NamedTuple):
    q: torch.Tensor
    latent: torch.Tensor
    index: IndexInputs  # type: ignore[assignment]


def mla_block(
    p: MLA, cfg: Config, x: torch.Tensor, cache: MLACache, rows: Rows, *, donate: bool = False
) -> tuple[torch.Tensor, MLACache]:
    """Multi-head latent attention without positions over the tokens that the kpool indexer selects.

    While no sequence can be longer than ``index_topk``, every earlier token is selected, so attention is dense.

    Args and returns as :func:`kda_block`.

    Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1; DeepSeek-V3.2 (arXiv:2512.02556), section 2.1.
    """
    old = cache.latent
    check_state("mla_block", "cache.latent", old, donate, x)
    q_latent = rms_norm(F.linear(x, p.q_a), p.q_a_norm, eps=cfg.rms_norm_eps)
    tokens = _MLAInputs(
        q=rearrange(F.linear(q_latent, p.q_b), "b t (h k) -> b t h k", h=cfg.num_attention_heads),
        latent=rms_norm(F.linear(x, p.kv_a), p.kv_a_norm, eps=cfg.rms_norm_eps),
        index=index_inputs(p.indexer, cfg, x, q_latent),
    )
    if rows.counts is None:
        out, cache = _attend(p, cfg, tokens, cache, rows.start, rows.longest, donate)
    else:
        outs, caches, begin = [], [], 0
        for n, count in enumerate(rows.counts):
            part = pytree.tree_map(lambda t, a=begin, b=begin + count: t[:, a:b], tokens)
            one = pytree.tree_map(lambda t, n=n: t[n : n + 1], cache)
            out, one = _attend(p, cfg, part, one, rows.start[n : n + 1], rows.longest, donate)
            outs.append(out)
            caches.append(one)
            begin += count
        out = torch.cat(outs, dim=1)
        if not donate:
            cache = pytree.tree_map(lambda *parts: torch.cat(parts), *caches)
    cache = cache._replace(latent=settle("mla_block", old, cache.latent, donate))
    return F.linear(rearrange(out, "b t h v -> b t (h v)"), p.o_proj), cache


def _attend(
    p: MLA, cfg: Config, tokens: _MLAInputs, cache: MLACache, start: torch.Tensor, longest: int | None, donate: bool
) -> tuple[torch.Tensor, MLACache]:
    B, T = tokens.q.shape[:2]
    if T == 0:
        same = cache if donate else pytree.tree_map(torch.clone, cache)
        return tokens.q.new_zeros(B, 0, cfg.num_attention_heads, cfg.v_head_dim), same
    S = cache.latent.shape[1]
    # Callers check the capacity; the clamps only keep a captured graph, which cannot raise, inside the buffers.
    position = (start[:, None] + torch.arange(T, device=start.device, dtype=start.dtype)).clamp(max=S - 1)
    lengths = (start + T).clamp(max=S)
    latent = _put(cache.latent, position, tokens.latent, donate)
    index = _update_index(cache.index, tokens.index, p.indexer.compress_ape, start, donate)

    bound = S if longest is None else min(longest, S)
    if bound <= cfg.index_topk and cfg.index_kpool_always_select_tail:
        attend = mla_decode if T == 1 else mla_prefill
        out = attend(tokens.q, latent[:, :bound], p.w_uk, p.w_uv, lengths=lengths)
    else:
        pooled = index.pooled[:, : -(-bound // cfg.index_kpool)]
        chosen = kpool_select(
            tokens.index.query, tokens.index.weights, pooled, position,
            topk=cfg.index_topk, kpool=cfg.index_kpool, tail=cfg.index_kpool_always_select_tail,
        )  # fmt: skip
        out = mla_sparse(tokens.q, latent[:, :bound], p.w_uk, p.w_uv, chosen)
    return out, MLACache(latent, index)


def _put(buffer: torch.Tensor, position: torch.Tensor, values: torch.Tensor, donate: bool) -> torch.Tensor:
    """``buffer [B, S, ...]`` with ``values [B, T, ...]`` at rows ``position [B, T]``."""
    row = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
    put = buffer.index_put_ if donate else buffer.index_put
    return put((row, position.long()), values.to(buffer.dtype))


def _update_index(
    index: IndexCache, tokens: IndexInputs, ape: torch.Tensor, start: torch.Tensor, donate: bool
) -> IndexCache:
    """Compress the pools that these tokens complete and remember the latest tokens; a call may end inside a pool."""
    B, T, _ = tokens.key.shape
    kpool, ring = ape.shape[0], index.tail.shape[2]
    start = start.long()[:, None]
    fresh = torch.stack([tokens.key, tokens.gate], dim=1).to(index.tail.dtype)

    # Pools first .. first+M-1 may complete here. Members before ``start`` come from the ring, the others are fresh.
    M = -(-T // kpool)
    first = start // kpool
    member = first * kpool + torch.arange(M * kpool, device=start.device)
    source = torch.where(member < start, member % ring, ring + (member - start).clamp(0, T - 1))
    both = torch.cat([index.tail, fresh], dim=2)
    key, gate = _take(both, source).unflatten(2, (M, kpool)).unbind(1)
    pool = first + torch.arange(M, device=start.device)
    complete = (pool + 1) * kpool <= start + T
    slot = pool.clamp(max=index.pooled.shape[1] - 1)  # as the clamps of the caller
    row = torch.arange(B, device=start.device)[:, None]
    values = kpool_compress(key, gate, ape).to(index.pooled.dtype)
    values = torch.where(complete[..., None], values, index.pooled[row, slot])

    # Ring slot s now holds the latest position congruent to s; where that lies before this call it keeps what it had.
    last = start + T - 1
    latest = last - (last - torch.arange(ring, device=start.device)) % ring
    newer = _take(fresh, (latest - start).clamp(min=0))
    tail = torch.where((latest >= start)[:, None, :, None], newer, index.tail)
    return IndexCache(pooled=_put(index.pooled, slot, values, donate), tail=index.tail.copy_(tail) if donate else tail)


def _take(x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """``x [B, 2, T, I]`` at ``position [B, M]`` along T."""
    return x.gather(2, position[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


# --------------------------------------------------------------------------------------------------------- feed-forward


def mlp_block(p: MLP, cfg: Config, x: torch.Tensor) -> torch.Tensor:
    """Clamped SwiGLU feed-forward on ``x [B, T, D]``: gate and up in one projection, clamped before SiLU."""
    return F.linear(clamped_swiglu(F.linear(x, p.gate_up), limit=cfg.swiglu_limit), p.down)


def moe_block(p: MoE, cfg: Config, x: torch.Tensor) -> torch.Tensor:
    """Mixture of experts on ``x [B, T, D]``: the routed experts' weighted sum plus the shared expert, unweighted."""
    weights, ids = moe_route(
        x, p.gate, p.bias,
        top_k=cfg.num_experts_per_tok, n_group=cfg.n_group, topk_group=cfg.topk_group,
        norm_topk=cfg.norm_topk_prob, scale=cfg.routed_scaling_factor,
    )  # fmt: skip
    return moe_experts(x, ids, weights, p.gate_up, p.down, limit=cfg.swiglu_limit) + mlp_block(p.shared, cfg, x)


# --------------------------------------------------------------------------------------------------------------- layers


def decoder_layer(
    p: Layer, cfg: Config, streams: torch.Tensor, cache: LayerCache, rows: Rows, *, donate: bool = False
) -> tuple[torch.Tensor, LayerCache]:
    """One layer: attention and feed-forward, each inside its hyper-connection.

    Args:
        p: the layer's parameters.
        cfg: the model's configuration.
        streams: ``[B, T, N, D]`` residual streams, or ``[B, T, D]`` for a model without hyper-connections.
        cache: this layer's cache.
        rows: where the tokens sit.
        donate: the old cache's memory may be reused.

    Returns:
        The next streams and the next cache.
    """

    def attention(x: torch.Tensor) -> tuple[torch.Tensor, LayerCache]:
        if isinstance(p.attn, KDA):
            assert isinstance(cache, KDACache)
            return kda_block(p.attn, cfg, x, cache, rows, donate=donate)
        assert isinstance(cache, MLACache)
        return mla_block(p.attn, cfg, x, cache, rows, donate=donate)

    streams, new_cache = _residual(p.attn_hc, p.attn_norm, cfg, streams, attention)
    streams, _ = _residual(p.ffn_hc, p.ffn_norm, cfg, streams, lambda x: (feed_forward(p.ffn, cfg, x), None))
    return streams, new_cache


def feed_forward(p: MLP | MoE, cfg: Config, x: torch.Tensor) -> torch.Tensor:
    """The dense or the sparse feed-forward block, whichever ``p`` is for."""
    return moe_block(p, cfg, x) if isinstance(p, MoE) else mlp_block(p, cfg, x)


def _residual(
    hc: HyperConnection | None, norm: torch.Tensor, cfg: Config, streams: torch.Tensor, block: Callable
) -> tuple[torch.Tensor, LayerCache]:
    if hc is None:
        y, cache = block(rms_norm(streams, norm, eps=cfg.rms_norm_eps))
        return streams + y, cache
    x, post, comb = mhc_pre_norm(
        streams, hc.fn, hc.base, hc.scale, norm,
        iters=cfg.hc_sinkhorn_iters, hc_eps=cfg.hc_eps, norm_eps=cfg.rms_norm_eps,
    )  # fmt: skip
    y, cache = block(x)
    return mhc_post(y, streams, post, comb), cache


def mtp_block(
    p: MTP,
    cfg: Config,
    hidden: torch.Tensor,
    embedding: torch.Tensor,
    cache: MLACache,
    rows: Rows,
    *,
    zero_first: bool = True,
    donate: bool = False,
) -> tuple[torch.Tensor, MLACache]:
    """The multi-token-prediction layer: from a token's final hidden state and the *next* token, predict the one after.

    Plain pre-norm residuals, no hyper-connections.

    Args:
        p: the MTP layer's parameters.
        cfg: the model's configuration.
        hidden: ``[B, T, D]`` the main model's output after its final norm, or this block's own output for the draft
            after.
        embedding: ``[B, T, D]`` embeddings of the tokens that follow each position.
        cache: this layer's own MLA cache.
        rows: where the tokens sit.
        zero_first: zero the embedding at position 0, as the released checkpoint is served.
        donate: the old cache's memory may be reused.

    Returns:
        ``[B, T, D]`` after the layer's own final norm (the shared ``lm_head`` turns it into logits), and the next
        cache.

    Source: DeepSeek-V3 (arXiv:2412.19437), section 2.2.
    """
    eps = cfg.rms_norm_eps
    if zero_first:
        embedding = embedding.masked_fill((positions(rows, embedding.shape[1]) == 0)[..., None], 0)
    with autocast_off(hidden):
        z = torch.cat([rms_norm(embedding, p.enorm, eps=eps), rms_norm(hidden, p.hnorm, eps=eps)], dim=-1)
        x = F.linear(z, p.eh_proj)
        attn, cache = mla_block(p.attn, cfg, rms_norm(x, p.attn_norm, eps=eps), cache, rows, donate=donate)
        x = x + attn
        x = x + feed_forward(p.ffn, cfg, rms_norm(x, p.ffn_norm, eps=eps))
        return rms_norm(x, p.norm, eps=eps), cache
