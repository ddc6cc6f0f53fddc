"""`report`: what a run did, as a page to look at or a data-set card, from its parts."""

import argparse
from collections.abc import Sequence

from jobs.cli import say
from jobs.folders import naming_output
from jobs.report_card import render_card
from jobs.report_facts import gather_facts
from jobs.report_page import render_page
from pipeline import storage
from pipeline.errors import InputError
from pipeline.run_stats import read_stats

_NAMES = {"html": "report.html", "md": "README.md"}


def report(arguments: Sequence[str]) -> int:
    """Write the report of a run into its folder; returns the exit code.

    Raises:
        InputError: there is nothing to report on.
        DamagedPartError: a part cannot be read.
    """
    given = _parse(arguments)
    with naming_output(given.output):
        stats = read_stats(given.output)
        if not stats.num_rows:
            raise InputError(f"output {given.output}: has no parts to report on")
        facts = gather_facts(given.output, stats)
    render = render_page if given.format == "html" else render_card
    uri = given.into or storage.join(given.output, _NAMES[given.format])
    with naming_output(uri):
        storage.write_atomic(uri, render(facts, stats).encode())
    say(f"wrote {uri}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs report",
        description="What a run did, from its parts: a page with plots, or a card for its data set. "
        "A run that is still going can be looked at, too.",
    )
    parser.add_argument("output", metavar="OUT", help="the run's output: a folder or a URI")
    parser.add_argument(
        "--format",
        choices=list(_NAMES),
        default="html",
        help="html: OUT/report.html, one file that needs no other; md: OUT/README.md, a card as the "
        "Hugging Face hub shows it",
    )
    parser.add_argument("--into", metavar="FILE", help="write there instead: a path or a URI")
    return parser.parse_args(arguments)
