"""What the pipeline itself costs, with an engine that answers at once: rows per second, memory.

    python -m tests.pipeline_bench MODEL [--rows 200000] [--rows-per-shard 256] [--shards 2000]

MODEL gives the tokenizer and the chat template. Every row is a chat of one short message. Planning and
committing run in this process, each on what one Ray task or actor would use. Then `generate` is run, with
MODEL itself, on shards of two rows: what its driver takes, and how long it is when nothing is left to do.
"""

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from pipeline import shard_worker
from pipeline.admission import Admission, load_tokenizer
from pipeline.manifest import Manifest
from pipeline.parts import Provenance
from pipeline.plan import Plan, assemble, group_sources, name_sources
from pipeline.schema import schema_to_json
from pipeline.shard_task import GenerateSettings
from pipeline.shard_worker import ShardWorker
from pipeline.shards import write_shards
from quant.config import QuantConfig
from workers.actor import WorkerSettings
from workers.config import EngineConfig, SamplingParams
from workers.request import Completion, Request
from workers.stats import AcceptanceStats

_LANES = 4  # Shards that a worker holds at once.


class Instant:
    """An engine whose answers, of twenty tokens, cost nothing."""

    step_times = None

    def __init__(self) -> None:
        self._waiting: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def add(self, requests: Iterable[Request]) -> None:
        self._waiting += requests

    def step(self) -> list[Completion]:
        batch, self._waiting = self._waiting[:16], self._waiting[16:]
        stats = AcceptanceStats(12, 8, (1, 2, 1, 0, 0, 0))
        text = "twenty tokens of text, or about as many as that, for every row"
        return [
            Completion(request, "length", tuple(range(20)), text, stats=stats, seconds=0.1)
            for request in batch
        ]


def make_plan(arguments: argparse.Namespace, folder: Path) -> Plan:
    source = folder / "in.jsonl"
    with source.open("w", encoding="utf-8") as file:
        for i in range(arguments.rows):
            content = f"Write a short line about the number {i}."
            file.write(json.dumps({"messages": [{"role": "user", "content": content}]}) + "\n")
    tokenizer = load_tokenizer(Path(arguments.model))
    admission = Admission(tokenizer, SamplingParams(), 2048, len(tokenizer))
    sources = name_sources([str(source)], ())
    (group,) = group_sources(sources, None)
    before, started = _memory(), time.perf_counter()
    written = list(write_shards(group, admission, str(folder), arguments.rows_per_shard))
    plan = assemble(written, str(folder), sources, {})
    plan.save(str(folder))
    seconds = time.perf_counter() - started
    tokens = sum(shard.num_input_tokens for shard in plan.shards) / plan.num_rows
    print(
        f"planned    {plan.num_rows / seconds:,.0f} rows/s of {tokens:.0f} tokens, {len(plan.shards):,} "
        f"shards; memory {before:.0f} MB before, {_memory():.0f} MB at most"
    )
    return plan


def commit(plan: Plan, folder: Path) -> None:
    settings = GenerateSettings(
        output=str(folder),
        run="bench",
        retry=False,
        sampling=SamplingParams(),
        seed=0,
        max_attempts_per_row=3,
        provenance=Provenance("m", "w", "c", {}),
        carried=schema_to_json(plan.carried),
        worker=WorkerSettings(EngineConfig(), QuantConfig(), 2048, "{}", 1),
    )
    names = [shard.name for shard in plan.shards]

    async def main() -> None:
        worker = ShardWorker([None], settings)  # type: ignore[list-item]

        async def lane(shards: list[str]) -> None:
            for shard in shards:
                await worker.run(shard)

        await asyncio.gather(*(lane(names[i::_LANES]) for i in range(_LANES)))

    shard_worker.start_engine = lambda *_: Instant()  # type: ignore[assignment, return-value]
    started = time.perf_counter()
    asyncio.run(main())
    seconds = time.perf_counter() - started
    print(f"committed  {plan.num_rows / seconds:,.0f} rows/s, with tries and manifest entries")


def go_on(folder: Path) -> None:
    """What a run that finds everything done does: the parts read once, then told from the manifest."""
    plan = Plan.load(str(folder))
    assert plan is not None
    for what in ("without a manifest", "with one"):
        started = time.perf_counter()
        manifest = Manifest(str(folder))
        found, damaged = manifest.find_parts(plan.shards)
        assert len(found) == len(plan.shards)
        assert not damaged
        manifest.save()
        print(f"gone on    {time.perf_counter() - started:.2f} s {what}, {len(found):,} parts")


def run_all(arguments: argparse.Namespace, folder: Path) -> None:
    """`generate` as a user runs it, a token a row: what the driver takes, and a second run of it."""
    source, num_shards = folder / "few.jsonl", arguments.shards
    with source.open("w", encoding="utf-8") as file:
        for i in range(2 * num_shards):
            file.write(json.dumps({"prompt": f"{i}"}) + "\n")
    output = folder / "run"
    command = [sys.executable, "-m", "jobs", "generate", "--recipe", "rtn", "--max-tokens", "1"]
    command += ["--model", arguments.model, "--input", str(source), "--output", str(output)]
    command += ["--data.rows_per_shard", "2"]
    for what in ("all", "nothing"):
        started, memory = time.perf_counter(), {}
        driver = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while driver.poll() is None:
            num_parts = len(list((output / "data").glob("*.parquet")))
            memory[num_parts * 10 // num_shards] = _memory_of(driver.pid)
            time.sleep(0.2)
        seconds = time.perf_counter() - started
        told = ", ".join(f"{10 * tenth} % {mb:.0f}" for tenth, mb in memory.items())
        print(
            f"ran        {seconds:.1f} s, {what} of {num_shards:,} shards to do; driver's MB: {told}"
        )


def _memory_of(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return float(status.partition("VmRSS:")[2].split()[0] if "VmRSS:" in status else 0) / 1024


def _memory() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--rows-per-shard", type=int, default=256)
    parser.add_argument("--shards", type=int, default=2000, help="of the run through Ray")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        plan = make_plan(arguments, Path(name))
        commit(plan, Path(name))
        go_on(Path(name))
        run_all(arguments, Path(name))


if __name__ == "__main__":
    main()
