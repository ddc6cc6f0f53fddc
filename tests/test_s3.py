"""Object storage, through the protocol: a server on the loopback that speaks S3."""

import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import huggingface_hub
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from jobs.__main__ import main
from pipeline import lease as lease_module
from pipeline import storage
from pipeline.admission import Admission, load_tokenizer
from pipeline.errors import InputError
from pipeline.failpoints import VARIABLE
from pipeline.lease import FILE, Lease
from pipeline.parts import list_parts, part_uri
from pipeline.sources import find_sources, read_rows
from tests.conftest import run_jobs
from tests.hub_stub import running_hub
from tests.outputs import make_output
from workers.config import SamplingParams

BUCKET = "s3://data-sets"


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """The environment in which S3 is a server of this machine."""
    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    moto.stop()


@pytest.fixture(autouse=True)
def bucket(server: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET.removeprefix("s3://"))


def put(name: str, content: bytes) -> str:
    uri = f"{BUCKET}/{name}"
    storage.write_atomic(uri, content)
    return uri


def test_files_are_listed_moved_and_removed() -> None:
    uri = put("files/a.txt", b"abc")
    deep = put("files/deep/b.txt", b"d")
    assert storage.list_files(f"{BUCKET}/files") == {uri: 3, deep: 1}
    assert storage.list_files(f"{BUCKET}/files/") == {uri: 3, deep: 1}
    assert storage.list_files(f"{BUCKET}/none") == {}
    assert storage.is_folder(f"{BUCKET}/files")
    assert not storage.is_folder(uri)
    assert not storage.is_folder(f"{BUCKET}/none")
    assert storage.is_empty_folder(f"{BUCKET}/none")
    assert not storage.is_empty_folder(f"{BUCKET}/files")
    assert storage.is_empty_folder(f"{BUCKET}/files", but=["a.txt", "b.txt"])
    storage.move(uri, f"{BUCKET}/elsewhere/c.txt")
    assert storage.read_bytes(uri) is None
    assert storage.read_bytes(f"{BUCKET}/elsewhere/c.txt") == b"abc"
    for _ in range(2):
        storage.remove(f"{BUCKET}/elsewhere/c.txt")
        assert not storage.exists(f"{BUCKET}/elsewhere/c.txt")


def test_an_upload_that_fails_leaves_what_was_there() -> None:
    uri = put("whole.txt", b"old")

    def fail_midway() -> None:
        with storage.open_write(uri) as file:
            file.write(b"new")
            raise RuntimeError("midway")

    with pytest.raises(OSError, match="midway"):
        fail_midway()
    assert storage.read_bytes(uri) == b"old"


def test_sources() -> None:
    first = put("in/a.jsonl", b'{"prompt": "a"}\n')
    second = put("in/deep/b.csv", b"prompt\nb\n")
    put("in/README.md", b"")
    assert find_sources([f"{BUCKET}/in"]).uris == (first, second)
    assert find_sources([f"{BUCKET}/in"]).ignored == (f"{BUCKET}/in/README.md",)
    assert find_sources([f"{BUCKET}/in/*.jsonl"]).uris == (first,)
    assert find_sources([f"{BUCKET}/in/**/*.csv", first]).uris == (second, first)
    assert [row.columns for uri in (first, second) for row in read_rows(uri)] == [
        {"prompt": "a"},
        {"prompt": "b"},
    ]
    for missing in ("none.jsonl", "none", "none/*.jsonl"):
        with pytest.raises(InputError, match="none"):
            find_sources([f"{BUCKET}/{missing}"])


def test_a_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "_SETTLE_SECONDS", 0.05)
    output = f"{BUCKET}/leased"
    with Lease(output, 0.1) as lease:
        with pytest.raises(InputError, match="is in use by"), Lease(output, 0.1):
            pass
        lease.check()
    assert storage.list_files(output) == {}


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_run_in_a_bucket_is_reported_on_compared_and_pushed(
    tiny_checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tokenizer = load_tokenizer(tiny_checkpoint)
    admission = Admission(tokenizer, SamplingParams(), 60, len(tokenizer))
    rows = [{"id": f"r{i}", "prompt": f"p{i}"} for i in range(10)]
    make_output(admission, tmp_path / "out", rows)
    output, files = f"{BUCKET}/pushed", [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    for file in files:
        put(f"pushed/{file.relative_to(tmp_path / 'out').as_posix()}", file.read_bytes())
    assert main(["report", output]) == 0
    page = storage.read_bytes(f"{output}/report.html")
    assert page is not None
    assert main(["report", output, str(tmp_path / "out")]) == 0
    assert "all 10 samples that both runs answered are equal" in capsys.readouterr().err
    assert storage.exists(f"{output}/compare.html")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", "writer")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        assert main(["push", output, "--repo", "me/set"]) == 0
    parts = {f"data/{p.name}": p.read_bytes() for p in (tmp_path / "out" / "data").iterdir()}
    assert hub.branches["main"].pop("README.md").startswith(b"---\n")
    assert hub.branches["main"] == parts | {"report.html": page}


@pytest.mark.ray
def test_a_run_from_bucket_to_bucket_whose_driver_is_killed(
    server: dict[str, str], tiny_checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "".join(f'{{"prompt": "row {i}", "n": {i}}}\n' for i in range(30))
    source, output = put("prompts/a.jsonl", lines.encode()), f"{BUCKET}/out"
    given: tuple[Any, ...] = ("--model", tiny_checkpoint, "--input", f"{BUCKET}/prompts")
    given += ("--output", output, "--max-tokens", 4, "--recipe", "rtn")
    given += ("--data.rows_per_shard", 8, "--sampling.ignore_eos")
    killed = run_jobs("generate", *given, **server, **{VARIABLE: "part-listed"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = {part: storage.read_bytes(part_uri(output, part)) for part in list_parts(output)}
    assert 1 <= len(done) <= 4
    assert storage.exists(f"{output}/{FILE}")

    again = run_jobs("generate", *given, "--resume", "always", **server)
    assert again.returncode == 0, again.stderr
    assert "of them done" in again.stderr
    assert main(["verify", output]) == 0
    parts = sorted(list_parts(output))
    rows = [
        row
        for part in parts
        for row in pq.read_table(
            io.BytesIO(storage.read_bytes(part_uri(output, part)) or b"")
        ).to_pylist()
    ]
    assert [row["n"] for row in rows] == list(range(30))
    assert all(row["num_generated_tokens"] == 4 for row in rows)
    assert {part: storage.read_bytes(part_uri(output, part)) for part in done} == done
    assert source.startswith(BUCKET)
    capsys.readouterr()
    assert main(["status", output]) == 0
    assert "30 of 30 done" in capsys.readouterr().out
    assert main(["merge", output, "--into", f"{BUCKET}/merged.parquet"]) == 0
    merged = pq.read_table(io.BytesIO(storage.read_bytes(f"{BUCKET}/merged.parquet") or b""))
    assert merged["n"].to_pylist() == list(range(30))
