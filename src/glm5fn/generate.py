"""Token loops: sampling and stopping on top of :mod:`glm5fn.model`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch.nn.utils.rnn import pad_sequence

from glm5fn.cache import ModelCache, check_tree, init_cache, limit_of, whole_number
from glm5fn.config import Config
from glm5fn.dims import check_dtype, check_shape
from glm5fn.dispatch import ContractError
from glm5fn.model import check_params, decode_step, prefill
from glm5fn.params import Params

__all__ = ["Step", "check_options", "generate", "sample"]


class Step(NamedTuple):
    """One step of :func:`generate`, for all rows.

    Attributes:
        token: int64 ``[B]`` the new token of each row; a row that has finished repeats its last one.
        logprob: float32 ``[B]`` its log-probability (nats) under the model, before temperature and top-p; 0 for
            finished rows.
        finished: bool ``[B]`` whether the row has produced a stop token, in this step or earlier.
        cache: the cache that holds everything before ``token``. It is reused by the next step unless ``donate=False``.
    """

    token: torch.Tensor
    logprob: torch.Tensor
    finished: torch.Tensor
    cache: ModelCache


def sample(
    logits: torch.Tensor, *, temperature: float = 0.0, top_p: float = 1.0, generator: torch.Generator | None = None
) -> torch.Tensor:
    """Choose a token per row.

    Args:
        logits: ``[B, Vocab]``.
        temperature: 0 takes the likeliest token (the lowest id on a tie); otherwise logits are divided by it.
        top_p: keep the smallest set of likeliest tokens whose probability reaches this; 1 keeps all.
        generator: source of randomness, on the device of ``logits``.

    Returns:
        int64 ``[B]``.

    Raises:
        ContractError: if ``temperature`` is negative or ``top_p`` is outside (0, 1].

    Example:
        >>> import torch
        >>> sample(torch.tensor([[0.0, 2.0, 1.0]]))
        tensor([1])
    """
    _check_sampling("sample", temperature, top_p)
    if temperature == 0:
        return logits.argmax(-1)
    # Relative to the largest one no logit can overflow; a temperature below float32's range acts as its smallest.
    logits = logits.float() - logits.float().amax(-1, keepdim=True)
    probs = torch.softmax(logits / max(temperature, torch.finfo(torch.float32).tiny), dim=-1)
    if top_p < 1:
        ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
        # A token stays if the mass before it has not reached top_p: the likeliest always does.
        ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0)
        probs = torch.zeros_like(probs).scatter(-1, ids, ordered)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def generate(
    params: Params,
    cfg: Config,
    tokens: torch.Tensor | Sequence[Sequence[int]] | Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[int] | None = None,
    cache: ModelCache | None = None,
    prefill_chunk: int | None = None,
    donate: bool = True,
) -> Iterator[Step]:
    """Continue prompts token by token.

    Args:
        params: parameters from :func:`load_checkpoint` or :func:`init_params`.
        cfg: the model's configuration.
        tokens: the prompts: ``[B, T]`` ids, a list of lists of any lengths, or a single list of ids. No prompt may be
            empty.
        max_new_tokens: tokens to produce per row at most.
        temperature: see :func:`sample`; 0 is greedy.
        top_p: see :func:`sample`.
        seed: seed of the sampling; the same seed, prompts and machine give the same tokens.
        stop: ids that end a row; None takes ``cfg.eos_token_ids``.
        cache: a cache to continue from, with room for the prompt and ``max_new_tokens - 1`` tokens more; None makes
            one that fits.
        prefill_chunk: feed the prompt in pieces of this many tokens, which bounds memory; None feeds it whole.
        donate: reuse the cache's memory from step to step. False keeps every ``Step.cache`` valid, at the cost of
            copies. A cache that was passed in is never reused for the first step.

    Yields:
        A :class:`Step` per new token, until every row has finished or ``max_new_tokens`` is reached.

    Raises:
        ContractError: on an empty prompt, an option of another type or out of range, a stop token outside the
            vocabulary, a cache too small, or what :func:`sample` refuses; before the first token.

    Parameters may require gradients: steps run without them, while the code between two steps keeps its own mode.

    Example:
        >>> import torch, glm5fn
        >>> cfg, params = glm5fn.load_checkpoint(glm5fn.shipped_checkpoint(), dtype=torch.float32)
        >>> steps = list(generate(params, cfg, [72, 105], max_new_tokens=3))
        >>> len(steps), steps[-1].cache.length.tolist()
        (3, [4])
    """
    check_params("generate", params, cfg)
    prompts, lengths = _prompts(tokens, params.embed.device)
    check_options(
        max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed, prefill_chunk=prefill_chunk
    )
    stop = cfg.eos_token_ids if stop is None else _stops(stop, params.embed.shape[0])
    own = cache is None
    needed = [length + max(max_new_tokens - 1, 0) for length in lengths]
    if cache is not None:
        _check_room(cache, needed)
    else:
        cache = init_cache(cfg, len(lengths), max(needed), device=params.embed.device, dtype=params.embed.dtype)
    stops = torch.tensor(stop, dtype=torch.int64, device=params.embed.device)
    return _steps(
        params, cfg, prompts, lengths, cache, max_new_tokens, temperature, top_p, seed, stops,
        prefill_chunk, donate, own,
    )  # fmt: skip


def check_options(
    *, max_new_tokens: int, temperature: float, top_p: float, seed: int, prefill_chunk: int | None
) -> None:
    """Check what :func:`generate` can refuse without a model.

    Raises:
        ContractError: naming the option, its value and what it must be.
    """
    op = "generate"
    whole_number(op, "max_new_tokens", max_new_tokens)
    if prefill_chunk is not None:
        whole_number(op, "prefill_chunk", prefill_chunk, 1)
    if not -(1 << 63) <= whole_number(op, "seed", seed, None) < 1 << 64:
        raise ContractError(f"{op}: seed must be a 64-bit number, got {seed}.")
    _check_sampling(op, temperature, top_p)


def _stops(stop: Any, vocabulary: int) -> list[int]:
    listed = stop.tolist() if isinstance(stop, torch.Tensor) else stop
    if isinstance(listed, str | bytes) or not hasattr(listed, "__iter__"):
        raise ContractError(f"generate: stop must be a list of token ids, got {stop!r}.")
    ids = [whole_number("generate", "stop", each) for each in listed]
    wrong = [each for each in ids if each >= vocabulary]
    if wrong:
        raise ContractError(f"generate: stop must lie in 0..{vocabulary - 1} (the vocabulary), got {wrong}.")
    return ids


@torch.no_grad()  # around each step alone: torch switches it off while the generator waits
def _steps(
    params: Params, cfg: Config, prompts: torch.Tensor, lengths: list[int], cache: ModelCache,
    max_new_tokens: int, temperature: float, top_p: float, seed: int, stops: torch.Tensor,
    prefill_chunk: int | None, donate: bool, own: bool,
) -> Iterator[Step]:  # fmt: skip
    if max_new_tokens == 0:
        return
    generator = torch.Generator(params.embed.device).manual_seed(int(seed))
    logits, cache = _feed(params, cfg, prompts, lengths, cache, prefill_chunk, donate, own)
    finished = torch.zeros(len(lengths), dtype=torch.bool, device=prompts.device)
    token = prompts[:, 0]
    for step in range(max_new_tokens):
        chosen = sample(logits, temperature=temperature, top_p=top_p, generator=generator)
        logprob = torch.log_softmax(logits.float(), -1).gather(-1, chosen[:, None])[:, 0]
        token = torch.where(finished, token, chosen)
        logprob = logprob.masked_fill(finished, 0)
        finished = finished | torch.isin(token, stops)
        yield Step(token, logprob, finished, cache)
        if all(finished.tolist()) or step + 1 == max_new_tokens:
            return
        logits, cache = decode_step(params, cfg, token, cache, donate=donate)


def _feed(
    params: Params, cfg: Config, prompts: torch.Tensor, lengths: list[int], cache: ModelCache,
    chunk: int | None, donate: bool, own: bool,
) -> tuple[torch.Tensor, ModelCache]:  # fmt: skip
    """Prefill in pieces of ``chunk`` tokens; each row's logits come from the piece that holds its last token."""
    total = max(lengths)
    result: torch.Tensor | None = None
    for begin in range(0, total, chunk or total):
        piece = prompts[:, begin : begin + (chunk or total)]
        counts = [min(max(n - begin, 0), piece.shape[1]) for n in lengths]
        logits, cache = prefill(params, cfg, piece, cache, lengths=counts, donate=donate and (own or begin > 0))
        ended = torch.tensor([begin < n <= begin + piece.shape[1] for n in lengths], device=logits.device)
        result = logits if result is None else torch.where(ended[:, None], logits, result)
    assert result is not None
    return result, cache


def _check_sampling(op: str, temperature: float, top_p: float) -> None:
    if not _is_number(temperature) or not 0 <= temperature < float("inf"):
        raise ContractError(f"{op}: temperature must be a number from 0 up, got {temperature!r}.")
    if not _is_number(top_p) or not 0 < top_p <= 1:
        raise ContractError(f"{op}: top_p must be in (0, 1], got {top_p!r}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_room(cache: ModelCache, needed: list[int]) -> None:
    check_tree("generate", cache)
    held, limit = cache.length.tolist(), limit_of(cache)
    if len(held) != len(needed):
        raise ContractError(f"generate: there are {len(needed)} prompts, but cache has {len(held)} rows.")
    total, row = max((h + n, row) for row, (h, n) in enumerate(zip(held, needed, strict=True)))
    if limit is not None and total > limit:
        raise ContractError(
            f"generate: row {row} holds {held[row]} tokens and takes {needed[row]} more (its prompt and all new tokens "
            f"but the last), {total} together, but the cache has capacity {limit}. Make a larger one with "
            f"init_cache(..., capacity={total}), or lower max_new_tokens."
        )


def _prompts(tokens: torch.Tensor | Sequence, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    forms = "generate: tokens must be a list of ids, a list of such lists, or a tensor [B, T]."
    if isinstance(tokens, torch.Tensor):
        check_shape("generate", "tokens", tokens, "B T", {})
        rows = list(tokens)
    else:
        try:
            one = len(tokens) and hasattr(tokens[0], "__index__") and not getattr(tokens[0], "shape", ())
            rows = [torch.as_tensor(row) for row in ([tokens] if one else tokens)]
        except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
            raise ContractError(forms) from error
    if any(row.dim() != 1 for row in rows):
        raise ContractError(forms)
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) == 0:
        raise ContractError(f"generate: every prompt must hold at least one token, got lengths {lengths}.")
    for row in rows:
        check_dtype("generate", "tokens", row, (torch.int64, torch.int32))
    return pad_sequence(rows, batch_first=True).to(device), lengths
