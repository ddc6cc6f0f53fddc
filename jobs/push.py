"""`push`: a run's data set to the Hugging Face hub, parts and card, as far as they are not there yet."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import logging
from huggingface_hub.utils.tqdm import disable_progress_bars

from jobs.cli import say
from jobs.folders import naming_output
from jobs.report import describe_run
from pipeline import storage
from pipeline.errors import DamagedPartError, InputError, InterruptedRunError
from pipeline.inspection import State, read_state
from pipeline.parts import part_uri

T = TypeVar("T")

# A commit takes so many files at most, or bytes: those that are not on a local disk are in memory.
_MOST_FILES, _MOST_BYTES = 256, 256 * 2**20
# Before another try; the client itself tries most calls six times already.
_PAUSES = (1.0, 5.0, 20.0)
_PASSING = (408, 412, 423, 425, 429)  # 412: somebody else committed in between.


def push(arguments: Sequence[str]) -> int:
    """Upload a run's parts and its card; returns the exit code.

    Raises:
        InputError: there is no run, or the hub refuses.
        InterruptedRunError: the run is not complete, or the hub does not answer.
        DamagedPartError: a part is not what it was.
    """
    given = _parse(arguments)
    with naming_output(given.output):
        state = read_state(given.output)
    if state.damaged:
        raise DamagedPartError(state.damaged[0])
    if not state.done or not (state.is_complete or given.partial):
        raise InterruptedRunError(
            f"output {given.output}: the run is not complete (--partial uploads what there is)"
        )
    disable_progress_bars()
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    hub = _Hub(given.repo, given.revision)
    hub.make(private=given.private)
    num_files, whole = 0, len(state.done)
    for files in _batches(given.output, state):
        hub.commit(
            files, f"{num_files + 1} to {num_files + len(files)} of {whole} parts and a card"
        )
        num_files += len(files)
        say(f"{min(num_files, whole)} of {whole} parts are there")
    print(f"{hub.url}")
    return 0


def _batches(output: str, state: State) -> Iterator[list[CommitOperationAdd]]:
    """The files to be there, in the order of the plan; the card comes last, when all is true."""
    files: list[CommitOperationAdd] = []
    num_bytes = 0
    assert state.plan is not None
    for shard in state.plan.shards:
        if shard.name not in state.done:
            continue
        uri = part_uri(output, shard.name)
        if len(files) >= _MOST_FILES or num_bytes >= _MOST_BYTES:
            yield files
            files, num_bytes = [], 0
        files.append(_file(uri, f"data/{uri.rpartition('/')[2]}"))
        num_bytes += state.done[shard.name].num_bytes
    with naming_output(output):
        card = storage.read_bytes(storage.join(output, "README.md"))
        page = storage.read_bytes(storage.join(output, "report.html"))
    if card is None:
        card = describe_run(output, "md").encode()
    files.append(CommitOperationAdd("README.md", card))
    if page is not None:
        files.append(CommitOperationAdd("report.html", page))
    yield files


def _file(uri: str, name: str) -> CommitOperationAdd:
    if storage.is_local(uri):
        return CommitOperationAdd(name, str(storage.local_path(uri)))
    with naming_output(uri):
        content = storage.read_bytes(uri)
    if content is None:
        raise DamagedPartError(f"{uri}: is missing")
    return CommitOperationAdd(name, content)


class _Hub:
    """A data set on the hub, and calls that are tried again where that may help."""

    def __init__(self, repo: str, revision: str | None) -> None:
        endpoint = os.environ.get("HF_ENDPOINT") or None
        if endpoint and not endpoint.startswith(("http://", "https://")):
            raise InputError(f"HF_ENDPOINT {endpoint}: must begin with https:// or http://")
        self._api = HfApi(endpoint=endpoint)
        self._repo, self._revision = repo, revision
        self.url = f"{self._api.endpoint}/datasets/{repo}"

    def make(self, *, private: bool) -> None:
        """The data set, and the branch, unless they are there."""
        api, repo, branch = self._api, self._repo, self._revision
        visibility = private or None  # None: as the owner has it set.
        self._persist(
            lambda: api.create_repo(repo, repo_type="dataset", private=visibility, exist_ok=True)
        )
        if branch is not None:
            self._persist(
                lambda: api.create_branch(repo, branch=branch, repo_type="dataset", exist_ok=True)
            )

    def commit(self, files: list[CommitOperationAdd], message: str) -> None:
        """Upload the files that are not there, or differ."""
        self._persist(
            lambda: self._api.create_commit(
                self._repo,
                [CommitOperationAdd(f.path_in_repo, f.path_or_fileobj) for f in files],
                commit_message=message,
                repo_type="dataset",
                revision=self._revision,
            )
        )

    def _persist(self, call: Callable[[], T]) -> T:
        """Call, and again if the failure may pass; raises InputError or InterruptedRunError."""
        for pause in (*_PAUSES, None):
            try:
                return call()
            except Exception as error:
                told, may_pass = _judge(error)
                if told is None:
                    raise
                if not may_pass:
                    raise InputError(f"{self.url}: {told}") from error
                if pause is None:
                    raise InterruptedRunError(
                        f"{self.url}: {told}; what is uploaded stays there, and the same command goes on"
                    ) from error
                say(f"{told}; another try in {pause:g} s")
                time.sleep(pause)
        raise AssertionError


def _judge(error: BaseException) -> tuple[str | None, bool]:
    """What went wrong (None: neither the hub nor the network is to blame), and whether it may pass.

    The client wraps some errors, and has different libraries for HTTP from version to version.
    """
    known: BaseException | None = error
    while known is not None:
        response = getattr(known, "response", None)
        if response is not None:
            return _judge_answer(known, response.status_code)
        if type(known).__module__.partition(".")[0] in ("httpx", "httpx2"):
            return f"the hub cannot be reached ({_line(known)})", True
        if isinstance(known, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE is set; unset it to upload", False
        known = known.__cause__
    return (_line(error), False) if isinstance(error, ValueError) else (None, False)


def _judge_answer(error: BaseException, status: int) -> tuple[str, bool]:
    told = f"{status}: {getattr(error, 'server_message', None) or _line(error)}"
    if status >= 500 or status in _PASSING:
        return f"the hub fails ({told})", True
    if status in (401, 403):
        return (
            f"the hub refuses ({told}); put a token that may write there into HF_TOKEN "
            "(huggingface.co/settings/tokens)",
            False,
        )
    return f"the hub refuses ({told})", False


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jobs push",
        description="Upload a run's data set to the Hugging Face hub: data/*.parquet, the card "
        "(OUT/README.md, or one that is made), and OUT/report.html if it is there. What the hub has is "
        "not uploaded again. HF_TOKEN holds the token, HF_ENDPOINT another hub.",
    )
    parser.add_argument("output", metavar="OUT", help="the run's output: a folder or a URI")
    parser.add_argument("--repo", metavar="NAME/DATASET", required=True, help="made if need be")
    parser.add_argument(
        "--private", action="store_true", help="only you see it; if it is made by this command"
    )
    parser.add_argument("--revision", metavar="BRANCH", help="made if need be; the default is main")
    parser.add_argument("--partial", action="store_true", help="upload what is done so far")
    return parser.parse_args(arguments)
