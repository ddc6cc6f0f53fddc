"""Step times: looked up, measured on a clock of ours, kept and found again."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fakes import make_model, one_thread  # noqa: F401
from workers import step_times
from workers.backend import Backend, KVCache, StepBatch
from workers.step_times import StepTimes, cached_step_times, measure_step_times

pytestmark = pytest.mark.usefixtures("one_thread")
TIMES = StepTimes((1, 2, 6), (3.0, 4.0, 8.0))


class TimedModel:
    """Takes base + slope seconds a token on a clock of its own, at first twice that for each size."""

    def __init__(self, base: float, slope: float, noisy: int = 0) -> None:
        """The size `noisy` always takes thrice as long as it should."""
        self.base, self.slope, self.now, self.noisy = base, slope, 0.0, noisy
        self.sizes: list[int] = []

    def clock(self) -> float:
        return self.now

    def new_cache(self, num_rows: int, max_len: int) -> KVCache:
        return make_model("w8a8").new_cache(num_rows, max_len)

    @property
    def backend(self) -> Backend:
        return make_model("w8a8").backend

    def forward(self, batch: StepBatch, cache: KVCache) -> torch.Tensor:
        size = len(batch.token_ids)
        assert len(batch.logit_indices) == size
        assert int(batch.positions.max()) < cache.max_len
        assert int(batch.rows.max()) < cache.num_rows
        slow = 3 if size == self.noisy else 1 if size in self.sizes else 2
        self.sizes.append(size)
        self.now += slow * (self.base + self.slope * size)
        return torch.zeros(size, 2)


def measure(model: TimedModel, seconds: float) -> StepTimes:
    return measure_step_times(model, 64, seconds, model.clock)  # type: ignore[arg-type]


def test_lines_between_the_points_and_beyond() -> None:
    assert TIMES([0, 0.5, 1, 2, 4, 6, 8]).tolist() == [0, 1.5, 3, 4, 6, 8, 10]
    assert float(TIMES(3)) == 5


def test_the_best_of_several_passes_counts() -> None:
    times = measure(TimedModel(1e-3, 1e-5), 4.0)
    assert times.num_tokens[0] == 1
    assert times.num_tokens[-1] == 256
    assert times.seconds == pytest.approx([1e-3 + 1e-5 * n for n in times.num_tokens])


def test_a_slow_model_is_measured_at_fewer_sizes() -> None:
    model = TimedModel(0.05, 0.01)
    times = measure(model, 1.0)
    assert 1 < len(times.num_tokens) < 16
    assert model.now < 3
    assert float(times(256)) == pytest.approx(0.05 + 0.01 * 256, rel=0.01)


def test_even_a_very_slow_model_gets_two_points() -> None:
    times = measure(TimedModel(30.0, 1.0), 1.0)
    assert times.num_tokens == (1, 2)


def test_noise_does_not_make_more_tokens_cheaper() -> None:
    model = TimedModel(1.0, -0.001)
    times = measure(model, 100.0)
    assert all(a <= b for a, b in pairwise(times.seconds))


def test_noise_in_one_size_lifts_no_other() -> None:
    times = measure(TimedModel(1e-3, 1e-5, noisy=9), 4.0)
    expected = [1e-3 + 1e-5 * (12 if n == 9 else n) for n in times.num_tokens]
    assert times.seconds == pytest.approx(expected)


def test_a_jump_at_the_end_is_not_the_slope_beyond() -> None:
    times = StepTimes((1, 56, 64, 65), (1.0, 1.0, 1.0, 1.2))
    assert float(times(130)) == pytest.approx(1.6)


def test_a_real_model_with_short_rows() -> None:
    times = measure_step_times(make_model("w8a8"), max_len=2, seconds=0.1)
    assert all(seconds > 0 for seconds in times.seconds)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An empty cache, and how often something was measured."""
    monkeypatch.setenv("QUASAR_CACHE", str(tmp_path))
    measured: list[int] = []

    def measure(*_args: object) -> StepTimes:
        measured.append(1)
        return TIMES

    monkeypatch.setattr(step_times, "measure_step_times", measure)
    return measured


def find(digest: str = "d", num_threads: int = 2) -> StepTimes:
    return cached_step_times(make_model("w8a8"), 64, digest, num_threads)


def test_measured_once_for_a_model_and_a_number_of_threads(cache: list[int]) -> None:
    assert find() == find() == TIMES
    assert len(cache) == 1
    find("other")
    find(num_threads=1)
    assert len(cache) == 3


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"num_tokens": 3, "seconds": 4}', b"\xff\xfe".decode("latin-1")],
)
def test_a_damaged_file_is_measured_again(content: str, cache: list[int], tmp_path: Path) -> None:
    find()
    (path,) = tmp_path.rglob("*.json")
    path.write_text(content)
    assert find() == TIMES
    assert len(cache) == 2
    assert json.loads(path.read_text())["seconds"] == list(TIMES.seconds)


@pytest.mark.parametrize(
    "values",
    [
        {"num_tokens": [1], "seconds": [1.0]},
        {"num_tokens": [1, 2], "seconds": [1.0]},
        {"num_tokens": [2, 1], "seconds": [1.0, 2.0]},
        {"num_tokens": [1, 2], "seconds": [1.0, -2.0]},
        {"num_tokens": [1, 2], "seconds": [1.0, "x"]},
        {"num_tokens": [1, 2], "seconds": [1.0, float("nan")]},
    ],
)
def test_values_that_make_no_sense_are_measured_again(
    values: dict[str, list[float]], cache: list[int], tmp_path: Path
) -> None:
    find()
    (path,) = tmp_path.rglob("*.json")
    path.write_text(json.dumps(values))
    assert find() == TIMES
    assert len(cache) == 2


def test_a_cache_that_cannot_be_written(
    cache: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "step-times").write_text("a file where a folder should be")
    assert find() == TIMES
    assert "cannot be kept" in caplog.text
    assert np.isfinite(find()(7))
