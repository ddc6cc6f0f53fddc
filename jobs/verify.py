"""`verify`: every file of an output against its plan, and on request answers against the model."""

import argparse
from collections.abc import Sequence

from jobs.folders import naming_output
from pipeline import storage
from pipeline.errors import InputError
from pipeline.failed_rows import write_errors
from pipeline.inspection import Finding, check_output, read_state
from pipeline.lease import Lease
from pipeline.parts import read_part
from pipeline.shards import read_shard

_TO_MEND = 4  # Exit code: as of a run that was interrupted.
_TOKENS_DIFFER = 1


def verify(arguments: Sequence[str]) -> int:
    """Check an output; returns the exit code: 0 if it is whole, 4 if something is to be made (again).

    Raises:
        InputError: there is no plan to hold it against.
    """
    given = parse_verify(arguments)
    with naming_output(given.output):
        state = read_state(given.output)
        if state.plan is None:
            raise InputError(f"output {given.output}: is not planned yet")
        findings = list(check_output(given.output, state.config, state.plan))
    for finding in findings:
        print(" ".join(finding.message.split()))
    if given.repair and findings:
        with naming_output(given.output), Lease(given.output):
            _set_aside(given.output, findings)
    num_pending = len(state.plan.shards) - len(state.done)
    print(
        f"{len(state.done)} of {len(state.plan.shards)} parts are there, "
        f"{len(findings)} finding{'' if len(findings) == 1 else 's'}"
        + ("; `generate` makes what is missing" if num_pending else "")
    )
    if given.replay:
        from jobs.replay import replay

        if replay(given.output, state, given.replay):
            return _TOKENS_DIFFER
    return _TO_MEND if findings or num_pending else 0


def parse_verify(arguments: Sequence[str]) -> argparse.Namespace:
    """What a command line asks for; raises SystemExit where it is none, or asks for help."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs verify",
        description="Check every file of an output folder, without a cluster.",
    )
    parser.add_argument("output", metavar="OUT", help="the run's output: a folder or a URI")
    parser.add_argument(
        "--repair",
        action="store_true",
        help="move damaged files to OUT/damaged, so that `generate` makes them again",
    )
    parser.add_argument(
        "--replay",
        type=_share,
        metavar="SHARE",
        help="generate this share of the rows again (one at least), here, and compare the tokens",
    )
    return parser.parse_args(arguments)


def _share(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and up to 1")
    return value


def _set_aside(output: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        if finding.uri is not None and storage.exists(finding.uri):
            name = finding.uri.rpartition("/")[2]
            storage.move(finding.uri, storage.join(output, "damaged", name))
            again = "made again" if finding.errors_of else "`generate` makes it again"
            print(f"moved {name} to {storage.join(output, 'damaged')}; {again}")
        if finding.errors_of:
            table, _ = read_part(output, finding.errors_of)
            write_errors(output, finding.errors_of, table, read_shard(output, finding.errors_of))
