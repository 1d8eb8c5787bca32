"""What ``glm5fn generate`` does: load, stream text, report."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch

from glm5fn.assets import shipped_checkpoint
from glm5fn.cache import check_device, describe, whole_number
from glm5fn.checkpoint import load_checkpoint
from glm5fn.dispatch import Choice, ContractError, record_choices, use_backend
from glm5fn.dispatch.selection import environment
from glm5fn.generate import Step, check_options, generate
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
    """Print ``prompt`` and its continuation to standard output as it comes, everything else to standard error.

    What can be refused without the checkpoint is refused before it is read, and nothing is printed to standard output
    before the first token is there.
    """
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_p": top_p, "seed": seed,
        "prefill_chunk": prefill_chunk,
    }  # fmt: skip
    check_options(**options)
    _check_threads(threads)
    check_device("generate", device)
    frame = use_backend(backend) if backend is not None else nullcontext()
    environment()
    folder = path or shipped_checkpoint()
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode(_text(prompt))
    if not ids:
        raise ContractError("generate: the prompt is empty; it must hold at least one character.")
    began = time.perf_counter()
    cfg, params = load_checkpoint(folder, device=device, dtype=getattr(torch, dtype) if dtype else None)
    _note(f"{folder}: {count(params):,} parameters in {time.perf_counter() - began:.2f} s")
    if threads is None and count(params) < SMALL:
        threads = 1
    if threads is not None:
        torch.set_num_threads(threads)
    _note(f"prompt of {len(ids)} tokens, up to {max_new_tokens} more\n")

    with frame, record_choices() as choices:
        steps = generate(params, cfg, ids, **options)
        clock = _Clock(max_new_tokens)
        pieces = stream_text(tokenizer, _tokens(steps, clock, cfg.eos_token_ids))
        first = next(pieces)
        print(tokenizer.decode_bytes(ids).decode(errors="replace"), end=first, flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
        print(flush=True)
    if clock.last is not None:
        _note(f"\n{clock.summary()}\n\n{describe(clock.last.cache)}\n\n{_who_ran(choices)}")
    return 0


def _check_threads(threads: int | None) -> None:
    if threads is None:
        return
    most = 4 * (os.cpu_count() or 1)
    if whole_number("generate", "threads", threads, 1) > most:
        raise ContractError(f"generate: threads must be at most {most}, four per core of this machine, got {threads}.")


def _text(prompt: str) -> str:
    """``prompt``, or all of standard input for ``-``."""
    if prompt == "-" and sys.stdin is None:
        raise ContractError("generate: the prompt is to come from standard input, but that is closed.")
    try:
        text = sys.stdin.read() if prompt == "-" else prompt
        text.encode()  # bytes that were no text arrive as lone surrogates
    except UnicodeError as error:
        raise ContractError("generate: the prompt is not valid UTF-8.") from error
    return text


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
