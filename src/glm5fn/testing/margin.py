"""How close to a tie a model's choices are: which pools a query attends to, which experts a token goes to.

Rounding may turn a near tie into another choice, and then two right implementations differ by far more than rounding. A
test that compares whole models shows with this that it has no near ties.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import attrs
import torch

from glm5fn import blocks

__all__ = ["Margin", "expert_margins", "pool_margins", "watch_choices"]


@attrs.define
class Margin:
    """What :func:`watch_choices` has seen.

    Args:
        pools: smallest relative distance between the last pool chosen and the first one left out.
        experts: smallest such distance of experts, in units of the score (a sigmoid).
        left_out: (query, token) pairs where the query could see the token but did not select it.
    """

    pools: float = float("inf")
    experts: float = float("inf")
    left_out: int = 0

    def assert_no_near_tie(self, least: float = 2e-5) -> None:
        """Assert that every choice was clear; the default is ten times what float32 loses in models of a few layers."""
        smallest = min(self.pools, self.experts)
        assert smallest >= least, f"a choice is only {smallest:.1e} from a tie: use other weights or another prompt"


def pool_margins(
    q: torch.Tensor, weights: torch.Tensor, pooled: torch.Tensor, positions: torch.Tensor, *, topk: int, kpool: int
) -> torch.Tensor:
    """Distance ``[B, T]`` between the last pool chosen and the first one left out, over the largest score of the query;
    infinite where every visible pool is chosen. Arguments as :func:`glm5fn.kpool_select`."""
    J, I = q.shape[2:]
    dots = torch.einsum("btji,bpi->btjp", q.double(), pooled.double()).relu()
    scores = torch.einsum("btjp,btj->btp", dots, weights.double()) * (J * I) ** -0.5
    hidden = torch.arange(pooled.shape[1]) >= (positions[..., None] + 1) // kpool
    return _gap(scores.masked_fill(hidden, -torch.inf), topk // kpool, relative=True)


def expert_margins(
    x: torch.Tensor, w_gate: torch.Tensor, bias: torch.Tensor, *, top_k: int, n_group: int = 1, topk_group: int = 1
) -> torch.Tensor:
    """Distance ``[B, T]`` between the last expert, or group, chosen and the first one left out. Arguments as
    :func:`glm5fn.moe_route`."""
    scores = torch.nn.functional.linear(x.double(), w_gate.double()).sigmoid() + bias.double()
    groups = scores.unflatten(-1, (n_group, -1))
    totals = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1)
    dropped = totals < totals.topk(topk_group, dim=-1).values[..., -1:]
    kept = groups.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    return torch.minimum(_gap(totals, topk_group, relative=False), _gap(kept, top_k, relative=False))


def _gap(scores: torch.Tensor, k: int, *, relative: bool) -> torch.Tensor:
    if scores.shape[-1] <= k:
        return scores.new_full(scores.shape[:-1], torch.inf)
    best = scores.sort(dim=-1, descending=True).values
    gap = torch.where(best[..., k].isinf(), torch.inf, best[..., k - 1] - best[..., k])
    return gap / scores.masked_fill(scores.isinf(), 0).abs().amax(-1) if relative else gap


@contextmanager
def watch_choices() -> Iterator[Margin]:
    """Inside, record how close the choices of models that run are to a tie.

    Example:
        >>> import glm5fn
        >>> from glm5fn.testing.inputs import model
        >>> cfg = model.config("M")
        >>> tokens, = model.prompts(cfg, 20)
        >>> with watch_choices() as margin:
        ...     _ = glm5fn.forward(model.params(cfg), cfg, tokens)
        >>> margin.pools > 1e-6, margin.left_out > 0
        (True, True)
    """
    margin = Margin()
    select, route = blocks.kpool_select, blocks.moe_route

    def kpool_select(
        q: torch.Tensor, weights: torch.Tensor, pooled: torch.Tensor, positions: torch.Tensor, **options: Any
    ):
        chosen = select(q, weights, pooled, positions, **options)
        gaps = pool_margins(q, weights, pooled, positions, topk=options["topk"], kpool=options["kpool"])
        margin.pools = min(margin.pools, float(gaps.min()))
        margin.left_out += int((positions + 1 - (chosen >= 0).sum(-1)).clamp(min=0).sum())
        return chosen

    def moe_route(x: torch.Tensor, w_gate: torch.Tensor, bias: torch.Tensor, **options: Any):
        names = ("top_k", "n_group", "topk_group")
        gaps = expert_margins(x, w_gate, bias, **{name: options[name] for name in names})
        margin.experts = min(margin.experts, float(gaps.min()))
        return route(x, w_gate, bias, **options)

    with mock.patch.object(blocks, "kpool_select", kpool_select), mock.patch.object(blocks, "moe_route", moe_route):
        yield margin
