"""What a worker tells Ray's Prometheus endpoint of itself."""

from ray.util.metrics import Counter, Gauge, Histogram

from workers.tally import Tally

_STEP_BOUNDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0]
_COUNTS = {
    "quasar_samples": ("num_samples", "Samples answered, or refused."),
    "quasar_tokens": ("num_tokens", "Tokens generated."),
    "quasar_spec_steps": ("num_spec_steps", "Steps of a row in which something was drafted."),
    "quasar_draft_tokens": ("num_draft_tokens", "Tokens drafted."),
    "quasar_accepted_draft_tokens": ("num_accepted_draft_tokens", "Drafted tokens accepted."),
}


class WorkerMetrics:
    """Counters, gauges and a histogram, each with the worker's name."""

    def __init__(self, worker: str) -> None:
        """Register them with the Ray that this process belongs to."""
        tags = {"worker": worker}
        self._counters = {
            attribute: Counter(name, description, tag_keys=("worker",))
            for name, (attribute, description) in _COUNTS.items()
        }
        self._fill = Gauge("quasar_batch_fill", "Rows under way, as a share.", ("worker",))
        self._queued = Gauge("quasar_queued_samples", "Samples without a row yet.", ("worker",))
        self._steps = Histogram(
            "quasar_step_seconds", "Of a pass over all rows.", _STEP_BOUNDS, ("worker",)
        )
        for metric in (*self._counters.values(), self._fill, self._queued, self._steps):
            metric.set_default_tags(tags)
        self._told = dict.fromkeys(self._counters, 0)

    def publish(self, tally: Tally) -> None:
        """Tell what has changed since the last time."""
        for attribute, counter in self._counters.items():
            now = getattr(tally, attribute)
            if now > self._told[attribute]:
                counter.inc(now - self._told[attribute])
                self._told[attribute] = now
        self._fill.set(tally.num_rows / max(tally.num_slots, 1))
        self._queued.set(tally.num_waiting)
        for seconds in tally.take_step_seconds():
            self._steps.observe(seconds)
