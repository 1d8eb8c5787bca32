"""The answer to "who runs this, and why not the others", as data and as text."""

from __future__ import annotations

import html

import attrs

__all__ = ["Choice", "Verdict"]


@attrs.frozen
class Verdict:
    """What one backend says about one call."""

    backend: str
    reasons: tuple[str, ...]
    """Everything that keeps it from running; empty means that it can."""


@attrs.frozen
class Choice:
    """Which backend runs a call, who asked for what, and what every backend that was considered said."""

    op: str
    backend: str | None
    """The backend that runs; ``None`` if none that was allowed to can."""
    asked: str
    """``"auto"`` or the name of a backend."""
    source: str
    """Who asked: ``"backend argument"``, ``"use_backend"``, ``"GLM5FN_BACKEND"`` or ``"default"``."""
    verdicts: tuple[Verdict, ...]

    def __str__(self) -> str:
        width = max(len(v.backend) for v in self.verdicts) if self.verdicts else 0
        lines = [f"{self.op}: {self.backend or 'none'}  (asked {self.asked!r} by {self.source})"]
        for verdict in self.verdicts:
            first, *rest = verdict.reasons or ("ok",)
            lines.append(f"  {verdict.backend:<{width}}  {first}")
            lines += [f"  {'':<{width}}  {reason}" for reason in rest]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{html.escape(v.backend)}</td><td style='text-align:left'>"
            + ("<br>".join(map(html.escape, v.reasons)) or "ok")
            + "</td></tr>"
            for v in self.verdicts
        )
        head = html.escape(str(self).partition("\n")[0])
        return f"<p><code>{head}</code></p><table><tr><th>backend</th><th>can it run this?</th></tr>{rows}</table>"
