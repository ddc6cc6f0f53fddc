"""Reports as HTML pages, which need nothing else: of a run, and of two side by side."""

from collections.abc import Iterable
from importlib import resources
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from jobs.comparison import Comparison
from jobs.figures import Plot
from jobs.report_facts import Facts, number, percent, ratio
from jobs.report_plots import plot_run, plot_runs
from pipeline.run_stats import RunStats

_CONFIG = {"displaylogo": False, "responsive": True, "displayModeBar": False}


def render_page(facts: Facts, stats: RunStats) -> str:
    """The page of a run: figures, what ran, plots, failures, kinds of rows, answers."""
    return _render(
        "report.html.j2",
        plot_run(stats),
        title=f"{facts.model}: {stats.num_rows:,} rows",
        subtitle=facts.when,
        figures=facts.figures,
        facts=facts.lines,
        errors=[(kind, n, stats.error_examples[kind]) for kind, n in stats.errors.most_common()],
        kinds=stats.kinds,
        answers=stats.answers,
        slowest=stats.slowest,
        number=number,
        percent=percent,
        ratio=ratio,
        prompt_of=prompt_of,
    )


def render_comparison(found: Comparison) -> str:
    """The page of two runs: ratios, tokens, what differs, plots over each other."""
    runs = dict(zip(found.names, (side.stats for side in found.sides), strict=True))
    return _render(
        "compare.html.j2",
        plot_runs(runs),
        title=f"{found.names[0]} and {found.names[1]}",
        subtitle="; ".join(
            f"{name}: {side.facts.model}, {side.stats.num_rows:,} rows, {side.facts.when}"
            for name, side in zip(found.names, found.sides, strict=True)
        ),
        names=found.names,
        figures=found.figures,
        differences=found.differences,
        equal=found.equal,
        verdict=found.verdict,
        reasons=found.reasons,
        promise_broken=found.is_broken,
        unequal=found.agreement.unequal,
        unequal_title=found.unequal_title,
    )


def _render(template: str, plots: Iterable[Plot], **values: Any) -> str:
    files = resources.files("jobs")
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        loader=jinja2.FunctionLoader(lambda name: files.joinpath(name).read_text("utf-8")),
    )
    drawn = [
        (plot, plot.figure.to_html(full_html=False, include_plotlyjs=False, config=_CONFIG))
        for plot in plots
    ]
    script = get_plotlyjs() if drawn else ""
    return environment.get_template(template).render(values, plots=drawn, script=script)


def prompt_of(row: dict[str, Any]) -> str:
    """What a row asked, for people."""
    if row["messages"]:
        return "\n".join(f"{message['role']}: {message['content']}" for message in row["messages"])
    return row["prompt"] or ""
