"""Time kda_chunk on the CPU beside the token recurrence and transformers' own chunked fallback.

    python benchmarks/kda_chunk.py [--threads 2] [--repeat 5] [--cpu-time]

The peers take turns in every round, so that a busy machine slows all of them alike; medians are shown. Before anything
is timed, the results are compared. On a machine that others use, `--threads 1 --cpu-time` counts the time on the
processor only. Needs the `bench` extra for the transformers column.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from glm5fn.ops.kda import kda_chunk, kda_recurrent
from glm5fn.testing.compare import error_report
from glm5fn.testing.inputs.kda import KDAInputs, make

FORWARD = [(1, 2048, 8, 128, 128)]
SHORT = [(1, 64, 1, 16, 16), (1, 64, 8, 128, 128), (1, 65, 64, 128, 128), (4, 64, 6, 32, 32), (1, 512, 2, 64, 64)]
TRAIN = [(8, 512, 6, 32, 32)]
LONG = [(1, T, 8, 128, 128) for T in (1024, 2048, 4096, 8192, 16384, 32768)]

Peers = dict[str, Callable[[], object]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    torch.set_num_threads(args.threads)
    kind = "CPU time" if args.cpu_time else "wall time"
    print(f"torch {torch.__version__}, {args.threads} threads, float32, {kind}, medians of {args.repeat} rounds\n")
    with torch.no_grad():
        table("Forward, B T H K V", FORWARD, lambda x: {**ours(x), **fallback(x)}, args.repeat, clock)
        table("Short sequences, B T H K V", SHORT, ours, args.repeat, clock)
        table("Linear in T, B T H K V", LONG, lambda x: {"kda_chunk": lambda: kda_chunk(*x)}, args.repeat, clock)
    table("Forward and backward, B T H K V", TRAIN, training, args.repeat, clock)


def ours(x: KDAInputs) -> Peers:
    return {"kda_chunk": lambda: kda_chunk(*x), "kda_recurrent": lambda: kda_recurrent(*x)}


def fallback(x: KDAInputs) -> Peers:
    try:
        from transformers.models.glm5_next.modeling_glm5_next import chunk_kimi_delta_attention as peer
    except ImportError:
        print("(transformers with glm5_next is not installed: its column is missing)")
        return {}
    state = x.state.mT.contiguous()
    found = peer(*x[:5], initial_state=state, output_final_state=True)
    print(f"against transformers: {error_report(kda_chunk(*x).out, found[0])}")
    return {"transformers": lambda: peer(*x[:5], initial_state=state, output_final_state=True)}


def training(x: KDAInputs) -> Peers:
    leaves = KDAInputs(*(t.requires_grad_() for t in x))

    def both(run: Callable[[], object]) -> Callable[[], None]:
        return lambda: run()[0].sum().backward()  # type: ignore[index]

    return {name: both(run) for name, run in {"kda_chunk": ours(leaves)["kda_chunk"], **fallback(leaves)}.items()}


def table(
    title: str,
    shapes: list[tuple[int, ...]],
    peers: Callable[[KDAInputs], Peers],
    repeat: int,
    clock: Callable[[], float],
) -> None:
    print(title)
    for B, T, H, K, V in shapes:
        runs = peers(make(B, T, H, K, V))
        seconds = medians(runs, repeat, clock)
        base = seconds["kda_chunk"]
        cells = [
            f"{name} {1e3 * s:9.2f} ms" + (f" ({s / base:5.1f}x)" if s != base else "") for name, s in seconds.items()
        ]
        print(f"  {B:>2} {T:>6} {H:>3} {K:>4} {V:>4}   {'   '.join(cells)}   {1e6 * base / (B * T):.2f} us/token")
    print()


def medians(runs: Peers, repeat: int, clock: Callable[[], float]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(repeat):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append(clock() - start)
    return {name: statistics.median(t) for name, t in times.items()}


if __name__ == "__main__":
    main()
