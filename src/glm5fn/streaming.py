"""What ``glm5fn generate`` does: load, stream text, report."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch

from glm5fn.assets import shipped_checkpoint
from glm5fn.cache import describe
from glm5fn.checkpoint import load_checkpoint
from glm5fn.dispatch import Choice, ContractError, record_choices, use_backend
from glm5fn.generate import Step, generate
from glm5fn.params import count
from glm5fn.tokenizer import load_tokenizer, stream_text

__all__ = ["stream"]

SMALL = 50_000_000
"""Parameters below which a step is so short that waking a second thread costs more than it brings."""


def stream(
    path: str | None,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    dtype: str | None,
    device: str,
    backend: str | None,
    threads: int | None,
    prefill_chunk: int,
) -> int:
    """Print ``prompt`` and its continuation to standard output as it comes, everything else to standard error."""
    folder = path or shipped_checkpoint()
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(sys.stdin.read() if prompt == "-" else prompt)
    if not ids:
        raise ContractError("generate: the prompt is empty; it must hold at least one character.")
    began = time.perf_counter()
    cfg, params = load_checkpoint(folder, device=device, dtype=getattr(torch, dtype) if dtype else None)
    _note(f"{folder}: {count(params):,} parameters in {time.perf_counter() - began:.2f} s")
    if threads is None and count(params) < SMALL:
        threads = 1
    if threads is not None:
        if threads < 1:
            raise ContractError(f"generate: threads must be at least 1, got {threads}.")
        torch.set_num_threads(threads)
    _note(f"prompt of {len(ids)} tokens, up to {max_new_tokens} more\n")

    with use_backend(backend) if backend else nullcontext(), record_choices() as choices:
        steps = generate(
            params, cfg, ids,
            max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, prefill_chunk=prefill_chunk,
        )  # fmt: skip
        clock = _Clock(max_new_tokens)
        print(tokenizer.decode_bytes(ids).decode(errors="replace"), end="", flush=True)
        for piece in stream_text(tokenizer, _tokens(steps, clock, cfg.eos_token_ids)):
            print(piece, end="", flush=True)
        print(flush=True)
    if clock.last is not None:
        _note(f"\n{clock.summary()}\n\n{describe(clock.last.cache)}\n\n{_who_ran(choices)}")
    return 0


class _Clock:
    """Times steps; shows a counter on a terminal that the text itself does not go to."""

    def __init__(self, total: int):
        self.began = time.perf_counter()
        self.first = self.began
        self.total, self.done = total, 0
        self.last: Step | None = None
        self.counter = sys.stderr.isatty() and not sys.stdout.isatty()

    def tick(self, step: Step) -> None:
        self.done, self.last = self.done + 1, step
        if self.done == 1:
            self.first = time.perf_counter()
        if self.counter:
            print(f"\r{self.done}/{self.total} tokens, {self.rate():.0f} tokens/s", end="", file=sys.stderr, flush=True)

    def rate(self) -> float:
        return (self.done - 1) / max(time.perf_counter() - self.first, 1e-9)

    def summary(self) -> str:
        return f"{self.done} tokens at {self.rate():.0f} tokens/s; the first one after {self.first - self.began:.2f} s"


def _tokens(steps: Iterable[Step], clock: _Clock, stops: tuple[int, ...]) -> Iterator[int]:
    for step in steps:
        clock.tick(step)
        token = int(step.token[0])
        if token not in stops:
            yield token


def _who_ran(choices: list[Choice]) -> str:
    calls = Counter((choice.op, choice.backend or "none") for choice in choices)
    width = max(len(op) for op, _ in calls)
    rows = [f"  {op:<{width}}  {backend:<10} {number:>7}" for (op, backend), number in sorted(calls.items())]
    return "\n".join([f"  {'operation':<{width}}  {'backend':<10} {'calls':>7}", *rows])


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
