"""`plan`: the first phase of `generate` by itself, and what it found; no device, no weights."""

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from jobs.cli import parse_run
from jobs.folders import going_on, naming_output
from jobs.generate import check_output, find_inputs, start_ray, write_config
from pipeline.admission import Admission, load_tokenizer, tokenizer_digest
from pipeline.calibration import read_calibration
from pipeline.config import RunConfig
from pipeline.graph import write_plan
from pipeline.lease import Lease
from pipeline.plan import Plan
from pipeline.plan_report import PlanReport, estimate_seconds, report_plan
from quant.architecture import Architecture, read_architecture
from quant.checkpoint import open_checkpoint
from quant.convert import num_bytes
from quant.errors import CheckpointError
from quant.hub import find_checkpoint
from quant.prepare import recipe_digest, weights_digest
from quant.store import STORE_SHARE
from workers.step_times import read_step_times

_BAR = 40


def plan(arguments: Sequence[str]) -> int:
    """Plan a run, and print what there is to do; returns the exit code. The flags are `generate`'s.

    Raises:
        InputError, CheckpointError: bad input.
        TooManyErrorsError: `generate` would not run it.
    """
    config = parse_run(arguments)
    started = time.monotonic()
    uris = find_inputs(config)
    with naming_output(config.output):
        check_output(config)
    folder = find_checkpoint(config.model).resolve()
    architecture, tokenizer = read_architecture(folder), load_tokenizer(folder)
    limit = config.engine.max_model_len or architecture.max_position_embeddings
    admission = Admission(tokenizer, config.sampling, limit, architecture.vocab_size, config.data)
    with ExitStack() as stack:
        with naming_output(config.output):
            stack.enter_context(Lease(config.output))
        stack.callback(ray.shutdown)
        start_ray()
        write_config(config)
        origin = {"tokenizer": tokenizer_digest(tokenizer)}
        with going_on(config.output):
            made = write_plan(config, uris, admission, origin)
        nodes = [node for node in ray.nodes() if node["Alive"]]
    report = report_plan(made, config.output, config.sampling, limit)
    print(format_report(config, made, report, tokenizer))
    print(f" weights  {format_weights(config, architecture, nodes)}")
    print(f"   speed  {format_estimate(config, report, folder, tokenizer)}")
    print(f"  output  {config.output}, planned in {time.monotonic() - started:.0f} s")
    made.check_refused(config.output, config.max_error_rate)
    return 0


def format_report(config: RunConfig, plan: Plan, report: PlanReport, tokenizer: Any) -> str:
    """The rows in a few lines, a histogram of their lengths, and the first prompt."""
    kinds = ", ".join(f"{kind} {count:,}" for kind, count in report.refusals.most_common())
    refused = f"{report.refusals.total():,}" + (f" ({kinds})" if kinds else "")
    lines = {
        "rows": f"{report.num_rows:,} of {len(plan.sources)} sources, in {len(plan.shards):,} shards",
        "refused": refused,
        "cut": f"{report.num_truncated:,} prompts (--too-long {config.data.too_long})",
        "repeated": f"{report.num_duplicates:,} rows have the prompt of an earlier one"
        + (f"; {report.num_shared:,} share its answers" if config.data.share_duplicates else ""),
        "samples": f"{report.num_samples:,}",
        "tokens": f"{report.num_input_tokens:,} in, at most {report.max_output_tokens:,} out",
    }
    if report.first_refusal:
        lines["refused"] += f"; the first: {report.first_refusal}"
    text = "\n".join(f"{key:>8}  {value}" for key, value in lines.items())
    if len(report.lengths):
        text += "\n lengths  of prompts, in tokens\n" + format_histogram(report.lengths)
        text += f"\n   first  {tokenizer.decode(report.first_prompt)!r}"
    return text


def format_histogram(lengths: np.ndarray) -> str:
    """How many lengths lie between powers of two, as bars."""
    edges = 2 ** np.arange(int(lengths.max()).bit_length() + 1)
    counts, _ = np.histogram(lengths, bins=edges)
    lines = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if count:
            bar = "█" * max(1, round(_BAR * count / counts.max()))
            lines.append(f"{f'{low} to {high - 1}':>20}  {bar} {count:,}")
    return "\n".join(lines)


def format_weights(
    config: RunConfig, architecture: Architecture, nodes: Sequence[dict[str, Any]]
) -> str:
    """What the weights take on each node, against its object store and its memory (Ray's records)."""
    needed = num_bytes(architecture, config.quant)
    in_store, lines = config.cluster.weights == "object_store", []
    for node in nodes:
        store = int(node["Resources"].get("object_store_memory", 0))
        memory = int(node["Resources"].get("memory", 0))
        line = f"{node['NodeManagerHostname']} has {memory / 2**30:.2f} GiB of memory"
        if in_store:
            line += f", {store / 2**30:.2f} in its object store"
            if needed > STORE_SHARE * store:
                line += (
                    ": too little (start Ray with a larger --object-store-memory, or "
                    "--cluster.weights file)"
                )
        elif needed > memory:
            line += ": too little, they would be read from disk all the time"
        lines.append(line)
    return f"{needed / 2**30:.2f} GiB on each node; " + "; ".join(sorted(set(lines)))


def format_estimate(config: RunConfig, report: PlanReport, folder: Path, tokenizer: Any) -> str:
    """How long it may take at most, from step times that an earlier run left on this machine."""
    unknown = "not known: no run has measured this model's step times on this machine yet"
    try:
        checkpoint = open_checkpoint(folder)
    except CheckpointError:
        return unknown
    texts = [] if checkpoint.is_quantized else read_calibration(config.quant, tokenizer)
    digest = weights_digest(config.quant, recipe_digest(checkpoint, config.quant, texts))
    cores = os.cpu_count() or 1
    pool, *others = config.cluster.pools
    if others:
        return "not known: the workers are not all alike"
    threads, workers = pool.num_cpus or max(1, cores // pool.num_workers), pool.num_workers
    times = read_step_times(torch.device(pool.device), digest, threads)
    if times is None:
        return unknown
    seconds = estimate_seconds(report, times, config.engine.max_num_seqs, workers)
    return (
        f"about {timedelta(seconds=round(seconds))} with {workers} of this machine's workers, if every "
        "answer is as long as it may be and no draft is accepted (an estimate)"
    )
