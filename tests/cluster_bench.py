"""What the pool of workers costs its driver, and what a second node brings.

    python -m tests.cluster_bench simulate [--workers 1000] [--seconds 2] [--shards-each 60]
    python -m tests.cluster_bench nodes MODEL INPUT [--rows 600] [--max-tokens 64]

`simulate`: so many processes as a thousand workers would be do not fit a small machine, so that each of a
few real actors plays many workers: one shard after another, each of so many seconds, is handed out by the
real pool over real calls of Ray, and its report comes back. The driver does with it what a run does. Told
are the share of their time in which workers were busy, and the driver's processor time and memory.

`nodes`: a cluster of two nodes on this machine, a core each; the same run with a worker on one of them,
and with a worker on each.
"""

import argparse
import asyncio
import json
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from pipeline import places, pool
from pipeline.cluster import ClusterConfig
from pipeline.manifest import Manifest
from pipeline.parts import PartReport
from pipeline.places import Kind
from pipeline.pool import WorkerPool
from pipeline.progress import Course, Watch
from pipeline.shard_worker import WorkerState
from pipeline.summary import Summary
from tests.conftest import run_jobs
from workers.stats import AcceptanceStats
from workers.tally import Tally

_HOSTS = 8


@ray.remote(num_cpus=0, max_concurrency=10_000)
class Host:
    """Plays many workers, each of which does one shard after another."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._turns: dict[int, asyncio.Lock] = {}
        self._tallies: dict[int, Tally] = {}
        self._busy = 0.0

    async def ready(self, worker: int) -> None:
        self._turns[worker], self._tallies[worker] = asyncio.Lock(), Tally(16)

    async def run(self, worker: int, shard: str) -> PartReport:
        async with self._turns[worker]:
            started = time.time()
            await asyncio.sleep(self._seconds)
            self._busy += time.time() - started
        tally = self._tallies[worker]
        tally.num_samples += 256
        tally.num_tokens += 256 * 100
        stats = AcceptanceStats(20_000, 15_000, (5000, 3000, 1000, 500, 250, 250))
        schema, sha = "s" * 64, "c" * 64
        counts = (256, 256, 0, 0, 25_600, 25_600)
        return PartReport(shard, 500_000, sha, schema, *counts, stats, started, time.time())

    async def state(self, worker: int) -> WorkerState:
        return WorkerState(f"cpu:host:{worker}", self._tallies[worker].to_dict())

    async def busy(self) -> float:
        """Seconds spent on shards, of all workers."""
        return self._busy


@dataclass
class _Method:
    call: Callable[..., Any]

    def remote(self, *arguments: Any, **_: Any) -> Any:
        return self.call(*arguments)


class Played:
    """A worker's handle."""

    def __init__(self, host: Any, number: int) -> None:
        self.__ray_ready__ = _Method(lambda: host.ready.remote(number))
        self.run = _Method(lambda shard: host.run.remote(number, shard))
        self.state = _Method(lambda: host.state.remote(number))


@dataclass
class Weights:
    def send(self) -> list[Any]:
        return []


@dataclass(frozen=True)
class Settings:
    retry: bool = False
    worker: Any = field(default=None)


def simulate(arguments: argparse.Namespace) -> None:
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR")
    hosts = [Host.remote(arguments.seconds) for _ in range(_HOSTS)]  # type: ignore[attr-defined]
    started: list[Played] = []

    def start(*_: Any) -> Played:
        started.append(Played(hosts[len(started) % _HOSTS], len(started)))
        return started[-1]

    places.Kind.start = start  # type: ignore[method-assign, assignment]
    pool.ray.kill = lambda _: None  # type: ignore[assignment]
    config = ClusterConfig(num_workers=arguments.workers)
    shards = {f"{i:08d}": 256 for i in range(arguments.workers * arguments.shards_each)}
    workers = WorkerPool(Weights(), Settings(), config, [Kind(config.pools[0], 1)])  # type: ignore[arg-type]
    total, folder = Summary(), tempfile.mkdtemp()
    manifest, course = Manifest(folder), Course("generating", 256 * len(shards))
    course.places = workers.places
    ray.get([host.busy.remote() for host in hosts])
    begun, cpu = time.time(), time.process_time()
    with Watch(folder, course, lambda _: None):
        for report in workers.run(shards):
            manifest.add(report)
            total = course.total = total.add(report)
    seconds, cpu = time.time() - begun, time.process_time() - cpu
    busy = sum(ray.get([host.busy.remote() for host in hosts]))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    least = arguments.seconds * len(shards) / arguments.workers
    print(
        f"{arguments.workers:,} workers played by {_HOSTS} processes, {len(shards):,} shards of "
        f"{arguments.seconds:g} s in {seconds:.1f} s (at least {least:.0f}): busy "
        f"{busy / seconds / arguments.workers:.1%} of the time; driver {cpu / seconds:.2f} cores, "
        f"{memory:,.0f} MB; {len(workers.issued_twice)} shards issued twice"
    )
    assert total.num_shards == len(shards)
    shutil.rmtree(folder)


def nodes(arguments: argparse.Namespace) -> None:
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
    for _ in range(2):
        cluster.add_node(num_cpus=1, object_store_memory=600 * 2**20)
    folder = Path(tempfile.mkdtemp())
    source = folder / "prompts.jsonl"
    lines = Path(arguments.input).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) | {"id": str(i)} for i, line in enumerate(lines * arguments.rows)]
    source.write_text("".join(json.dumps(r) + "\n" for r in rows[: arguments.rows]))
    speeds: dict[int, list[float]] = {1: [], 2: []}
    for number in range(arguments.repeats * 2):
        num_workers = 1 + number % 2
        output = folder / f"out-{number}"
        given = ("--model", arguments.model, "--input", source, "--output", output)
        more = ("--max-tokens", arguments.max_tokens, "--data.rows_per_shard", 16)
        result = run_jobs(
            *("generate", *given, *more, "--recipe", "rtn"),
            *("--num-workers", num_workers, "--cluster.num_cpus_per_worker", 1),
            timeout=1200,
            RAY_ADDRESS=cluster.address,
            GOMP_SPINCOUNT=os.environ.get("GOMP_SPINCOUNT", "20000"),
        )
        assert result.returncode == 0, result.stderr
        run = json.loads((output / "summary.json").read_text())["this_run"]
        speeds[num_workers].append(run["tokens_per_second"])
        print(f"{num_workers} workers: {run['tokens_per_second']:,.0f} tokens/s", flush=True)
    ratios = [two / one for one, two in zip(speeds[1], speeds[2], strict=True)]
    print("two workers over one:", ", ".join(f"{ratio:.2f}" for ratio in ratios))
    cluster.shutdown()
    shutil.rmtree(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(required=True)
    simulated = commands.add_parser("simulate")
    simulated.add_argument("--workers", type=int, default=1000)
    simulated.add_argument("--seconds", type=float, default=2.0)
    simulated.add_argument("--shards-each", type=int, default=60)
    simulated.set_defaults(command=simulate)
    two = commands.add_parser("nodes")
    two.add_argument("model")
    two.add_argument("input")
    two.add_argument("--rows", type=int, default=600)
    two.add_argument("--max-tokens", type=int, default=64)
    two.add_argument("--repeats", type=int, default=3)
    two.set_defaults(command=nodes)
    arguments = parser.parse_args()
    arguments.command(arguments)


if __name__ == "__main__":
    main()
