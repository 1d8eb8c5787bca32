"""kda_chunk is bounded in memory and linear in time, whatever the length. Speed is measured by
benchmarks/kda_chunk.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest
from torch.utils.flop_counter import FlopCounterMode

from glm5fn.ops.kda import kda_chunk
from glm5fn.testing.inputs.kda import make

MEMORY = """
    import pathlib, sys, torch
    from glm5fn.ops.kda import kda_chunk
    from glm5fn.testing.inputs.kda import make

    def memory(field):
        line = next(x for x in pathlib.Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
        return int(line.split()[1]) / 1024

    torch.set_num_threads(2)
    kda_chunk(*make(B=1, T=64, H=8, K=128, V=128), backend="reference")
    call = make(B=1, T=int(sys.argv[1]), H=8, K=128, V=128)
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = memory("VmRSS")
    result = kda_chunk(*call, backend="reference")
    print(memory("VmHWM") - before)
"""


@pytest.mark.serial
@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_extra_memory():
    """At B=1, T=2048, H=8, K=V=128, float32, at most 150 MiB beyond the inputs, the 8 MiB result included."""
    program = [sys.executable, "-c", textwrap.dedent(MEMORY), "2048"]
    # A fixed threshold makes malloc give every large tensor back to the system, so that freed inputs cannot hide an
    # allocation.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    found = subprocess.run(program, check=True, capture_output=True, text=True, env=environment).stdout
    assert 8 <= float(found) <= 150


def test_work_is_linear_in_the_number_of_tokens():
    def flops(T):
        with FlopCounterMode(display=False) as counter:
            kda_chunk(*make(B=1, T=T, H=1, K=16, V=16), backend="reference")
        return counter.get_total_flops()

    assert flops(8192) == 8 * flops(1024)
