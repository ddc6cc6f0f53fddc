"""One driver at a time on an output folder: a lease in a file, kept fresh by a heartbeat.

A second driver would not damage anything, as parts are put in place whole and are the same whoever makes
them; it would do everything twice. A lease whose holder is dead is taken over: at once if it lived on
this machine, else after its heartbeat has stood still for some time. (What its clock says is not asked:
clocks of two machines differ.)
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from pipeline import storage
from pipeline.errors import InputError, InterruptedRunError

FILE = "lease.json"
_HEARTBEAT_SECONDS = 10.0
_PATIENCE = 2.5  # Heartbeats missed by a holder that is dead.
_SETTLE_SECONDS = 2.0  # After writing where a file cannot be made "only if there is none".


@dataclass(frozen=True)
class Holder:
    """Who holds a lease: a run, in a process (of this number, born then), on a machine, since some time.

    `beat` counts its heartbeats.
    """

    run: str
    machine: str
    pid: int
    birth: str
    since: str
    beat: int = 0

    @classmethod
    def of_this_process(cls) -> "Holder":
        """A holder unlike any other."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(uuid.uuid4().hex, _machine(), os.getpid(), _birth(os.getpid()), now)

    @property
    def is_running(self) -> bool:
        """Whether its process lives; only to be asked on its own machine."""
        return _birth(self.pid) == self.birth != ""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.machine.partition('/')[0]}, since {self.since}"


class Lease:
    """The right to work on an output folder; a context that holds it."""

    def __init__(self, output: str, heartbeat_seconds: float = _HEARTBEAT_SECONDS) -> None:
        self._uri = storage.join(output, FILE)
        self._output = output
        self._seconds = heartbeat_seconds
        self._holder = Holder.of_this_process()
        self._stop = threading.Event()
        self._taken_by: Holder | None = None
        self._made_folder = False
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        """Take the lease.

        Raises:
            InputError: somebody else holds it, and lives.
            OSError: the folder cannot be written to.
        """
        self._made_folder = not storage.is_folder(self._output)
        other = self._read()
        if other is not None:
            if self._is_alive(other):
                raise InputError(f"output {self._output}: is in use by {other}")
            self._remove(other)
        self._create()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Give it back, if it is still ours."""
        self._stop.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(1)
        try:
            if self._is_ours(self._read()):
                storage.remove(self._uri)
            if self._made_folder:
                storage.remove_empty_folder(self._output)
        except OSError:
            return  # It grows old by itself.

    @property
    def run(self) -> str:
        """Names this run, unlike any other."""
        return self._holder.run

    def check(self) -> None:
        """Raise InterruptedRunError if somebody else has taken the lease over."""
        if self._taken_by is not None:
            raise InterruptedRunError(
                f"output {self._output}: was taken over by {self._taken_by}; this run ends"
            )

    def _create(self) -> None:
        content = json.dumps(asdict(self._holder)).encode()
        if storage.is_local(self._output):
            if not storage.create(self._uri, content):
                raise InputError(f"output {self._output}: is in use by {self._read()}")
            return
        storage.write_atomic(self._uri, content)
        time.sleep(_SETTLE_SECONDS)  # Of two that write at once, the later one stays.
        other = self._read()
        if not self._is_ours(other):
            raise InputError(f"output {self._output}: is in use by {other}")

    def _remove(self, dead: Holder) -> None:
        """Remove the lease of a dead holder; of several that try, one succeeds."""
        if storage.is_local(self._output):
            path = storage.local_path(self._uri)
            aside = path.with_name(f".{FILE}.{dead.run}")
            try:
                path.rename(aside)
            except FileNotFoundError:
                return
            aside.unlink(missing_ok=True)

    def _read(self) -> Holder | None:
        return _read(self._uri)

    def _is_ours(self, holder: Holder | None) -> bool:
        return holder is not None and holder.run == self._holder.run

    def _is_alive(self, other: Holder) -> bool:
        if other.machine == self._holder.machine:
            return other.is_running
        return _changes(self._read, other, self._seconds * _PATIENCE)

    def _beat(self) -> None:
        beat = 0
        while not self._stop.wait(self._seconds):
            beat += 1
            try:
                there = self._read()
                if there is not None and not self._is_ours(there):
                    self._taken_by = there
                    return
                if self._stop.is_set():
                    return
                mine = Holder(**asdict(self._holder) | {"beat": beat})
                storage.write_atomic(self._uri, json.dumps(asdict(mine)).encode())
            except OSError:
                continue  # Storage that fails for a moment; the next beat tries again.


def read_holder(output: str) -> Holder | None:
    """Who holds an output's lease; None if nobody that is known, or a dead process of this machine."""
    holder = _read(storage.join(output, FILE))
    if holder is not None and holder.machine == _machine() and not holder.is_running:
        return None
    if holder is not None and not holder.run:
        return None
    return holder


def _read(uri: str) -> Holder | None:
    content = storage.read_bytes(uri)
    try:
        return None if content is None else Holder(**json.loads(content))
    except (ValueError, TypeError):  # Nobody that we could name.
        return Holder("", "an unknown machine", 0, "", "an unknown time")


def _changes(read: Callable[[], Holder | None], before: Holder, seconds: float) -> bool:
    """Whether a holder gives a sign of life within some time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(min(0.2, seconds / 10))
        now = read()
        if now is None:
            return False
        if now != before:
            return True
    return False


def _machine() -> str:
    """This machine, until it is started anew."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown"
    return f"{socket.gethostname()}/{boot}/{_namespace()}"


def _namespace() -> str:
    """Process numbers mean something within a namespace only: containers have their own."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _birth(pid: int) -> str:
    """When a process was started (numbers of processes are used again); empty if it is not running."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
