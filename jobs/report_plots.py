"""The plots of a run's report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from pipeline.run_stats import Kind, RunStats, Spans

# Colours that stand out on white and on black; text, axes and grids are coloured by the page.
_BLUE, _GREEN, _AMBER = "#4c8dff", "#2fb380", "#e5a50a"
_NUM_BINS = 100
_HEIGHT = 280
_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}


@dataclass(frozen=True)
class Plot:
    """A figure with its heading, and a sentence on how to read it."""

    title: str
    note: str
    figure: go.Figure


def plot_run(stats: RunStats) -> Iterator[Plot]:
    """All plots that a run has numbers for."""
    spans = stats.spans
    if not len(spans.starts):
        return
    edges = spans.edges(_NUM_BINS)
    yield Plot(
        "Tokens per second",
        "Generated tokens, each answer's spread evenly over the time it took.",
        _area(edges, spans.over_time(spans.tokens, edges), _BLUE, "tokens/s"),
    )
    yield Plot(
        "Rows under way",
        "Samples generated at a time, all workers together. The slope at the end is the wait for the "
        "last of them.",
        _area(edges, spans.over_time(spans.ends - spans.starts, edges), _GREEN, "rows"),
    )
    yield from _plot_drafts(stats)
    yield Plot(
        "Lengths",
        "Tokens of prompts and of answers.",
        _histograms({"prompts": spans.prompt_tokens, "answers": spans.tokens}),
    )
    yield Plot(
        "Workers",
        "Samples under way on each device. In a gap it was not there, or had nothing to do.",
        _heat(spans, edges),
    )


def _plot_drafts(stats: RunStats) -> Iterator[Plot]:
    steps = np.array(stats.total.stats.histogram)
    if not steps.sum():
        return
    yield Plot(
        "Drafted tokens accepted in a step",
        "Of the steps in which something was drafted.",
        _bars(range(len(steps)), steps / steps.sum(), _BLUE, "accepted tokens"),
    )
    reached = steps[::-1].cumsum()[::-1][1:] / steps.sum()
    yield Plot(
        "Acceptance by position",
        "How often the first, the second, ... drafted token became part of the answer.",
        _bars(range(1, len(steps)), reached, _GREEN, "position in the draft"),
    )
    for column, kinds in stats.kinds.items():
        if len(lengths := _acceptance_lengths(kinds)) > 1:
            yield Plot(
                f"Acceptance length by {column}",
                "Tokens that a step gave when something was drafted; without a draft it is one.",
                _ranking(lengths),
            )


def _acceptance_lengths(kinds: Mapping[str, Kind]) -> dict[str, float]:
    """The mean acceptance length of each kind that has one, in ascending order."""
    lengths = {value: kind.stats.mean_acceptance_length for value, kind in kinds.items()}
    known = {value: length for value, length in lengths.items() if length is not None}
    return dict(sorted(known.items(), key=lambda item: item[1]))


def _times(edges: np.ndarray) -> tuple[np.ndarray, str]:
    """The middles of bins, from the beginning, and their unit."""
    middles = (edges[1:] + edges[:-1]) / 2 - edges[0]
    long = [(unit, seconds) for unit, seconds in _UNITS.items() if middles[-1] >= 2 * seconds]
    unit, seconds = long[-1] if long else ("seconds", 1)
    return middles / seconds, unit


def _area(edges: np.ndarray, values: np.ndarray, colour: str, unit: str) -> go.Figure:
    line = {"color": colour, "width": 2}
    times, time_unit = _times(edges)
    trace = go.Scatter(x=times, y=values, mode="lines", fill="tozeroy", line=line)
    trace.hovertemplate = f"%{{x:.1f}} {time_unit}<br>%{{y:.3s}} {unit}<extra></extra>"
    return _figure([trace], time_unit, unit)


def _bars(labels: Sequence[int], shares: np.ndarray, colour: str, axis: str) -> go.Figure:
    trace = go.Bar(x=list(labels), y=shares, marker_color=colour, texttemplate="%{y:.1%}")
    figure = _figure([trace], axis, "")
    return figure.update_yaxes(tickformat=".0%").update_xaxes(type="category")


def _ranking(values: Mapping[str, float]) -> go.Figure:
    names = [name if len(name) <= 24 else f"{name[:23]}…" for name in values]
    trace = go.Bar(x=list(values.values()), y=names, orientation="h", marker_color=_AMBER)
    trace.texttemplate = "%{x:.2f}"
    figure = _figure([trace], "tokens per step with a draft", "")
    figure.update_layout(height=max(_HEIGHT, 70 + 24 * len(values)))
    return figure.update_yaxes(type="category")


def _histograms(values: Mapping[str, np.ndarray]) -> go.Figure:
    traces = []
    for (name, lengths), colour in zip(values.items(), (_AMBER, _BLUE), strict=True):
        counts, edges = np.histogram(lengths, bins=40)
        middles, widths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
        traces.append(
            go.Bar(x=middles, y=counts, width=widths, name=name, marker_color=colour, opacity=0.75)
        )
    figure = _figure(traces, "tokens", "samples")
    return figure.update_layout(barmode="overlay", showlegend=True)


def _heat(spans: Spans, edges: np.ndarray) -> go.Figure:
    names = sorted(set(spans.devices))
    rows = []
    for name in names:
        mine = spans.where(spans.devices == name)
        rows.append(mine.over_time(mine.ends - mine.starts, edges))
    times, unit = _times(edges)
    trace = go.Heatmap(x=times, y=names, z=rows, colorscale="Viridis", zmin=0)
    trace.hovertemplate = f"%{{y}}<br>%{{x:.1f}} {unit}<br>%{{z:.1f}} rows<extra></extra>"
    figure = _figure([trace], unit, "")
    return figure.update_layout(height=max(150, 90 + 22 * len(names)))


def _figure(traces: Sequence[Any], x: str, y: str) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 13},
        showlegend=False,
        legend={"orientation": "h", "y": 1.12, "x": 0},
        bargap=0.15,
    )
    figure.update_xaxes(title=x, automargin=True, zeroline=False, showgrid=False)
    return figure.update_yaxes(title=y, automargin=True, zeroline=False, rangemode="tozero")
