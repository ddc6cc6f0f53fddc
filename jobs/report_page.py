"""A run's report as one HTML page, which needs nothing else."""

from importlib import resources
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from jobs.report_facts import Facts, number, percent, ratio
from jobs.report_plots import plot_run
from pipeline.run_stats import RunStats

_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}


def render_page(facts: Facts, stats: RunStats) -> str:
    """The page: figures, what ran, plots, failures, kinds of rows, answers."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    source = resources.files("jobs").joinpath("report.html.j2").read_text(encoding="utf-8")
    plots = [
        (plot, plot.figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG))
        for plot in plot_run(stats)
    ]
    return environment.from_string(source).render(
        title=f"{facts.model}: {stats.num_rows:,} rows",
        subtitle=facts.when,
        tiles=facts.tiles,
        facts=facts.lines,
        plots=plots,
        errors=[(kind, n, stats.error_examples[kind]) for kind, n in stats.errors.most_common()],
        kinds=stats.kinds,
        answers=stats.answers,
        slowest=stats.slowest,
        script=get_plotlyjs() if plots else "",
        number=number,
        percent=percent,
        ratio=ratio,
        prompt_of=prompt_of,
    )


def prompt_of(row: dict[str, Any]) -> str:
    """What a row asked, for people."""
    if row["messages"]:
        return "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])
    return row["prompt"] or ""
