"""One driver at a time on an output: the second is refused, the dead one's successor is not."""

import json
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from pipeline.errors import InputError, InterruptedRunError
from pipeline.lease import FILE, Holder, Lease, read_holder

SOON = 0.1  # Seconds between heartbeats.


def holder_in(folder: Path) -> Holder:
    return Holder(**json.loads((folder / FILE).read_bytes()))


def put(folder: Path, holder: Holder) -> None:
    (folder / FILE).write_text(json.dumps(asdict(holder)), encoding="utf-8")


def elsewhere() -> Holder:
    return replace(Holder.of_this_process(), machine="elsewhere/1/2", run="other")


def test_the_second_is_refused_and_the_third_may(tmp_path: Path) -> None:
    with Lease(str(tmp_path)) as lease:
        lease.check()
        assert read_holder(str(tmp_path)) == holder_in(tmp_path)
        with pytest.raises(InputError, match=r"is in use by process \d+ on"), Lease(str(tmp_path)):
            pass
        assert holder_in(tmp_path).run == lease.run
    assert list(tmp_path.iterdir()) == []
    assert read_holder(str(tmp_path)) is None
    with Lease(str(tmp_path)):
        pass


def test_a_folder_that_was_made_for_nothing_goes_again(tmp_path: Path) -> None:
    with Lease(str(tmp_path / "new")):
        assert (tmp_path / "new" / FILE).is_file()
    assert not (tmp_path / "new").exists()
    with Lease(str(tmp_path / "new")):
        (tmp_path / "new" / "something").touch()
    assert (tmp_path / "new" / "something").exists()


def test_a_dead_process_of_this_machine_loses_it_at_once(tmp_path: Path) -> None:
    code = f"""
import os, signal
from pipeline.lease import Lease
Lease({str(tmp_path)!r}).__enter__()
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[1]
    killed = subprocess.run([sys.executable, "-c", code], cwd=root, check=False)
    assert killed.returncode == -9
    dead = holder_in(tmp_path)
    assert read_holder(str(tmp_path)) is None
    started = time.monotonic()
    with Lease(str(tmp_path)) as lease:
        assert holder_in(tmp_path).run == lease.run != dead.run
    assert time.monotonic() - started < 2


def test_a_process_number_that_was_used_again_is_not_the_holder(tmp_path: Path) -> None:
    put(tmp_path, replace(Holder.of_this_process(), birth="12"))
    with Lease(str(tmp_path)):
        pass


def test_a_still_heart_elsewhere_is_dead(tmp_path: Path) -> None:
    put(tmp_path, elsewhere())
    assert read_holder(str(tmp_path)) == elsewhere_like(tmp_path)
    with Lease(str(tmp_path), SOON) as lease:
        assert holder_in(tmp_path).run == lease.run


def elsewhere_like(folder: Path) -> Holder:
    holder = holder_in(folder)
    assert holder.machine == "elsewhere/1/2"
    return holder


def test_a_beating_heart_elsewhere_is_alive(tmp_path: Path) -> None:
    """A real lease, seen from another machine."""
    with Lease(str(tmp_path), SOON) as lease:
        other = Lease(str(tmp_path), SOON)
        other._holder = elsewhere()
        with pytest.raises(InputError, match="is in use by"), other:
            pass
        lease.check()
        assert holder_in(tmp_path).run == lease.run
        assert holder_in(tmp_path).beat > 0


@pytest.mark.parametrize("content", ["", "{}", "[1]", "x"])
def test_a_damaged_lease_is_nobodys(tmp_path: Path, content: str) -> None:
    (tmp_path / FILE).write_text(content, encoding="utf-8")
    with Lease(str(tmp_path), SOON) as lease:
        assert holder_in(tmp_path).run == lease.run


def test_who_lost_it_is_told_and_leaves_the_other_alone(tmp_path: Path) -> None:
    with Lease(str(tmp_path), SOON) as lease:
        put(tmp_path, elsewhere())
        lease._thread.join(10)  # At its next beat it sees that, and stops.
        with pytest.raises(InterruptedRunError, match="taken over by process"):
            lease.check()
    assert holder_in(tmp_path).run == "other"


def test_storage_that_fails_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pipeline import lease as module

    with Lease(str(tmp_path), SOON) as lease:
        with monkeypatch.context() as patch:

            def fail(*_: object) -> None:
                raise OSError("stale handle")

            patch.setattr(module.storage, "write_atomic", fail)
            time.sleep(5 * SOON)
        before = holder_in(tmp_path).beat
        deadline = time.monotonic() + 10
        while holder_in(tmp_path).beat == before and time.monotonic() < deadline:
            time.sleep(SOON)
        assert holder_in(tmp_path).beat > before
        lease.check()
