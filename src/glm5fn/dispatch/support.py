"""Which backend can run which operation of the released model, and why the others cannot."""

from __future__ import annotations

import html
import re
from typing import Any

import attrs
import torch

from glm5fn.dispatch import registry
from glm5fn.dispatch.choice import Choice
from glm5fn.dispatch.choosing import local
from glm5fn.dispatch.engine import explain
from glm5fn.dispatch.hardware import Hardware
from glm5fn.dispatch.registry import AUTO

__all__ = ["SupportTable", "released_call", "support_table"]

# One GLM-5.3-Flash layer at a prompt of 4096 tokens, or, for the operations of the decode loop, at 8 sequences.
# Letters as in glm5fn.dims; C is the convolution's channels (q, k and v side by side), J the indexer's heads, top the
# tokens it selects, M = (2+N)·N.
_PROMPT = {
    "B": 1, "T": 4096, "H": 64, "K": 128, "V": 128, "D": 4096, "C": 3 * 64 * 128, "W": 4, "W-1": 3, "S": 8192, "R": 512,
    "Dk": 256, "Dv": 256, "I": 128, "J": 32, "P": 2048, "kpool": 4, "top": 2051, "N": 4, "M": 24, "ND": 16384, "3": 3,
    "E": 288, "F": 2048, "2F": 4096, "top_k": 8, "slots": 2,
}  # fmt: skip
_DECODE = _PROMPT | {"B": 8, "T": 1}
_VERIFY = _PROMPT | {"B": 8, "T": 2}

_half, _wide, _int = torch.bfloat16, torch.float32, torch.int32
_TOKENS = {"q": "B T H K", "k": "B T H K", "v": "B T H V", "g": ("B T H K", _wide), "beta": ("B T H", _wide)}
_STATE = {"state": ("B H V K", _wide)}
_MLA = {"q": "B T H Dk", "latent": "B S R", "w_uk": "H Dk R", "w_uv": "H Dv R"}
_MHC = {"streams": "B T N D", "fn": ("M ND", _wide), "base": ("M", _wide), "scale": ("3", _wide)}

_CALLS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "rms_norm": (_PROMPT, {"x": "B T D", "weight": "D", "eps": 1e-5}),
    "gated_rms_norm": (_PROMPT, {"x": "B T H V", "gate": "B T H V", "weight": "V", "eps": 1e-5}),
    "l2_norm": (_PROMPT, {"x": "B T H K"}),
    "causal_conv1d": (_PROMPT, {"x": "B T C", "weight": "C W", "state": "B W-1 C"}),
    "causal_conv1d_update": (_DECODE, {"x": "B T C", "weight": "C W", "bias": None, "state": "B W-1 C"}),
    "kda_gate": (_PROMPT, {"f": "B T H K", "A_log": ("H", _wide), "dt_bias": ("H K", _wide)}),
    "kda_chunk": (_PROMPT, _TOKENS | _STATE),
    "kda_recurrent": (_DECODE, _TOKENS | _STATE),
    "kda_verify": (_VERIFY, _TOKENS | {"states": ("B slots H V K", _wide), "num_accepted": ("B", _int)}),
    "mla_prefill": (_PROMPT, _MLA),
    "mla_decode": (_DECODE, _MLA),
    "mla_sparse": (_DECODE, _MLA | {"indices": ("B T top", _int)}),
    "kpool_compress": (_PROMPT, {"k": "B P kpool I", "gate": "B P kpool I", "ape": ("kpool I", _wide)}),
    "kpool_select": (
        _DECODE,
        {
            "q": "B T J I",
            "weights": ("B T J", _wide),
            "pooled": "B P I",
            "positions": ("B T", _int),
            "topk": 2048,
            "kpool": 4,
        },
    ),
    "hadamard_quant_fp8": (_PROMPT, {"x": "B T J I"}),
    "mhc_pre": (_PROMPT, _MHC),
    "mhc_pre_norm": (_PROMPT, _MHC | {"norm_weight": "D"}),
    "mhc_post": (_PROMPT, {"y": "B T D", "streams": "B T N D", "post": ("B T N", _wide), "comb": ("B T N N", _wide)}),
    "moe_route": (
        _PROMPT,
        {"x": "B T D", "w_gate": ("E D", _wide), "bias": ("E", _wide)}
        | {"top_k": 8, "n_group": 1, "topk_group": 1, "norm_topk": True, "scale": 2.5},
    ),
    "moe_experts": (
        _PROMPT,
        {"x": "B T D", "ids": ("B T top_k", _int), "weights": ("B T top_k", _wide)}
        | {"w_gate_up": "E 2F D", "w_down": "E D F", "limit": 10.0},
    ),
    "clamped_swiglu": (_PROMPT, {"gate_up": "B T 2F", "limit": 10.0}),
}
"""By operation: sizes, and arguments. Text is the shape of a bfloat16 tensor, a pair is shape and dtype."""


def released_call(op: str) -> dict[str, Any]:
    """Arguments of ``op`` as the released model passes them, with tensors on the meta device.

    Example:
        >>> released_call("l2_norm")["x"].shape
        torch.Size([1, 4096, 64, 128])
    """
    sizes, arguments = _CALLS[op]

    def build(value: Any) -> Any:
        shape, dtype = value if isinstance(value, tuple) else (value, _half)
        if not isinstance(shape, str):
            return value
        return torch.empty([sizes[word] for word in shape.split()], dtype=dtype, device="meta")

    return {name: build(value) for name, value in arguments.items()}


@attrs.frozen
class SupportTable:
    """The answer of :func:`support_table`: print it, show it in a notebook, or take its ``rows`` or ``to_dict()``."""

    hardware: Hardware
    rows: tuple[Choice, ...]
    """One Choice per operation, asked with ``"auto"``: its backend is what auto would run."""

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data: ``["operations"][op]["backends"][backend]`` lists the reasons; none: it can run."""
        return {
            "hardware": attrs.asdict(self.hardware),
            "operations": {
                row.op: {"auto": row.backend, "backends": {v.backend: list(v.reasons) for v in row.verdicts}}
                for row in self.rows
            },
        }

    def _cells(self) -> tuple[list[str], list[list[str]], list[str]]:
        """Header, body and numbered notes. A reason that only differs in the operation's name is one note."""
        known = [b for b in registry.backends() if any(v.backend == b for row in self.rows for v in row.verdicts)]
        notes: dict[str, int] = {}
        body = []
        for row in self.rows:
            marks = dict.fromkeys(known, "")
            for verdict in row.verdicts:
                reasons = [re.sub(rf"\b{row.op}\b", "it", reason) for reason in verdict.reasons]
                numbers = [str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons]
                marks[verdict.backend] = f"no ({','.join(numbers)})" if numbers else "ok"
            body.append([row.op, row.backend or "none", *marks.values()])
        return ["operation", "auto", *known], body, [f"({n}) {reason}" for reason, n in notes.items()]

    def __str__(self) -> str:
        header, body, notes = self._cells()
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        lines = [
            "  ".join(f"{cell:<{w}}" for cell, w in zip(cells, widths, strict=True)).rstrip()
            for cells in (header, *body)
        ]
        title = f"glm5fn {registry.version()} on {self.hardware}, at the shapes of the released model"
        return "\n".join([title, *lines, *notes])

    def _repr_html_(self) -> str:
        header, body, notes = self._cells()
        rows = [f"<tr>{''.join(f'<th>{html.escape(cell)}</th>' for cell in header)}</tr>"]
        rows += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>" for cells in body]
        return f"<table>{''.join(rows)}</table><p>{'<br>'.join(map(html.escape, notes))}</p>"


def support_table(hardware: Hardware | str | None = None) -> SupportTable:
    """Which backend can run which operation, at the shapes of the released model, with every reason why not.

    Args:
        hardware: a chip or its name, which need not be in this machine; by default this machine's accelerator, or its
            CPU.

    Raises:
        ValueError: for a name of a chip that is not known, listing those that are.

    Example:
        >>> support_table("H100").to_dict()["operations"]["kda_chunk"]["backends"]["reference"]
        []
    """
    chip = Hardware.named(hardware) if isinstance(hardware, str) else hardware or local()
    return SupportTable(chip, tuple(explain(op, backend=AUTO, hardware=chip, **released_call(op)) for op in _CALLS))
