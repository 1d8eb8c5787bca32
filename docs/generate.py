"""Rewrite the generated part of README.md: ``python docs/generate.py``. A test checks that it is current."""

from __future__ import annotations

import re
from pathlib import Path

import glm5fn

README = Path(__file__).parent.parent / "README.md"
CHIPS = {"ascendc": "Ascend910B2", "triton": "H100", "reference": "cpu"}


def support() -> str:
    """The support table in Markdown: each backend on a chip that it is for, at the released model's shapes."""
    columns = {}
    for backend, chip in CHIPS.items():
        table = glm5fn.support_table(glm5fn.Hardware.named(chip))
        columns[backend] = {
            row.op: next("yes" if not v.reasons else "no kernel yet" if "has no" in v.reasons[0] else v.reasons[0]
                         for v in row.verdicts if v.backend == backend)
            for row in table.rows
        }  # fmt: skip
    lines = ["| operation | AscendC on 910B2 | Triton on H100 | torch anywhere |", "|---|---|---|---|"]
    lines += [f"| `{op}` | " + " | ".join(columns[b][op] for b in CHIPS) + " |" for op in columns["reference"]]
    return "\n".join(lines)


def updated(text: str) -> str:
    """``text`` with the part between the support markers replaced."""
    return re.sub(
        r"(<!-- support -->\n).*?(<!-- /support -->)", lambda m: m[1] + support() + "\n" + m[2], text, flags=re.DOTALL
    )


if __name__ == "__main__":
    README.write_text(updated(README.read_text()))
