"""Attention while other threads allocate: memory that is freed too early is theirs then."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import numba
import numpy as np

from workers import attention

NUM_THREADS, NUM_PASSES = 3, 2000
ROWS, TOKENS, HEADS, KV_HEADS, HEAD_DIM, CELLS = 4, 12, 6, 2, 32, 2


def make_attend(seed: int) -> tuple[np.ndarray, ...]:
    """What `attention.attend` takes: four rows of prompts that go on, in a cache of their own."""
    rng = np.random.default_rng(seed)

    def bfloat16(*shape: int) -> np.ndarray:
        bits = rng.normal(size=shape).astype(np.float32).view(np.uint32)
        return (bits >> 16).astype(np.uint16)

    rows = np.repeat(np.arange(ROWS), TOKENS)
    positions = np.concatenate([np.arange(TOKENS) + 20 + 3 * row for row in range(ROWS)])
    q = rng.normal(size=(len(rows), HEADS, HEAD_DIM)).astype(np.float32)
    keys = bfloat16(1, ROWS, KV_HEADS, CELLS, HEAD_DIM, attention.KEYS)
    values = bfloat16(1, ROWS, KV_HEADS, CELLS * attention.KEYS, HEAD_DIM)
    return q, rows, positions, keys, values


def attend(given: tuple[np.ndarray, ...]) -> np.ndarray:
    q, rows, positions, keys, values = given
    out = np.empty_like(q)
    attention.attend(q, rows, positions, 0, keys, values, 0, np.float32(0.2), out)
    return out


def count_wrong_passes() -> int:
    """Of threads that attend at the same time."""
    numba.set_num_threads(1)
    given = [make_attend(seed) for seed in range(NUM_THREADS)]
    expected = [attend(one) for one in given]
    num_wrong = [0] * NUM_THREADS

    def work(index: int) -> None:
        numba.set_num_threads(1)
        for _ in range(NUM_PASSES):
            num_wrong[index] += not np.array_equal(attend(given[index]), expected[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(num_wrong)


def test_memory_is_held_while_it_is_read() -> None:
    """All threads share one of malloc's arenas, so that what one frees another takes at once."""
    run = subprocess.run(
        [sys.executable, "-m", "tests.test_attention"],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"MALLOC_ARENA_MAX": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert run.returncode == 0, run.stderr


if __name__ == "__main__":
    num_wrong = count_wrong_passes()
    sys.exit(f"{num_wrong} passes with wrong bits" if num_wrong else 0)
