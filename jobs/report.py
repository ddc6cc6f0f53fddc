"""`report`: what a run did, as a page or a data-set card, from its parts; or two runs side by side."""

import argparse
from collections.abc import Sequence

from jobs.cli import say
from jobs.comparison import compare
from jobs.folders import naming_output
from jobs.report_card import render_card, render_comparison_card
from jobs.report_facts import gather_facts
from jobs.report_page import render_comparison, render_page
from pipeline import storage
from pipeline.errors import InputError
from pipeline.parts import list_parts
from pipeline.run_stats import read_stats

_NAMES = {"html": "report.html", "md": "README.md"}
_COMPARISONS = {"html": "compare.html", "md": "compare.md"}


def report(arguments: Sequence[str]) -> int:
    """Write the report of a run into its folder, or of two runs into the first; returns the exit code.

    Raises:
        InputError: there is nothing to report on.
        DamagedPartError: a part cannot be read.
        DamagedOutputError: of two runs, a plan cannot be read.
    """
    given = _parse(arguments)
    for output in given.output:
        with naming_output(output):
            if not list_parts(output):
                raise InputError(f"output {output}: has no parts to report on")
    if len(given.output) == 2:
        text = _compare(given.output[0], given.output[1], given.format)
    else:
        text = describe_run(given.output[0], given.format)
    names = _NAMES if len(given.output) == 1 else _COMPARISONS
    uri = given.into or storage.join(given.output[0], names[given.format])
    with naming_output(uri):
        storage.write_atomic(uri, text.encode())
    say(f"wrote {uri}")
    return 0


def describe_run(output: str, form: str) -> str:
    """A run's report, as `html` or `md`; raises DamagedPartError or InputError."""
    with naming_output(output):
        stats = read_stats(output)
        facts = gather_facts(output, stats)
    return render_page(facts, stats) if form == "html" else render_card(facts, stats)


def _compare(one: str, other: str, form: str) -> str:
    with naming_output(f"{one} or {other}"):
        found = compare(one, other)
    say(found.verdict)
    return render_comparison(found) if form == "html" else render_comparison_card(found)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs report",
        description="What a run did, from its parts: a page with plots, or a card for its data set. "
        "A run that is still going can be looked at, too. Of two runs: both side by side, and whether "
        "their tokens are equal where that is promised.",
    )
    parser.add_argument(
        "output", metavar="OUT", nargs="+", help="the run's output: a folder or a URI; or two"
    )
    parser.add_argument(
        "--format",
        choices=list(_NAMES),
        default="html",
        help="html: OUT/report.html, one file that needs no other; md: OUT/README.md, a card as the "
        "Hugging Face hub shows it. Of two runs: compare.html or compare.md in the first",
    )
    parser.add_argument("--into", metavar="FILE", help="write there instead: a path or a URI")
    given = parser.parse_args(arguments)
    if len(given.output) > 2:
        parser.error("one run, or two")
    return given
