"""What a pass costs by its number of tokens: measured once for a device and a model, then looked up."""

import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from quant.cache import cache_folder
from workers.backend import StepBatch
from workers.model import TargetModel

_LOGGER = logging.getLogger(__name__)
# Kernels work on tiles of 8 tokens: one more than a multiple of it costs more than the next ones.
_SIZES = (
    *(1, 2, 3, 4, 6, 8, 9, 12, 16, 17, 20, 24, 25, 28, 32, 33, 40, 41, 48, 49, 56, 57, 64),
    *(65, 80, 96, 128, 192, 256),
)
_SECONDS = 5.0
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 10  # Over all sizes; small models need no five seconds.
_POSITIONS = 16  # A row of the passes that are measured.


@dataclass(frozen=True)
class StepTimes:
    """Seconds a pass takes, at two or more numbers of tokens, with logits wanted for all of them.

    Both ascend. Raises ValueError if they do not.
    """

    num_tokens: tuple[int, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        known = (0, *self.num_tokens), (0, *self.seconds)
        rises = all(a < b for a, b in pairwise(known[0])) and all(
            a <= b for a, b in pairwise(known[1])
        )
        if not rises or not len(self.num_tokens) == len(self.seconds) >= 2:
            raise ValueError(f"step times that do not rise: {self.num_tokens}, {self.seconds}")

    def __call__(self, num_tokens: float | Sequence[float] | np.ndarray) -> np.ndarray:
        """Seconds: straight lines between the measured points, 0 at 0; beyond the last one it goes on
        as over the second half.
        """
        at, known = np.asarray(num_tokens, np.float64), np.array([0, *self.num_tokens], np.float64)
        seconds = np.array([0, *self.seconds])
        half = np.interp(known[-1] / 2, known, seconds)
        slope = (seconds[-1] - half) / (known[-1] / 2)
        beyond = np.maximum(at - known[-1], 0) * slope
        result: np.ndarray = np.interp(at, known, seconds) + beyond
        return result


def measure_step_times(
    model: TargetModel,
    max_len: int,
    seconds: float = _SECONDS,
    clock: Callable[[], float] = time.perf_counter,
) -> StepTimes:
    """Time passes of more and more tokens, over and over, for at most about `seconds`; the best counts.

    The contexts are short, so what attention costs with a row's length is left out. Sizes that half the
    time does not suffice for are left out, too.

    Args:
        model: warmed up.
        max_len: positions its rotary table covers.
        seconds: to spend; every size tried is timed twice at least.
        clock: seconds, from anywhere.
    """
    positions = min(_POSITIONS, max_len)
    cache = model.new_cache(-(-_SIZES[-1] // positions), positions)
    best: dict[int, float] = {}
    started = clock()
    sizes: tuple[int, ...] = _SIZES
    num_rounds = 0
    while num_rounds < _LEAST_ROUNDS or (num_rounds < _MOST_ROUNDS and clock() - started < seconds):
        for size in sizes:
            index = torch.arange(size)
            batch = StepBatch(torch.zeros_like(index), index // positions, index % positions, index)
            before = clock()
            model.forward(batch, cache)[:1, :1].cpu()  # A GPU has done its work only then.
            best[size] = min(best.get(size, np.inf), clock() - before)
            if num_rounds == 0 and size > 1 and clock() - started > seconds / 2:
                break
        sizes, num_rounds = tuple(best), num_rounds + 1
    # Noise only adds: fewer tokens take no longer than more of them did.
    rising = np.minimum.accumulate([best[size] for size in reversed(sizes)])[::-1]
    return StepTimes(sizes, tuple(float(value) for value in rising))


def cached_step_times(
    model: TargetModel, max_len: int, weights_digest: str, num_threads: int
) -> StepTimes:
    """The step times of this machine, model and number of threads: from the cache, else measured."""
    device = model.backend.device
    if (known := read_step_times(device, weights_digest, num_threads)) is not None:
        return known
    times = measure_step_times(model, max_len)
    path = _path(device, weights_digest, num_threads)
    partial = path.with_suffix(f".{time.monotonic_ns()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps({"num_tokens": times.num_tokens, "seconds": times.seconds}))
        partial.replace(path)
    except OSError as error:
        _LOGGER.warning("the step times cannot be kept (%s): every start measures them", error)
    return times


def read_step_times(
    device: torch.device, weights_digest: str, num_threads: int
) -> StepTimes | None:
    """The step times in the cache; None if they are not there, or damaged."""
    try:
        known = json.loads(_path(device, weights_digest, num_threads).read_text())
        return StepTimes(tuple(known["num_tokens"]), tuple(known["seconds"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _path(device: torch.device, weights_digest: str, num_threads: int) -> Path:
    key = json.dumps([device_name(device), weights_digest, num_threads, torch.__version__])
    name = hashlib.sha256(key.encode()).hexdigest()[:32]
    return cache_folder() / "step-times" / f"{name}.json"


def device_name(device: torch.device) -> str:
    """The model of a device of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        info = Path("/proc/cpuinfo").read_text()
    except OSError:
        info = ""
    names = [line.partition(":")[2] for line in info.splitlines() if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()
