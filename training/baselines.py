"""What the model is compared with: a byte 5-gram and gzip, in bits per byte."""

from __future__ import annotations

import gzip
import math
from collections import Counter, defaultdict

__all__ = ["gzip_bits_per_byte", "ngram_bits_per_byte"]


def ngram_bits_per_byte(train: list[str], held_out: list[str], order: int = 5) -> float:
    """Bits per byte of ``held_out`` under a byte n-gram with Witten-Bell smoothing, trained on ``train``.

    Witten-Bell: p_n(b | c) = (count(c, b) + distinct(c) * p_{n-1}(b | c[1:])) / (count(c) + distinct(c)); p_0 is
    uniform.
    """
    counts: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(order)]
    for text in train:
        data = text.encode()
        for i, byte in enumerate(data):
            for n in range(min(order, i + 1)):
                counts[n][data[i - n : i]][byte] += 1
    totals = [{context: sum(c.values()) for context, c in level.items()} for level in counts]

    bits = size = 0.0
    for text in held_out:
        data = text.encode()
        size += len(data)
        for i, byte in enumerate(data):
            p = 1 / 256
            for n in range(min(order, i + 1)):
                context = data[i - n : i]
                seen = counts[n].get(context)
                if seen is None:
                    break
                p = (seen[byte] + len(seen) * p) / (totals[n][context] + len(seen))
            bits -= math.log2(p)
    return bits / size


def gzip_bits_per_byte(held_out: list[str]) -> float:
    """Bits per byte of ``held_out``, all documents in one stream, under gzip's best compression."""
    data = "\n\n".join(held_out).encode()
    return 8 * len(gzip.compress(data, 9)) / len(data)
