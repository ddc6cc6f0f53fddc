"""Reports as Markdown: of two runs side by side; and of one as a data-set card, with the head that the
Hugging Face hub reads.
"""

import yaml

from jobs.comparison import Comparison
from jobs.report_facts import Facts, number, percent, ratio
from pipeline.run_stats import RunStats

_SIZES = {
    1_000: "n<1K",
    10_000: "1K<n<10K",
    100_000: "10K<n<100K",
    1_000_000: "100K<n<1M",
    10_000_000: "1M<n<10M",
    100_000_000: "10M<n<100M",
    1_000_000_000: "100M<n<1B",
}


def render_card(facts: Facts, stats: RunStats) -> str:
    """The card."""
    size = next((name for most, name in _SIZES.items() if stats.num_rows < most), "1B<n<10B")
    head = {
        "configs": [{"config_name": "default", "data_files": "data/*.parquet"}],
        "size_categories": [size],
        "tags": ["synthetic", "quasar-batch"],
    }
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False)}---",
        f"# {stats.num_rows:,} rows by {facts.model}",
        f"Generated {facts.when} with [Quasar Batch](https://github.com/quasar-batch/quasar-batch).",
        table(["", ""], [[figure.name, figure.text] for figure in facts.figures]),
        "## What ran",
        table(["", ""], [[name, value] for name, value in facts.lines.items()]),
    ]
    for column, kinds in stats.kinds.items():
        rows = [
            [
                value or "(none)",
                f"{kind.num_samples:,}",
                f"{kind.num_errors:,}",
                f"{kind.num_tokens:,}",
                ratio(kind.num_tokens, kind.stats.num_steps),
                number(kind.stats.mean_acceptance_length),
                percent(kind.stats.draft_acceptance_rate),
            ]
            for value, kind in kinds.items()
        ]
        names = [
            column,
            "samples",
            "failed",
            "tokens",
            "tokens/step",
            "acceptance length",
            "accepted",
        ]
        parts += [f"## By {column}", table(names, rows)]
    if stats.errors:
        failures = [[k, f"{n:,}", stats.error_examples[k]] for k, n in stats.errors.most_common()]
        parts += ["## Failures", table(["kind", "samples", "for example"], failures)]
    return "\n\n".join(parts) + "\n"


def render_comparison_card(found: Comparison) -> str:
    """Two runs side by side, as Markdown."""
    names = list(found.names)
    parts = [
        f"# {names[0]} and {names[1]}",
        table(
            ["", *names, "second / first"],
            [[pair.name, pair.first, pair.second, pair.ratio] for pair in found.figures],
        ),
        "## Tokens",
        _cell(found.verdict),
        *(f"- {_cell(reason)}" for reason in found.reasons),
    ]
    if found.agreement.unequal:
        rows = [
            [row.id, str(row.sample_idx), str(row.num_common), *map(str, row.num_tokens)]
            for row in found.agreement.unequal
        ]
        parts += [f"{found.unequal_title}:"]
        parts += [table(["id", "sample", "tokens in common", *names], rows)]
    if found.differences:
        differences = [[pair.name, pair.first, pair.second] for pair in found.differences]
        parts += ["## What differs", table(["", *names], differences)]
    return "\n\n".join(parts) + "\n"


def table(names: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """A table's cell: on one line, and nothing in it is Markdown's or HTML's."""
    for found, written in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ("|", "\\|")):
        text = text.replace(found, written)
    return " ".join(text.split())
