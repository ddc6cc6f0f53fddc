"""A data set to the hub: against a stand-in that fails for a moment, or for good."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest

from jobs import push as push_module
from jobs.__main__ import main
from pipeline.admission import Admission, load_tokenizer
from tests.hub_stub import Hub, running_hub
from tests.outputs import commit, make_output
from workers.config import SamplingParams

# The hub's client hands files over in a way that its HTTP library is about to give up.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

ROWS = [{"id": f"r{i}", "prompt": f"p{i}"} for i in range(20)]


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(), 60, len(tokenizer))


@pytest.fixture
def output(admission: Admission, tmp_path: Path) -> Path:
    """A complete run in three parts."""
    make_output(admission, tmp_path / "out", ROWS, rows_per_shard=8)
    assert len(list((tmp_path / "out" / "data").iterdir())) == 3
    return tmp_path / "out"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(time, "sleep", lambda _: None)  # Pauses, the client's own among them.
    monkeypatch.setenv("HF_TOKEN", "writer")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def push(output: Path, *flags: str) -> int:
    return main(["push", str(output), "--repo", "me/set", *flags])


def contents(output: Path) -> dict[str, bytes]:
    return {f"data/{path.name}": path.read_bytes() for path in (output / "data").iterdir()}


def test_parts_and_a_card_and_nothing_else(
    output: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push(output) == 0
    assert capsys.readouterr().out.strip() == f"{hub.url}/datasets/me/set"
    there = hub.branches["main"]
    assert there.pop("README.md").startswith(b"---\nconfigs:")
    assert there == contents(output)
    assert hub.private is False


def test_what_is_there_is_not_uploaded_again(output: Path, hub: Hub) -> None:
    assert push(output, "--private") == 0
    assert hub.private is True
    assert len(hub.uploads) == 3
    assert push(output) == 0
    assert (len(hub.uploads), len(hub.commits)) == (3, 1)
    (output / "README.md").write_text("---\ntags: [mine]\n---\nMy own card.", encoding="utf-8")
    (output / "report.html").write_text("<p>", encoding="utf-8")
    assert push(output) == 0
    assert len(hub.uploads) == 3
    assert sorted(hub.commits[1]) == ["README.md", "report.html"]
    assert hub.branches["main"]["README.md"].endswith(b"My own card.")


def test_a_part_that_was_made_again_is_uploaded(
    admission: Admission, tmp_path: Path, hub: Hub
) -> None:
    output = tmp_path / "out"
    config, plan = make_output(admission, output, ROWS, rows_per_shard=8)
    assert push(output) == 0
    name = plan.shards[1].name
    commit(output, plan, name, config)  # With other times in it.
    (output / "README.md").write_bytes(hub.branches["main"]["README.md"])
    assert push(output) == 0
    assert hub.commits[1] == [f"data/part-{name}.parquet"]
    assert {k: v for k, v in hub.branches["main"].items() if k != "README.md"} == contents(output)


def test_many_parts_are_several_commits_and_the_card_is_in_the_last(
    output: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(push_module, "_MOST_FILES", 2)
    assert push(output, "--revision", "v1") == 0
    names = sorted(contents(output))
    assert [sorted(commit) for commit in hub.commits] == [names[:2], ["README.md", names[2]]]
    assert hub.branches["main"] == {}
    assert hub.branches["v1"].keys() == {*names, "README.md"}


@pytest.mark.parametrize("status", [0, 429, 500, 503])
@pytest.mark.parametrize("where", ["/repos/create", "/preupload/", "/batch", "/lfs/", "/commit/"])
def test_failures_that_pass(output: Path, hub: Hub, where: str, status: int) -> None:
    hub.failures.append([where, status, 2])
    assert push(output) == 0
    assert hub.failures[0][2] == 0
    assert {k: v for k, v in hub.branches["main"].items() if k != "README.md"} == contents(output)


@pytest.mark.parametrize("where", ["/repos/create", "/lfs/", "/commit/"])
def test_failures_that_stay(
    output: Path, hub: Hub, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.failures.append([where, 503, 10**6])
    assert push(output) == 4
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {hub.url}/datasets/me/set: the hub fails (503")
    assert error.endswith("the same command goes on")
    hub.failures.clear()
    assert push(output) == 0
    assert len(hub.uploads) == 3
    assert len(hub.commits) == 1


def test_a_hub_that_is_not_there(
    output: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert push(output) == 4
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: http://127.0.0.1:9/datasets/me/set: the hub cannot be reached")


def test_an_endpoint_that_is_none(
    output: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "nonsense")
    assert main(["push", str(output), "--repo", "me/data"]) == 2
    assert "HF_ENDPOINT nonsense: must begin with https://" in capsys.readouterr().err


@pytest.mark.parametrize(("token", "status"), [("nobody", 401), ("reader", 403)])
def test_a_token_that_may_not(
    output: Path,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    token: str,
    status: int,
) -> None:
    monkeypatch.setenv("HF_TOKEN", token)
    assert push(output) == 2
    told = capsys.readouterr().err
    assert len(told.splitlines()) == 1
    assert f"the hub refuses ({status}" in told
    assert "HF_TOKEN" in told
    assert hub.uploads == []


def test_a_name_that_is_none(output: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["push", str(output), "--repo", "a/b/c"]) == 2
    assert "Repo id must" in capsys.readouterr().err
    assert hub.asked == []


def test_a_run_that_is_not_complete(
    output: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = sorted((output / "data").iterdir())[1]
    lost.unlink()
    assert push(output) == 4
    assert "--partial uploads what there is" in capsys.readouterr().err
    assert hub.asked == []
    assert push(output, "--partial") == 0
    assert {k: v for k, v in hub.branches["main"].items() if k != "README.md"} == contents(output)
    assert main(["push", str(output / "nowhere"), "--repo", "me/set"]) == 2


def test_the_environment_names_the_hub(output: Path, hub: Hub) -> None:
    """In a process of its own, as a user starts it."""
    names = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "writer", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "jobs", "push", str(output), "--repo", "me/set"]
    done = subprocess.run(command, env=os.environ | names, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert hub.branches["main"].keys() == {*contents(output), "README.md"}
