"""One worker: an engine on a thread of its own, fed by any number of concurrent callers.

`Worker` needs no Ray to be used; only attaching to weights in the object store does (`quant.store`).
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass

import numba
import torch

from quant.config import QuantConfig
from quant.store import WeightsRef
from workers.build import build_engine
from workers.config import Device, EngineConfig
from workers.engine import Engine
from workers.model import TargetModel, build_backend
from workers.request import Completion, Request
from workers.step_times import cached_step_times
from workers.stopping import TokenizerText
from workers.tally import Tally

_LOGGER = logging.getLogger(__name__)

# glibc gives large blocks back to the system at once, and every step would fault its pages in again.
# Read by the allocator before Python starts, hence part of the worker's environment.
_ALLOCATOR = {
    "MALLOC_TOP_PAD_": str(256 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}


@dataclass(frozen=True)
class WorkerSettings:
    """What an actor needs to build its engine, beside the weights."""

    engine: EngineConfig
    quant: QuantConfig
    max_model_len: int
    tokenizer_json: str
    num_threads: int
    device: Device = "cpu"


def worker_environment(num_threads: int) -> dict[str, str]:
    """The environment variables a worker's process must be started with."""
    return {
        **_ALLOCATOR,
        # numba's kernels use the threads. torch shares their OpenMP runtime, which stops spinning
        # (two sleeps a kernel) once a second pool makes more threads than there are cores.
        "OMP_NUM_THREADS": "1",
        "NUMBA_NUM_THREADS": str(num_threads),
        # Threads that wait for the next kernel give the core up soon: on a shared machine, endless
        # spinning slows a step fivefold.
        "GOMP_SPINCOUNT": "20000",
    }


def use_threads(num_threads: int, *, in_kernels: bool) -> None:
    """Give the threads to the kernels, or to torch: two pools would stand in each other's way."""
    torch.set_num_threads(1 if in_kernels else num_threads)
    numba.set_num_threads(min(num_threads, numba.get_num_threads()))


def start_engine(weights: WeightsRef, settings: WorkerSettings) -> Engine:
    """Attach to the weights and build the engine around them, ready to run at full speed."""
    config = settings.engine
    own_kernels = settings.device == "cpu" and settings.quant.precision in ("w8a8", "bf16")
    use_threads(settings.num_threads, in_kernels=own_kernels)
    model = TargetModel(
        weights.architecture,
        weights.attach(),
        build_backend(settings.quant.precision, settings.device),
        settings.max_model_len,
    )
    model.warm_up()
    if own_kernels:
        _check_threads()
    times = None
    if config.has_budget:
        times = cached_step_times(
            model, settings.max_model_len, weights.digest, settings.num_threads
        )
    text = TokenizerText(settings.tokenizer_json)
    return build_engine(model, config, settings.max_model_len, text, times)


def _check_threads() -> None:
    """Numba falls back to a pool of its own without a word, and kernels then take three times as long."""
    layer = numba.threading_layer()  # type: ignore[attr-defined]
    if numba.get_num_threads() > 1 and layer == "workqueue":
        _LOGGER.warning("no OpenMP runtime found, so this worker is slow: install libgomp1")


class Worker:
    """Runs an engine on a background thread; callers submit requests and await completions."""

    def __init__(self, build: Callable[[], Engine], device: Device = "cpu") -> None:
        """Start building the engine, on the thread that will run it; returns at once.

        Every thread that runs a kernel gets an OpenMP pool of its own, and once the pools hold more
        threads than there are cores, all of them sleep between kernels.
        """
        self._device = device
        self._inbox: queue.SimpleQueue[tuple[Sequence[Request], _Mailbox]] = queue.SimpleQueue()
        self._mailboxes: dict[int, _Mailbox] = {}  # By the identity of the request.
        self._engine: Engine | None = None
        thread = threading.Thread(target=self._run, args=(build,), name="engine", daemon=True)
        thread.start()

    @property
    def device(self) -> str:
        """What the engine runs on, for the rows it answers."""
        return f"{self._device}:{os.uname().nodename}"

    @property
    def name(self) -> str:
        """Its device, its host and its process."""
        return f"{self.device}:{os.getpid()}"

    @property
    def tally(self) -> Tally:
        """What the engine has done so far; empty until it is built."""
        return self._engine.tally if self._engine is not None else Tally()

    def submit(self, requests: Sequence[Request]) -> AsyncIterator[Completion]:
        """Queue requests behind those already submitted; yields a completion for each, as they finish.

        Call it from a running event loop, which the completions are delivered to.

        Raises:
            RuntimeError: (from the iterator) the engine failed or could not be built; the worker is of no
                more use.
        """
        mailbox = _Mailbox(asyncio.get_running_loop(), asyncio.Queue())
        self._inbox.put((requests, mailbox))
        return self._receive(mailbox, len(requests))

    async def _receive(self, mailbox: "_Mailbox", count: int) -> AsyncIterator[Completion]:
        for _ in range(count):
            completion = await mailbox.completions.get()
            if isinstance(completion, BaseException):
                raise RuntimeError("the engine failed") from completion
            yield completion

    def _run(self, build: Callable[[], Engine]) -> None:
        try:
            engine = self._engine = build()
            while True:
                self._take_requests(engine)
                for completion in engine.step():
                    self._mailboxes.pop(id(completion.request)).put(completion)
        except BaseException as error:  # noqa: BLE001 - handed to every caller, who raises it
            for mailbox in self._mailboxes.values():
                mailbox.put(error)
            while True:  # Callers that come later are told as well.
                self._inbox.get()[1].put(error)

    def _take_requests(self, engine: Engine) -> None:
        """Move what has arrived to the engine; waits only if the engine has nothing to do."""
        while not (engine.has_work and self._inbox.empty()):
            requests, mailbox = self._inbox.get()
            self._mailboxes.update((id(request), mailbox) for request in requests)
            engine.add(requests)


@dataclass(frozen=True)
class _Mailbox:
    loop: asyncio.AbstractEventLoop
    completions: "asyncio.Queue[Completion | BaseException]"

    def put(self, item: Completion | BaseException) -> None:
        """Deliver to the caller's event loop, from the engine's thread."""
        self.loop.call_soon_threadsafe(self.completions.put_nowait, item)
