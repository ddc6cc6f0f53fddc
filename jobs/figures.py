"""The kinds of figures that reports draw: one or several named series each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from pipeline.spans import WorkerSpans

# Colours that stand out on white and on black; text, axes and grids are coloured by the page.
BLUE, GREEN, AMBER = "#4c8dff", "#2fb380", "#e5a50a"
_HEIGHT = 280
_UNITS = {"seconds": 1, "minutes": 60, "hours": 3600}
_NUM_BINS = 40


@dataclass(frozen=True)
class Plot:
    """A figure with its heading, and a sentence on how to read it."""

    title: str
    note: str
    figure: go.Figure


def over_time(
    series: Mapping[str, tuple[np.ndarray, np.ndarray]],
    unit: str,
    colours: Sequence[str] = (BLUE, AMBER),
) -> go.Figure:
    """Lines over time; a series is edges in seconds [n + 1], and values between them [n]."""
    longest = max((edges for edges, _ in series.values()), key=lambda edges: edges[-1] - edges[0])
    _, time_unit = _middles(longest)
    traces = []
    for (name, (edges, values)), colour in zip(series.items(), colours, strict=False):
        times, _ = _middles(edges, time_unit)
        line = {"color": colour, "width": 2}
        trace = go.Scatter(x=times, y=values, name=name, mode="lines", fill="tozeroy", line=line)
        named = f"{name}<br>" if len(series) > 1 else ""
        trace.hovertemplate = f"{named}%{{x:.1f}} {time_unit}<br>%{{y:.3s}} {unit}<extra></extra>"
        traces.append(trace)
    return _figure(traces, time_unit, unit)


def bars(
    series: Mapping[str, np.ndarray],
    axis: str,
    first: int = 0,
    colours: Sequence[str] = (BLUE, AMBER),
) -> go.Figure:
    """Shares [n], of whole numbers from the first on."""
    traces = []
    for (name, shares), colour in zip(series.items(), colours, strict=False):
        labels = list(range(first, first + len(shares)))
        trace = go.Bar(x=labels, y=shares, name=name, marker_color=colour)
        traces.append(trace.update(texttemplate="%{y:.0%}", textposition="outside", textangle=0))
    figure = _figure(traces, axis, "")
    most = max(float(shares.max(initial=0)) for shares in series.values())
    return figure.update_yaxes(tickformat=".0%", range=[0, 1.15 * most or 1]).update_xaxes(
        type="category"
    )


def ranking(
    series: Mapping[str, Mapping[str, float]], axis: str, colours: Sequence[str] = (AMBER, BLUE)
) -> go.Figure:
    """A bar for each name, the first below."""
    traces = []
    for (series_name, values), colour in zip(series.items(), colours, strict=False):
        names = [name if len(name) <= 24 else f"{name[:23]}…" for name in values]
        trace = go.Bar(
            x=list(values.values()), y=names, name=series_name, orientation="h", marker_color=colour
        )
        traces.append(trace.update(texttemplate="%{x:.2f}", textposition="auto"))
    num_bars = sum(len(values) for values in series.values())
    figure = _figure(traces, axis, "").update_yaxes(type="category", ticksuffix=" ")
    return figure.update_layout(height=max(_HEIGHT, 80 + 24 * num_bars))


def histograms(
    series: Mapping[str, np.ndarray],
    axis: str,
    colours: Sequence[str] = (AMBER, BLUE),
) -> go.Figure:
    """How many samples lie where, over each other, in the same bins."""
    most = max(float(values.max(initial=0)) for values in series.values())
    edges = np.linspace(0, most or 1, _NUM_BINS + 1)
    middles, width = (edges[1:] + edges[:-1]) / 2, edges[1]
    traces = []
    for (name, values), colour in zip(series.items(), colours, strict=False):
        counts, _ = np.histogram(values, edges)
        trace = go.Bar(x=middles, y=counts, width=width, name=name, marker_color=colour)
        named = f"{name}<br>" if len(series) > 1 else ""
        trace.hovertemplate = f"{named}%{{x:.3s}} {axis}<br>%{{y}} samples<extra></extra>"
        traces.append(trace.update(opacity=0.7))
    return _figure(traces, axis, "samples").update_layout(barmode="overlay")


def heat(workers: Mapping[str, WorkerSpans], edges: np.ndarray) -> go.Figure:
    """A line of colours for each worker: the share of its batch, or samples if a batch is not known."""
    is_share = all(worker.max_num_seqs for worker in workers.values())
    rows = [
        worker.spans.over_time(worker.spans.rows, edges)
        / (worker.max_num_seqs if is_share and worker.max_num_seqs else 1)
        for worker in workers.values()
    ]
    times, unit = _middles(edges)
    trace = go.Heatmap(x=times, y=list(workers), z=rows, colorscale="Viridis", zmin=0, ygap=2)
    value = "%{z:.0%} of its batch" if is_share else "%{z:.1f} rows"
    trace.hovertemplate = f"%{{y}}<br>%{{x:.1f}} {unit}<br>{value}<extra></extra>"
    bar: dict[str, Any] = {"thickness": 10, "outlinewidth": 0}
    trace.colorbar = bar | ({"tickformat": ".0%"} if is_share else {})
    if is_share:
        trace.zmax = 1
    figure = _figure([trace], unit, "").update_yaxes(
        type="category", ticksuffix=" ", autorange="reversed"
    )
    return figure.update_layout(height=max(150, 90 + 26 * len(rows)))


def _middles(edges: np.ndarray, unit: str = "") -> tuple[np.ndarray, str]:
    """The middles of bins, from the beginning, and their unit (by default one that suits them)."""
    middles = (edges[1:] + edges[:-1]) / 2 - edges[0]
    long = [name for name, seconds in _UNITS.items() if middles[-1] >= 2 * seconds]
    unit = unit or (long[-1] if long else "seconds")
    return middles / _UNITS[unit], unit


def _figure(traces: Sequence[Any], x: str, y: str) -> go.Figure:
    figure = go.Figure(traces)
    figure.update_layout(
        height=_HEIGHT,
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "inherit", "size": 13},
        showlegend=len(traces) > 1,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        bargap=0.15,
        hoverlabel={"bgcolor": "#1c2430", "bordercolor": "#1c2430"},
        dragmode=False,  # A finger on a plot scrolls the page.
    )
    figure.update_xaxes(title=x, automargin=True, zeroline=False, showgrid=False)
    return figure.update_yaxes(title=y, automargin=True, zeroline=False, rangemode="tozero")
