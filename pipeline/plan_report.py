"""What a plan holds, for people who are about to pay for it: counts, lengths, refusals, duplicates."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.plan import Plan
from pipeline.requests import merge_params
from pipeline.shards import read_shard
from workers.config import SamplingParams
from workers.step_times import StepTimes

_COLUMNS = ["prompt_token_ids", "sampling_params", "error_type", "error"]
_COLUMNS += ["num_truncated_tokens", "prompt_digest"]


@dataclass
class PlanReport:
    """Sums over a plan's rows.

    Attributes:
        num_rows: of the input.
        refusals: rows that cannot run, by kind; `first_refusal` is the reason of the first.
        num_truncated: rows whose prompt was cut.
        num_duplicates: rows whose prompt another row before them has, token by token.
        num_shared: rows that get their answers from another.
        num_samples: answers that will be made.
        num_input_tokens: of the prompts that will be run.
        max_output_tokens: if every answer were as long as it may be.
        lengths: [n] tokens of each prompt that can run.
        first_prompt: token ids of the first prompt that can run.
    """

    num_rows: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    first_refusal: str = ""
    num_truncated: int = 0
    num_duplicates: int = 0
    num_shared: int = 0
    num_samples: int = 0
    num_input_tokens: int = 0
    max_output_tokens: int = 0
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    first_prompt: tuple[int, ...] = ()


def report_plan(
    plan: Plan, output: str, defaults: SamplingParams, max_model_len: int
) -> PlanReport:
    """Read the prompt shards, one at a time."""
    report, seen = PlanReport(), _Seen()
    lengths: list[np.ndarray] = []
    for shard in plan.shards:
        table = read_shard(output, shard.name, _COLUMNS)
        _add_refusals(report, table)
        runs = table.filter(table["error_type"].is_null())
        report.num_rows += len(table)
        report.num_truncated += int(np.count_nonzero(runs["num_truncated_tokens"].to_numpy()))
        prompts = _prompts(runs)
        lengths.append(np.array([len(prompt) for prompt in prompts], np.int64))
        own = runs.select(["sampling_params", "prompt_digest"]).to_pylist()
        for prompt, row in zip(prompts, own, strict=True):
            report.num_duplicates += seen.prompt(prompt)
            if seen.digest(row["prompt_digest"]):
                report.num_shared += 1
                continue
            merged = merge_params(row, defaults)
            report.num_samples += merged.n
            report.num_input_tokens += len(prompt)
            room = min(merged.max_tokens, max_model_len - len(prompt))
            report.max_output_tokens += merged.n * room
        if len(prompts) and not report.first_prompt:
            report.first_prompt = tuple(int(i) for i in prompts[0])
    report.lengths = np.concatenate(lengths) if lengths else report.lengths
    return report


class _Seen:
    """What occurred before: prompts, and what rows share their answers by."""

    def __init__(self) -> None:
        self._prompts = set[int]()
        self._digests = set[bytes]()

    def prompt(self, token_ids: np.ndarray) -> bool:
        key = hash(token_ids.tobytes())
        known = key in self._prompts
        self._prompts.add(key)
        return known

    def digest(self, digest: bytes | None) -> bool:
        """Never of a row that shares nothing."""
        if digest is None:
            return False
        known = digest in self._digests
        self._digests.add(digest)
        return known


def estimate_seconds(
    report: PlanReport, times: StepTimes, num_seqs: int, num_workers: int
) -> float:
    """How long plain decoding would take, if every answer were as long as it may be.

    Contexts are taken as short, and the batches as full.
    """
    chunk = 512
    prefill = report.num_input_tokens * float(times(chunk)) / chunk
    rows = min(num_seqs, max(report.num_samples, 1))
    decode = report.max_output_tokens * float(times(rows)) / rows
    return (prefill + decode) / num_workers


def _add_refusals(report: PlanReport, table: pa.Table) -> None:
    kinds = [kind for kind in table["error_type"].to_pylist() if kind is not None]
    report.refusals.update(kinds)
    if kinds and not report.first_refusal:
        report.first_refusal = next(e for e in table["error"].to_pylist() if e is not None)


def _prompts(runs: pa.Table) -> list[Any]:
    """The token ids of every row, as views of one array."""
    column = runs["prompt_token_ids"].combine_chunks()
    if not len(column):
        return []
    values = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    return [values[a:b] for a, b in pairwise(offsets)]
