"""`demo`: the main job on the demo model and the example prompts, and what came out."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from jobs.cli import parse_run
from jobs.generate import generate
from jobs.models import fetch_demo_model
from pipeline import storage
from pipeline.errors import InputError
from workers.stats import AcceptanceStats

_PROMPTS = Path(__file__).parent.parent / "examples" / "prompts.jsonl"
_SHOWN = ("rewrite", "code", "summarize")


def demo(arguments: Sequence[str]) -> int:
    """Run `generate` on the examples (further flags are passed on) and show the result."""
    if not _PROMPTS.is_file():
        raise InputError(f"{_PROMPTS}: missing; run the demo from a clone of the project")
    output = Path("outputs").resolve() / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    model = fetch_demo_model()
    given = ["--model", str(model), "--input", str(_PROMPTS), "--output", str(output)]
    flags = [*given, "--max-tokens", "128", *arguments]
    code = generate(flags)
    if code == 0:
        show(storage.local_path(parse_run(flags).output))
    return code


def show(output: Path) -> None:
    """Print a table of the output by task, and three answers."""
    parts = sorted((output / "data").glob("*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    console = Console()
    console.print(_table(rows))
    for task in _SHOWN:
        answer = next((r for r in rows if r["task"] == task and r["generated_text"]), None)
        if answer is not None:
            console.print(_panel(answer))
    console.print(f"The data set is in {output / 'data'} (Parquet).", soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="SmolLM2-135M-Instruct, W8A8, drafts verified by the quantized model")
    table.add_column("task", no_wrap=True)
    for name in ("samples", "errors", "tokens", "steps", "tok/step", "accept", "length"):
        table.add_column(name, justify="right")
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for task in tasks:
        table.add_row(*_cells(task, [row for row in rows if row["task"] == task]))
    table.add_section()
    table.add_row(*_cells("all", rows), style="bold")
    return table


def _cells(name: str, rows: list[dict[str, Any]]) -> list[str]:
    answered = [row for row in rows if row["finish_reason"] != "error"]
    stats = AcceptanceStats()
    for row in answered:
        stats += AcceptanceStats(
            row["num_steps"], row["num_draft_tokens"], tuple(row["acceptance_histogram"])
        )
    tokens = sum(row["num_generated_tokens"] for row in answered)
    rate, length = stats.draft_acceptance_rate, stats.mean_acceptance_length
    return [
        name,
        str(len(rows)),
        str(len(rows) - len(answered)),
        str(tokens),
        str(stats.num_steps),
        f"{tokens / stats.num_steps:.2f}" if stats.num_steps else "-",
        f"{rate:.0%}" if rate is not None else "-",
        f"{length:.2f}" if length is not None else "-",
    ]


def _panel(row: dict[str, Any]) -> Panel:
    asked = row["prompt"] or row["messages"][-1]["content"]
    text = Text(asked.strip() + "\n\n", style="dim") + Text(row["generated_text"].strip())
    counts = (
        f"{row['num_generated_tokens']} tokens in {row['num_steps']} steps, "
        f"{row['num_accepted_draft_tokens']} of {row['num_draft_tokens']} drafted accepted"
    )
    return Panel(text, title=row["id"], title_align="left", subtitle=counts, subtitle_align="right")
