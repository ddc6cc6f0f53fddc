"""`jobs submit`: what is refused here, what is sent, and how a job is followed to its end."""

import io
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import ray
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from jobs import following, job_server
from jobs.__main__ import main
from jobs.job_command import JobCommand
from jobs.submit import entrypoint, job_name
from jobs.upload import find_upload
from tests.conftest import ROOT, clean_environment, run_jobs
from tests.heads import ray_head, wait_for_jobs
from tests.job_stub import DROP, Stub, job_stub

VERIFY = ("verify", "/data/out")
RUNNING = {"status": "RUNNING"}


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    """A job server, asked often and waited for briefly."""
    monkeypatch.setattr(following, "_SECONDS", 0.01)
    monkeypatch.setattr(following, "_MAX_SECONDS", 0.01)
    monkeypatch.setattr(job_server, "_ANSWER", 5.0)
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    with job_stub() as found:
        yield found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a prompt file, and the process in it."""
    path = tmp_path / "work"
    path.mkdir()
    (path / "prompts.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
    monkeypatch.chdir(path)
    return path


@pytest.fixture
def submit(stub: Stub, folder: Path) -> Callable[..., int]:
    """The command in this process, to the stub, from the working folder."""

    def run(*options: object, command: tuple[object, ...] = VERIFY) -> int:
        given = ["submit", "--address", stub.address, *options, "--", *command]
        return main([str(argument) for argument in given])

    return run


def a_run(**changed: object) -> tuple[object, ...]:
    """The command line of a run on a cluster's own files, but for what is changed."""
    given = {"model": "/m", "input": "/data/in.jsonl", "output": "s3://bucket/out"} | changed
    return ("generate", *(part for key, value in given.items() for part in (f"--{key}", value)))


class TestWhatIsRefused:
    """Nothing of it reaches the cluster."""

    @pytest.fixture(autouse=True)
    def _nothing_is_sent(self, stub: Stub) -> Iterator[None]:
        yield
        assert stub.requests == []

    @pytest.mark.parametrize(
        "command", [(), ("status", "/o"), ("bench",), ("python", "-m", "jobs")]
    )
    def test_what_is_no_command_for_a_job(
        self,
        submit: Callable[..., int],
        command: tuple[str, ...],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        assert submit(command=command) == 2
        named = repr(command[0]) if command else "no command"
        assert f"error: {named}: cannot be submitted" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("command", "told"),
        [
            (a_run(nonsense=1), "nonsense"),
            (a_run(temperature=-1), "temperature"),
            (a_run(output="out"), "output out: is relative"),
            (a_run(input="none.jsonl"), "none.jsonl: no such file"),
            (a_run(input="../beside.jsonl"), "outside the working folder"),
            (a_run(input="/data/in.jsonl none.jsonl"), "none.jsonl: no such file"),
            (a_run(calibration="none.jsonl"), "none.jsonl: no such file"),
            (a_run(model="./model"), "no such folder in"),
            (a_run(model="s3://bucket/model"), "no hub id"),
            (("quantize", "--model", "/m", "--output", "q"), "output q: is relative"),
            (("quantize", "--model", "/m", "--output", "s3://b/q"), "must be a folder of the head"),
            (("quantize", "--model", "/m", "--output", "/q", "--alpha", "9"), "alpha"),
            (("verify", "out"), "output out: is relative"),
            (("retry", "out"), "output out: is relative"),
            (("merge", "/out", "--into", "d.jsonl"), "--into d.jsonl: is relative"),
            (a_run(config="none.yaml"), "none.yaml: no such file"),
        ],
    )
    def test_what_the_job_could_not_do(
        self,
        submit: Callable[..., int],
        folder: Path,
        command: tuple[object, ...],
        told: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder.parent / "beside.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
        command = tuple(part for argument in command for part in str(argument).split(" "))
        assert submit(command=command) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert told in error

    def test_files_that_stay_behind(
        self, submit: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Half a folder of prompts would be a data set with holes."""
        (folder / "in").mkdir()
        for name in ("a", "b"):
            (folder / "in" / f"{name}.jsonl").write_text('{"prompt": "a"}\n', encoding="utf-8")
        model = folder / "model"
        model.mkdir()
        for name in ("config.json", "model.safetensors"):
            (model / name).write_text("{}", encoding="utf-8")
        (folder / "run.yaml").write_text("seed: 1\n", encoding="utf-8")
        (folder / ".rayignore").write_text("b.jsonl\n*.safetensors\nrun.yaml\n", encoding="utf-8")
        for changed, named in (
            ({"input": "in"}, "in/b.jsonl: is not uploaded"),
            ({"input": "in/*.jsonl"}, "in/b.jsonl: is not uploaded"),
            ({"model": "model"}, "model/model.safetensors is not uploaded"),
            ({"config": "run.yaml"}, "run.yaml: is not uploaded"),
        ):
            assert submit(command=a_run(**changed)) == 2, changed
            assert named in capsys.readouterr().err

    def test_a_configuration_from_elsewhere(
        self, submit: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        beside = folder.parent / "run.yaml"
        beside.write_text("seed: 1\n", encoding="utf-8")
        assert submit(command=a_run(config=beside)) == 2
        assert "is not in the working folder" in capsys.readouterr().err

    def test_too_much_to_upload(
        self, submit: Callable[..., int], folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (folder / "big.bin").write_bytes(bytes(90_000))
        (folder / "small.bin").write_bytes(bytes(20_000))
        assert submit("--max-upload-mb", 0.1) == 2
        error = capsys.readouterr().err
        assert "0.1 MB in 3 files would be uploaded" in error
        assert error.index("big.bin (0.1 MB)") < error.index("small.bin")
        assert ".rayignore" in error

    @pytest.mark.parametrize("theirs", ["pipeline/__init__.py", "quant.py"])
    def test_packages_that_would_hide_ours(
        self,
        submit: Callable[..., int],
        folder: Path,
        theirs: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder / theirs).parent.mkdir(exist_ok=True)
        (folder / theirs).write_text("", encoding="utf-8")
        assert submit() == 2
        assert "the job would import its" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "options", [("--env", "NOVALUE"), ("--max-upload-mb", "101"), ("--unknown",)]
    )
    def test_options_that_make_no_sense(
        self,
        submit: Callable[..., int],
        options: tuple[str, ...],
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        with pytest.raises(SystemExit) as end:
            submit(*options)
        assert end.value.code == 2
        assert options[0] in capsys.readouterr().err

    def test_no_cluster(self, stub: Stub, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["submit", "--", *VERIFY]) == 2
        assert "no cluster is named; give --address" in capsys.readouterr().err


class TestUpload:
    def test_it_is_what_ray_uploads(self, tmp_path: Path) -> None:
        root = tmp_path / "root"
        for name in (
            *("a.py", "b.log", "data/c.py", "data/d.bin", "data/e.txt", "näme.txt", "empty/x"),
            *(".git/config", ".venv/lib.py", "data/__pycache__/c.pyc", ".gitignore", ".rayignore"),
        ):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("content " * 10, encoding="utf-8")
        (root / "empty" / "x").unlink()
        (root / ".gitignore").write_text("*.log\n", encoding="utf-8")
        (root / ".rayignore").write_text("*.bin\n", encoding="utf-8")
        (root / "data" / ".rayignore").write_text("e.*\n", encoding="utf-8")
        package = tmp_path / "package.zip"
        create_package(
            str(root),
            package,
            include_gitignore=True,
            excludes=get_runtime_env_default_excludes(),
        )
        upload = find_upload(str(root))
        assert sorted(upload.files) == [
            *(".gitignore", ".rayignore", "a.py", "data/.rayignore", "data/c.py", "näme.txt")
        ]
        assert set(zipfile.ZipFile(package).namelist()) == {*upload.files, "empty/"}
        assert upload.num_bytes == package.stat().st_size

    def test_this_project_is_small(self) -> None:
        upload = find_upload(str(ROOT))
        assert upload.num_bytes < 5e6
        upload.check_size(5)
        upload.check_packages()
        assert upload.has_project
        needed = {"jobs/__main__.py", "jobs/report.html.j2", "pipeline/calibration.jsonl"}
        assert needed <= set(upload.files)
        assert not [name for name in upload.files if name.startswith(("tests/", ".git/"))]


class TestWhatIsSent:
    def test_a_job(
        self,
        submit: Callable[..., int],
        stub: Stub,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        (folder / "sub").mkdir()
        config = folder / "sub" / "run.yaml"
        config.write_text("seed: 1\n", encoding="utf-8")
        command = a_run(input="prompts.jsonl", config=config, output="s3://bucket/my run/")
        assert submit("--env", "QUASAR_CACHE=/big disk", command=command) == 0
        (job,) = stub.started
        assert re.fullmatch(r"my-run-\d{8}-\d{6}-[0-9a-f]{4}", job["submission_id"])
        assert job["metadata"] == {"command": "generate", "output": "s3://bucket/my run/"}
        assert job["runtime_env"]["env_vars"] == {
            "RAY_JOB_STOP_WAIT_TIME_S": "30",
            "QUASAR_CACHE": "/big disk",
        }
        assert job["runtime_env"]["working_dir"].startswith("gcs://")
        assert not [key for key in job if key.startswith("entrypoint_") and job[key]]
        assert job["entrypoint"] == (
            "unset OMP_NUM_THREADS; exec python -m jobs generate --model /m --input prompts.jsonl "
            "--output 's3://bucket/my run/' --config sub/run.yaml"
        )
        (package,) = stub.packages
        names = zipfile.ZipFile(io.BytesIO(package)).namelist()
        assert sorted(names) == ["prompts.jsonl", "sub/run.yaml"]
        told = capsys.readouterr().err
        assert f"job {job['submission_id']} at {stub.address}" in told
        assert "with the package of the nodes" in told

    def test_the_configuration_is_found_in_any_form(
        self, submit: Callable[..., int], stub: Stub, folder: Path
    ) -> None:
        (folder / "run.yaml").write_text("seed: 1\n", encoding="utf-8")
        assert submit(command=(*a_run(), f"--config={folder}/./run.yaml")) == 0
        assert shlex.split(stub.started[0]["entrypoint"])[-1] == "--config=run.yaml"

    def test_paths_are_those_of_the_working_folder(
        self, submit: Callable[..., int], stub: Stub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(folder.parent)
        assert submit(command=a_run(input="work/prompts.jsonl", output="/o")) == 0
        assert submit("--working-dir", folder, command=a_run(input="prompts.jsonl")) == 0
        assert Path.cwd() == folder.parent
        assert submit("--working-dir", folder, command=a_run(input="work/prompts.jsonl")) == 2

    def test_threads_are_the_users_if_they_say_so(self) -> None:
        job = JobCommand("retry", ("/out",), "/out")
        set_there = entrypoint(job, "/venv/bin/python", {"OMP_NUM_THREADS": "4"})
        assert set_there == "exec /venv/bin/python -m jobs retry /out"

    def test_every_job_has_a_name_of_its_own(self) -> None:
        assert job_name("/out") != job_name("/out")
        assert job_name("///").startswith("job-")
        assert len(job_name("x" * 300)) < 80

    def test_the_address_may_come_from_the_environment(
        self, stub: Stub, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_ADDRESS", stub.address)
        assert main(["submit", "--", *VERIFY]) == 0
        monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:1")
        assert main(["submit", "--", *VERIFY]) == 2
        assert main(["submit", "--address", f"{stub.address}/", "--", *VERIFY]) == 0
        assert len(stub.started) == 2

    def test_a_lost_answer_starts_no_second_job(
        self, submit: Callable[..., int], stub: Stub
    ) -> None:
        stub.starts = [DROP, (500, "ValueError: Job with submission_id {} already exists.")]
        answer = stub.answer

        def named(method: str, path: str, body: bytes) -> Any:
            given = answer(method, path, body)
            if isinstance(given, tuple) and "{}" in given[1]:
                return given[0], given[1].format(stub.started[0]["submission_id"])
            return given

        stub.answer = named  # type: ignore[method-assign]
        assert submit() == 0
        assert len({job["submission_id"] for job in stub.started}) == 1

    def test_a_head_that_is_just_coming_up_is_waited_for(
        self, submit: Callable[..., int], stub: Stub
    ) -> None:
        stub.starts = [(500, "No available agent to submit job, please try again later."), {}]
        assert submit() == 0
        assert len(stub.started) == 2

    def test_a_job_that_is_not_taken(
        self, submit: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stub.starts = [(400, "no such thing")]
        assert submit() == 1
        assert "the job was not taken" in capsys.readouterr().err

    def test_a_cluster_that_goes_away_before_it_answers(
        self,
        submit: Callable[..., int],
        stub: Stub,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(job_server, "_START_SECONDS", 0.0)
        stub.starts = [DROP]
        assert submit() == 4
        name = stub.started[0]["submission_id"]
        assert f"`--follow {name}` tells" in capsys.readouterr().err

    def test_a_folder_that_cannot_be_packed(
        self,
        submit: Callable[..., int],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        def refuse(*args: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied", "prompts.jsonl")

        monkeypatch.setattr(job_server.JobServer, "submit_job", refuse)
        assert submit() == 1
        assert "cannot be packed ([Errno 13] Permission denied" in capsys.readouterr().err


class TestCluster:
    @pytest.mark.parametrize("address", ["HEAD:8265", "ray://head:10001", "auto", "http://:8265"])
    def test_what_is_no_address(
        self, folder: Path, address: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["submit", "--address", address, "--", *VERIFY]) == 2
        assert "http://HEAD:8265" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("address", "told"),
        [
            ("http://127.0.0.1:1", "cannot be reached (Connection refused)"),
            ("https://127.0.0.1:1", "cannot be reached (Connection refused)"),
            ("http://no-such-host.invalid:8265", "cannot be reached ("),
        ],
    )
    def test_nobody_is_there(
        self, folder: Path, address: str, told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["submit", "--address", address, "--", *VERIFY]) == 2
        error = capsys.readouterr().err
        assert f"error: address {address}: {told}" in error
        assert len(error.splitlines()) == 1

    def test_somebody_is_there_and_does_not_answer(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert job_server._CONNECT + job_server._ANSWER < 60
        monkeypatch.setattr(job_server, "_ANSWER", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"http://127.0.0.1:{server.getsockname()[1]}"
            assert main(["submit", "--address", address, "--", *VERIFY]) == 2
        assert "cannot be reached (no answer within 0.3 s)" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "version", [(404, "nothing here"), (200, "<html>"), [1], {"version": 3}, (503, "busy")]
    )
    def test_somebody_else_is_there(
        self,
        submit: Callable[..., int],
        stub: Stub,
        version: Any,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        stub.version = version
        assert submit() == 2
        assert "does not answer as a Ray dashboard does" in capsys.readouterr().err

    def test_another_ray(
        self, submit: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stub.version = {"ray_version": "2.59.1"}
        assert submit() == 2
        error = capsys.readouterr().err
        assert f"runs Ray 2.59.1, and here is Ray {ray.__version__}; submit from" in error
        assert stub.started == []

    @pytest.mark.parametrize(("version", "code"), [("3.9.18", 2), ("3.{}.99", 0)])
    def test_another_python(
        self, submit: Callable[..., int], stub: Stub, version: str, code: int
    ) -> None:
        """Patches do not matter: nothing is pickled between here and there."""
        stub.metadata = {"data": {"pythonVersion": version.format(sys.version_info.minor)}}
        assert submit() == code
        assert len(stub.started) == (code == 0)

    def test_tokens(
        self, submit: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stub.version = (401, "Unauthorized: Missing authentication token")
        assert submit() == 2
        assert "asks for a token; set RAY_AUTH_MODE=token" in capsys.readouterr().err
        stub.version = (403, "Forbidden: Invalid authentication token")
        assert submit() == 2
        assert "does not take this token" in capsys.readouterr().err


class TestFollowing:
    @pytest.mark.parametrize(
        ("info", "code", "told"),
        [
            ({"status": "SUCCEEDED", "driver_exit_code": 0}, 0, "done"),
            ({"status": "FAILED", "driver_exit_code": 3}, 3, "ended with exit code 3"),
            ({"status": "FAILED", "driver_exit_code": -9}, 137, "was killed by signal 9"),
            ({"status": "STOPPED"}, 4, "was stopped"),
            (
                {
                    "status": "FAILED",
                    "error_type": "RUNTIME_ENV_SETUP_FAILURE",
                    "message": "no\nzip",
                },
                1,
                ": no zip",
            ),
            (
                {"status": "FAILED", "error_type": "JOB_SUPERVISOR_ACTOR_DIED", "message": "dead"},
                4,
                ": dead; the same command goes on",
            ),
        ],
    )
    def test_the_exit_code_is_the_jobs(
        self,
        submit: Callable[..., int],
        stub: Stub,
        info: dict[str, Any],
        code: int,
        told: str,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        stub.infos = [{"status": "PENDING"}, RUNNING, info]
        assert submit() == code
        assert told in capsys.readouterr().err

    def test_what_it_prints_is_printed_once_whatever_breaks(
        self, submit: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        done = {"status": "SUCCEEDED", "driver_exit_code": 0}
        stub.infos = [RUNNING, DROP, (502, "bad gateway"), RUNNING, RUNNING, done]
        stub.logs = [{"logs": "one\n"}, (500, "Traceback"), {"logs": "one\ntw"}, DROP]
        stub.logs += [{"logs": "one\ntwo\nthree\n"}]
        assert submit() == 0
        output = capsys.readouterr()
        assert output.out == "one\ntwo\nthree\n"
        assert output.err.count("the cluster does not answer; asking on for 5 minutes") == 1
        assert output.err.count("the cluster answers again") == 1

    def test_a_log_that_is_gone_changes_no_exit_code(
        self, submit: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stub.infos = [{"status": "FAILED", "driver_exit_code": 2}]
        stub.logs = [(500, "Traceback")]
        assert submit() == 2
        assert "the end of its log cannot be read" in capsys.readouterr().err

    def test_the_longer_a_log_takes_the_less_it_is_asked_for(self) -> None:
        """It comes whole each time: asking takes a tenth of the time, once a second at most."""
        waits = [following._pause(seconds) for seconds in (0.01, 2.0, 60.0)]
        assert waits == [1.0, pytest.approx(18.0), 30.0]

    def test_a_head_that_stays_away(
        self,
        submit: Callable[..., int],
        stub: Stub,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(following, "_PATIENCE", 0.05)
        stub.infos = [RUNNING, DROP]
        assert submit() == 4
        assert "does not answer any more, and job" in capsys.readouterr().err

    def test_a_head_that_has_forgotten_the_job(
        self, stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        stub.infos = [RUNNING, RUNNING, (404, "Job gone-1 does not exist")]
        assert main(["submit", "--address", stub.address, "--follow", "gone-1"]) == 4
        assert "the cluster knows no job gone-1" in capsys.readouterr().err
        assert stub.started == []

    def test_a_job_that_never_was(self, stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
        stub.infos = [(404, "Job gone-1 does not exist")]
        assert main(["submit", "--address", stub.address, "--follow", "gone-1"]) == 2
        assert "`ray job list` names those it knows" in capsys.readouterr().err

    def test_no_wait(
        self, submit: Callable[..., int], stub: Stub, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert submit("--no-wait") == 0
        output = capsys.readouterr()
        name = stub.started[0]["submission_id"]
        assert output.out == f"{name}\n"
        assert f"ray job stop --address {stub.address} {name}" in output.err
        assert not [request for request in stub.requests if name in request]
        (again,) = re.findall(r"python -m jobs (submit --address \S+ --follow \S+);", output.err)
        stub.infos = [{"status": "FAILED", "driver_exit_code": 3}]
        assert main(again.split()) == 3
        assert len(stub.started) == 1

    @pytest.mark.parametrize("stop", [False, True])
    def test_an_end_from_outside(self, stub: Stub, tmp_path: Path, stop: bool) -> None:
        """The process, as main leaves it: a signal, the exit code, and one line."""
        stub.infos = [RUNNING]
        options = ["--stop-on-interrupt"] if stop else []
        command = ["submit", "--address", stub.address, "--working-dir", str(tmp_path), *options]
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs", *command, "--", *VERIFY],
            cwd=ROOT,
            env=clean_environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.monotonic() + 60
        while not any(request.endswith("/logs") for request in stub.requests):
            assert time.monotonic() < deadline, "it does not follow the job"
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=10)
        assert process.returncode == 4
        assert ("is asked to stop" if stop else "interrupted here; the job goes on") in error
        assert any(request.endswith("/stop") for request in stub.requests) == stop


TOKEN = "5" * 64


@pytest.fixture(scope="module")
def head() -> Iterator[tuple[str, dict[str, str]]]:
    """A real one that wants a token."""
    with ray_head(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN) as (address, environment):
        wait_for_jobs(address, time.monotonic() + 60)
        yield address, environment


@pytest.mark.ray
@pytest.mark.timeout(300)
class TestRealHead:
    def test_a_job_from_its_submission_to_its_exit_code(
        self, head: tuple[str, dict[str, str]], tiny_checkpoint: Path, tmp_path: Path
    ) -> None:
        address, environment = head
        output = tmp_path / "out"
        given = ("--input", "examples/prompts.jsonl", "--limit", 3, "--max-tokens", 4)
        command = ("generate", "--model", tiny_checkpoint, "--output", output, *given)
        options = ("--address", address, "--python", sys.executable)
        quick = ("--precision", "bf16", "--proposer", "none")
        result = run_jobs("submit", *options, "--", *command, *quick, timeout=240, **environment)
        assert result.returncode == 0, result.stdout + result.stderr
        (part,) = (output / "data").glob("*.parquet")
        assert [row["error"] for row in pq.read_table(part).to_pylist()] == [None] * 3
        assert "3 (3 samples, 0 errors)" in result.stdout
        verify = ("verify", tmp_path / "none")
        result = run_jobs("submit", *options, "--", *verify, timeout=120, **environment)
        assert result.returncode == 2, result.stdout + result.stderr
        assert "no run has begun here" in result.stdout

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({"RAY_AUTH_MODE": "disabled"}, "asks for a token; set RAY_AUTH_MODE=token"),
            ({"RAY_AUTH_TOKEN": "6" * 64}, "does not take this token"),
            ({"RAY_AUTH_TOKEN": "", "HOME": "/nowhere"}, "there is none here"),
        ],
    )
    def test_a_token_is_asked_for(
        self, head: tuple[str, dict[str, str]], changed: dict[str, str], told: str
    ) -> None:
        address, environment = head
        result = run_jobs("submit", "--address", address, "--", *VERIFY, **(environment | changed))
        assert result.returncode == 2
        assert told in result.stderr
        assert len(result.stderr.splitlines()) == 1
