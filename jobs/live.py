"""A run's progress before one's eyes: a live view on a terminal, else a line of JSON now and then."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pipeline.progress import ENDED, Progress

_LINE_SECONDS = 5.0
_MOST_WORKERS = 12
_PHASES = {
    "planning": "reading the input and writing the plan",
    "starting": "making the weights ready, and starting workers",
    "generating": "generating",
    "complete": "complete",
    "stopped": "stopped; the same command goes on",
}


@contextmanager
def showing() -> Iterator[Callable[[Progress], None]]:
    """What to show progress with, on standard error."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(render(progress), refresh=True)


class _Lines:
    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if progress.phase in ENDED or time.monotonic() - self._last >= _LINE_SECONDS:
            self._last = time.monotonic()
            print(progress.to_line(), file=sys.stderr, flush=True)


def render(progress: Progress) -> RenderableType:
    """The view: how far, how fast, who does what."""
    parts: list[RenderableType] = [Text(_PHASES[progress.phase], style="bold"), _figures(progress)]
    if progress.num_rows_planned:
        parts.insert(1, _bar(progress))
    if progress.workers:
        parts.append(_workers(progress))
    return Group(*parts)


def _bar(progress: Progress) -> Table:
    planned = progress.num_rows_planned or 1
    row = Table.grid(padding=(0, 1))
    left = ""
    if progress.seconds_left is not None:
        left = f"{timedelta(seconds=round(progress.seconds_left))} left"
    share = f"{progress.num_rows / planned:.1%}"
    rows = f"{progress.num_rows:,} of {planned:,} rows"
    row.add_row(ProgressBar(planned, progress.num_rows, width=36), share, rows, left)
    return row


def _figures(progress: Progress) -> Table:
    length, rate = progress.mean_acceptance_length, progress.draft_acceptance_rate
    figures = {
        "tokens/s": f"{progress.tokens_per_second:,.0f}",
        "tokens": f"{progress.num_generated_tokens:,}",
        "samples": f"{progress.num_samples:,}",
        "failed": f"{progress.num_errors:,}",
        "acceptance length": "-" if length is None else f"{length:.2f}",
        "drafts accepted": "-" if rate is None else f"{rate:.0%}",
    }
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in figures:
        table.add_column(name, justify="right")
    table.add_row(*figures.values())
    return table


def _workers(progress: Progress) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("worker", no_wrap=True)
    for name in ("under way", "waiting", "tokens", "shards"):
        table.add_column(name, justify="right")
    for worker in progress.workers[:_MOST_WORKERS]:
        table.add_row(
            worker.name,
            f"{worker.num_rows} of {worker.num_slots}",
            f"{worker.num_waiting:,}",
            f"{worker.num_tokens:,}",
            f"{worker.num_shards:,}",
        )
    more = len(progress.workers) - _MOST_WORKERS
    if more > 0:
        table.add_row(Text(f"and {more:,} more", style="dim"))
    if progress.num_starting:
        table.add_row(Text(f"{progress.num_starting:,} starting", style="dim"))
    return table
