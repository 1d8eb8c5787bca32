"""A frame belongs to its thread and its asyncio task."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from glm5fn import record_choices, register, use_backend


def test_a_thread_does_not_see_the_frame_of_another(toy):
    toy.add("mine")
    inside = threading.Barrier(2, timeout=30)
    ran = {}

    def framed():
        with use_backend("mine"):
            inside.wait()
            ran["framed"] = [toy() for _ in range(200)]
            inside.wait()

    thread = threading.Thread(target=framed)
    thread.start()
    inside.wait()
    ran["bare"] = [toy() for _ in range(200)]
    inside.wait()
    thread.join()
    assert set(ran["framed"]) == {"mine"}
    assert set(ran["bare"]) == {"reference"}


def test_many_threads_choose_register_and_record(toy):
    """Choices, the memory and the registry from eight threads at once: each sees its own frame and its own record."""
    toy.add("mine", unsupported=toy.wants_k(3))
    toy.add("other")

    def work(number):
        name = ("mine", "other", "reference")[number % 3]
        with use_backend(name), record_choices() as choices:
            for step in range(60):
                x = torch.zeros(2, 4 + (step + number) % 5)
                assert toy(x) == name
                if step % 20 == 0:
                    with register("toy", f"thread{number}", lambda x, y=None, *, eps=1e-6: x - 1):
                        assert toy.op(x, backend=f"thread{number}").min() == -1
        return [c.backend for c in choices]

    with ThreadPoolExecutor(8) as pool:
        records = list(pool.map(work, range(8)))
    for number, record in enumerate(records):
        assert len(record) == 63
        assert set(record) == {("mine", "other", "reference")[number % 3], f"thread{number}"}


def test_a_task_does_not_see_the_frame_of_another(toy):
    toy.add("mine")
    toy.add("other")

    async def work(name):
        seen = []
        for _ in range(5):
            if name is None:
                seen.append(toy())
                await asyncio.sleep(0)
                continue
            with use_backend(name):
                seen.append(toy())
                await asyncio.sleep(0)
                seen.append(toy())
        return seen

    async def main():
        return await asyncio.gather(work("mine"), work(None), work("other"), work("mine"))

    mine, bare, other, mine_too = asyncio.run(main())
    assert set(mine) == set(mine_too) == {"mine"}
    assert set(bare) == {"reference"}
    assert set(other) == {"other"}


def test_a_task_inherits_the_frame_it_was_started_in(toy):
    toy.add("mine")

    async def child():
        await asyncio.sleep(0)
        return toy()

    async def main():
        with use_backend("mine"), record_choices() as choices:
            task = asyncio.create_task(child())
        return await task, [c.backend for c in choices]

    assert asyncio.run(main()) == ("mine", ["mine"])
