"""The loss, and the kernels it plugs into the library's registry to see what the model computes on the way.

Selecting tokens has no gradient, so the indexer learns from the attention it selects for: its scores per pool should
rank pools as the attention's probability mass does (as DeepSeek-V3.2 trains its indexer). The ``training`` backend of
``kpool_select`` keeps the differentiable scores, that of ``mla_sparse`` computes masked dense attention (fast at
training length) and compares. The one of ``moe_route`` counts how often each expert is chosen, which moves the
correction bias. The hyper-connections are compiled: many small element-wise steps are one pass over memory then, five
times faster here than the reference.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import NamedTuple

import torch
import torch.nn.functional as F

import glm5fn
from glm5fn.blocks import Rows, mtp_block
from glm5fn.cache import MLACache, init_cache
from glm5fn.kernels.reference import indexer as reference_indexer
from glm5fn.kernels.reference import mhc as reference_mhc
from glm5fn.kernels.reference import moe as reference_moe
from glm5fn.model import hidden_states

__all__ = ["Losses", "Observer", "losses"]


COMPARED_ROWS = 2
"""Rows of a batch on which the indexer is compared with the attention: enough to learn from."""


class Losses(NamedTuple):
    """Means over the batch, in nats (``indexer``: KL divergence per layer and token)."""

    main: torch.Tensor
    mtp: torch.Tensor
    indexer: torch.Tensor


class Observer:
    """The ``training`` backend.

    ``dense=True`` attends to every token and only trains the indexer; False attends to its selection.
    """

    def __init__(self, *, dense: bool):
        self.dense = dense
        self.divergence: list[torch.Tensor] = []
        self.loads: list[torch.Tensor] = []
        self._scores: torch.Tensor | None = None
        self._kpool = 1

    def kpool_select(self, q, weights, pooled, positions, *, topk, kpool, tail=True):
        few = slice(0, COMPARED_ROWS)
        scale = (q.shape[2] * q.shape[3]) ** -0.5
        scores = torch.einsum("btji,bpi->btjp", q[few].float(), pooled[few].float()).relu()
        scores = torch.einsum("btjp,btj->btp", scores, weights[few].float()) * scale
        hidden = torch.arange(pooled.shape[1]) >= ((positions[few] + 1) // kpool)[..., None]
        self._scores = scores.masked_fill(hidden, -torch.inf)
        self._kpool = kpool
        with torch.no_grad():
            return reference_indexer.kpool_select(q, weights, pooled, positions, topk=topk, kpool=kpool, tail=tail)

    def mla_sparse(self, q, latent, w_uk, w_uv, indices, *, scale=None):
        T, S = q.shape[1], latent.shape[1]
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        key = torch.einsum("bsr,hkr->bhsk", latent, w_uk)
        value = torch.einsum("bsr,hvr->bhsv", latent, w_uv)
        allowed = torch.ones(T, S, dtype=torch.bool).tril().expand(q.shape[0], T, S)
        if not self.dense:
            chosen = torch.zeros(*indices.shape[:2], S + 1, dtype=torch.bool)
            chosen = chosen.scatter(-1, torch.where(indices < 0, S, indices).long(), True)[..., :S]
            allowed = chosen
        mask = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)[:, None]
        out = F.scaled_dot_product_attention(q.transpose(1, 2), key, value, attn_mask=mask, scale=scale).transpose(1, 2)
        with torch.no_grad():
            few = slice(0, COMPARED_ROWS)
            scores = torch.einsum("bthk,bhsk->bhts", q[few], key[few]).float()
            probs = (scores * scale + mask[few].float()).softmax(-1).mean(1)
        self._compare(probs)
        return out

    def _compare(self, probs: torch.Tensor) -> None:
        P = probs.shape[-1] // self._kpool
        assert self._scores is not None, "kpool_select runs before mla_sparse"
        scores = self._scores[..., :P]  # a last, incomplete pool is never visible
        visible = scores > -torch.inf
        target = probs[..., : P * self._kpool].unflatten(-1, (P, self._kpool)).sum(-1).masked_fill(~visible, 0)
        mass = target.sum(-1, keepdim=True)
        target = target / mass.clamp(min=1e-6)
        log_p = torch.where(visible, scores, -1e4).log_softmax(-1)
        divergence = (torch.special.xlogy(target, target) - target * log_p).sum(-1)
        self.divergence.append(divergence[mass[..., 0] > 1e-6].mean())

    @staticmethod
    def mhc_pre_norm(streams, fn, base, scale, norm_weight, *, iters=20, hc_eps=1e-6, norm_eps=1e-5):
        return _compiled_pre(streams, fn, base, scale, norm_weight, iters=iters, hc_eps=hc_eps, norm_eps=norm_eps)

    @staticmethod
    def mhc_post(y, streams, post, comb):
        return _compiled_post(y, streams, post, comb)

    def moe_route(self, x, w_gate, bias, *, top_k, n_group, topk_group, norm_topk, scale):
        result = reference_moe.moe_route(
            x, w_gate, bias, top_k=top_k, n_group=n_group, topk_group=topk_group, norm_topk=norm_topk, scale=scale
        )
        self.loads.append(torch.bincount(result[1].flatten(), minlength=w_gate.shape[0]))
        return result


_compiled_pre = torch.compile(reference_mhc.mhc_pre_norm)


@torch.compile
def _compiled_post(y: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    mixed = (comb[..., None] * streams.float()[..., None, :]).sum(-3)
    return (post[..., None] * y.float()[..., None, :] + mixed).to(streams.dtype)


PLUGGED = ("kpool_select", "mla_sparse", "moe_route", "mhc_pre_norm", "mhc_post")


def losses(params: glm5fn.Params, cfg: glm5fn.Config, tokens: torch.Tensor, observer: Observer) -> Losses:
    """The losses of ``tokens [B, T]``: next token, the one after (MTP), the indexer's divergence from the attention."""
    with ExitStack() as stack:
        for op in PLUGGED:
            stack.enter_context(glm5fn.register(op, "training", getattr(observer, op)))
        stack.enter_context(glm5fn.use_backend(**dict.fromkeys(PLUGGED, "training")))
        B, T = tokens.shape
        inputs, start = tokens[:, :-1], torch.zeros(B, dtype=torch.int32)
        hidden, _ = hidden_states(params, cfg, inputs)
        main = _cross_entropy(params, hidden, tokens[:, 1:])
        following = F.embedding(tokens[:, 1:-1], params.embed)
        cache = init_cache(cfg, B, T - 2, dtype=params.embed.dtype).layers[cfg.mla_layers[0]]
        assert isinstance(cache, MLACache)
        drafted, _ = mtp_block(params.mtp[0], cfg, hidden[:, :-1], following, cache, Rows(start, longest=T - 2))
        mtp = _cross_entropy(params, drafted, tokens[:, 2:])
    return Losses(main, mtp, torch.stack(observer.divergence).mean())


def _cross_entropy(params: glm5fn.Params, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, params.lm_head).float().flatten(0, 1), targets.flatten())
