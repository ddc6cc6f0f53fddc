"""The plots of a run's report, and those of two runs side by side."""

from collections.abc import Iterator, Mapping

import numpy as np

from jobs.figures import AMBER, BLUE, GREEN, Plot, bars, heat, histograms, over_time, ranking
from pipeline.run_stats import RunStats
from pipeline.sums import Kind

_NUM_BINS = 100
_DRAFTED = "tokens per step with a draft"


def plot_run(stats: RunStats) -> Iterator[Plot]:
    """All plots that a run has numbers for."""
    spans = stats.spans
    if not len(spans.starts):
        return
    edges = spans.edges(_NUM_BINS)
    yield Plot(
        "Tokens per second",
        "Generated tokens, each answer's spread evenly over the time it took.",
        over_time({"": (edges, spans.over_time(spans.tokens, edges))}, "tokens/s"),
    )
    yield Plot(
        "Rows under way",
        "Samples generated at a time, all workers together. The slope at the end is the wait for the "
        "last of them.",
        over_time({"": (edges, spans.over_time(spans.rows, edges))}, "rows", [GREEN]),
    )
    yield from _plot_drafts(stats)
    lengths = {"prompts": spans.prompt_tokens, "answers": spans.tokens}
    yield Plot("Lengths", "Tokens of prompts and of answers.", histograms(lengths, "tokens"))
    yield _plot_workers(stats, edges)


def _plot_workers(stats: RunStats, edges: np.ndarray) -> Plot:
    workers = stats.workers
    if all(worker.max_num_seqs for worker in workers.values()):
        title = "Batch fill by worker"
        note = "Rows under way over those that a worker takes at once (max_num_seqs)."
    else:
        title = "Workers"
        note = "Samples under way, by worker or, where that is not known, by device."
    note += " In a gap it was not there, or had nothing to do."
    return Plot(title, note, heat(workers, edges))


def _plot_drafts(stats: RunStats) -> Iterator[Plot]:
    shares = _accepted(stats)
    if not len(shares):
        return
    yield Plot(
        "Drafted tokens accepted in a step",
        "Of the steps in which something was drafted.",
        bars({"": shares}, "accepted tokens"),
    )
    yield Plot(
        "Acceptance by position",
        "How often the first, the second, ... drafted token became part of the answer.",
        bars({"": shares[::-1].cumsum()[::-1][1:]}, "position in the draft", 1, [GREEN]),
    )
    for column, kinds in stats.kinds.items():
        if len(lengths := _acceptance_lengths(kinds)) > 1:
            yield Plot(
                f"Acceptance length by {column}",
                "Tokens that a step gave when something was drafted; without a draft it is one.",
                ranking({"": lengths}, _DRAFTED),
            )


def plot_runs(runs: Mapping[str, RunStats]) -> Iterator[Plot]:
    """Runs by their names, drawn over each other."""
    spans = {name: stats.spans for name, stats in runs.items() if len(stats.spans.starts)}
    if not spans:
        return
    colours = dict(zip(runs, (BLUE, AMBER), strict=False))
    by_name = [colours[name] for name in spans]
    edges = {name: of.edges(_NUM_BINS) for name, of in spans.items()}
    speeds = {n: (edges[n], of.over_time(of.tokens, edges[n])) for n, of in spans.items()}
    yield Plot(
        "Tokens per second",
        "Each run from its own beginning.",
        over_time(speeds, "tokens/s", by_name),
    )
    shares = {n: found for n, stats in runs.items() if len(found := _accepted(stats))}
    if shares:
        yield Plot(
            "Drafted tokens accepted in a step",
            "Of the steps in which something was drafted.",
            bars(shares, "accepted tokens", 0, [colours[name] for name in shares]),
        )
    for column in list(next(iter(runs.values())).kinds):
        by_run = {n: _acceptance_lengths(stats.kinds.get(column, {})) for n, stats in runs.items()}
        by_run = {name: lengths for name, lengths in by_run.items() if lengths}
        if any(len(lengths) > 1 for lengths in by_run.values()):
            yield Plot(
                f"Acceptance length by {column}",
                "Tokens that a step gave when something was drafted; without a draft it is one.",
                ranking(by_run, _DRAFTED, [colours[name] for name in by_run]),
            )
    answers = {name: of.tokens for name, of in spans.items()}
    yield Plot("Lengths of answers", "In tokens.", histograms(answers, "tokens", by_name))
    seconds = {name: of.rows for name, of in spans.items()}
    yield Plot(
        "Time of a sample",
        "From its first pass to its last, beside the others of its batch.",
        histograms(seconds, "seconds", by_name),
    )


def _accepted(stats: RunStats) -> np.ndarray:
    """Of the steps with a draft, the share that accepted 0, 1, ... tokens; empty if there are none."""
    steps = np.array(stats.total.stats.histogram)
    return steps / steps.sum() if steps.sum() else np.zeros(0)


def _acceptance_lengths(kinds: Mapping[str, Kind]) -> dict[str, float]:
    """The mean acceptance length of each kind that has one, in ascending order."""
    lengths = {value: kind.stats.mean_acceptance_length for value, kind in kinds.items()}
    known = {value: length for value, length in lengths.items() if length is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))
