"""What choosing a backend costs per call. Run it by hand: ``python tests/perf/dispatch_cost.py``.

It prints the time of ``dispatch`` alone (the kernel returns at once) for a call of kda_recurrent's size: six tensors
and three options. "by hardware" is the case of a machine where nothing that could run has limits; "by call" compares
the whole call.
"""

from __future__ import annotations

import timeit

import torch

from glm5fn.dispatch import dispatch, op, record_choices, register, use_backend


@op
def six(q, k, v, g, beta, state=None, *, scale=None, cu_seqlens=None, donate=False, backend=None):
    return dispatch("six", backend, q, k, v, g, beta, state, scale=scale, cu_seqlens=cu_seqlens, donate=donate)


def kernel(q, k, v, g, beta, state=None, *, scale=None, cu_seqlens=None, donate=False):
    return q


def wants_k_128(spec):
    return [] if spec.shapes["k"][-1] == 128 else [f"K must be 128, got {spec.shapes['k'][-1]}"]


def microseconds(call, number=300, repeat=1000):
    return min(timeit.repeat(call, number=number, repeat=repeat)) / number * 1e6


def main():
    heads = torch.zeros(1, 1, 64, 128)
    args = (heads, heads.clone(), heads.clone(), heads.clone(), torch.zeros(1, 1, 64), torch.zeros(1, 64, 128, 128))
    bare = microseconds(lambda: kernel(*args, scale=None, cu_seqlens=None, donate=False))

    def show(what):
        print(f"{what:<44} {microseconds(lambda: six(*args)) - bare:6.2f} us")

    register("six", "reference", kernel)
    show("by hardware")
    with use_backend("reference"):
        show("by hardware, in a use_backend frame")
    register("six", "picky", kernel, unsupported=wants_k_128, priority=1)
    show("by call")
    with record_choices() as choices:
        show("by call, recorded")
        choices.clear()


if __name__ == "__main__":
    main()
