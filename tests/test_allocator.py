"""Freed memory is kept by the process that asks for it, for as long as it asks."""

import subprocess
import sys

import pytest

PROGRAM = """
import contextlib
import resource
from quant.allocator import keeping_freed_memory

def faults_of(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(30):
        block = bytearray(size)
        block[::4096] = bytes(len(range(0, size, 4096)))
        del block
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

size = 48 * 2**20  # Up to 32 MiB glibc learns to keep by itself.
before = faults_of(size)
with keeping_freed_memory():
    during = faults_of(size)
    large = faults_of(3 * size)
print(size // 4096, before, during, large, faults_of(size))
with open("/proc/self/statm") as file:
    print(int(file.read().split()[1]))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of glibc alone")
def test_freed_blocks_are_used_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    pages, before, during, large, after, resident = map(int, done.stdout.split())
    assert before > 20 * pages
    assert during < 5 * pages
    assert large > 20 * 3 * pages  # Above the bound: returned as before.
    assert after > 20 * pages
    assert resident < 2 * pages  # All was given back.
