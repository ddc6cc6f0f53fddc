"""What workers tell Ray's Prometheus endpoint, as it is scraped."""

import re
import time
import urllib.request
from typing import Any

import pytest

from workers.tally import Tally

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]


def scrape() -> str:
    import ray

    (node,) = ray.nodes()
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    with urllib.request.urlopen(address, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def value_of(text: str, name: str) -> float | None:
    found = re.search(rf'^{name}{{[^}}]*worker="cpu:here:1"[^}}]*}} (\S+)$', text, re.MULTILINE)
    return None if found is None else float(found[1])


def test_a_workers_metrics_can_be_scraped() -> None:
    import ray

    @ray.remote(num_cpus=0)
    class Teller:
        def __init__(self) -> None:
            from pipeline.metrics import WorkerMetrics

            self._metrics = WorkerMetrics("cpu:here:1")

        def tell(self, tally: Any) -> None:
            self._metrics.publish(tally)

    tally = Tally(num_slots=16)
    tally.count_tokens(3, 4, 2)
    tally.count_tokens(1, 0, 0)
    tally.count_step(0.03)
    tally.count_step(0.3)
    tally.count_samples(5, 4, 9)
    teller = Teller.remote()
    ray.get(teller.tell.remote(tally))
    tally.take_step_seconds()  # They went with the copy.
    tally.count_samples(2, 4, 9)
    ray.get(teller.tell.remote(tally))
    deadline, text = time.monotonic() + 90, ""
    while value_of(text, "ray_quasar_samples_total") != 7 and time.monotonic() < deadline:
        time.sleep(1)
        text = scrape()
    expected = {
        "ray_quasar_samples_total": 7,
        "ray_quasar_tokens_total": 4,
        "ray_quasar_spec_steps_total": 1,
        "ray_quasar_draft_tokens_total": 4,
        "ray_quasar_accepted_draft_tokens_total": 2,
        "ray_quasar_batch_fill": 0.25,
        "ray_quasar_queued_samples": 9,
        "ray_quasar_step_seconds_count": 2,
    }
    found = {name: value_of(text, name) for name in expected}
    assert found == expected, [line for line in text.splitlines() if "quasar" in line]
    assert re.search(r'ray_quasar_step_seconds_bucket{.*le="0.05".*} 1(\.0)?$', text, re.MULTILINE)
