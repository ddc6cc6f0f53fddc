"""Runs of the main job on a tiny model, and what must be equal between them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

TOKEN_COLUMNS = (
    *("generated_tokens", "generated_text", "num_input_tokens", "num_generated_tokens"),
    *("finish_reason", "stop_reason", "seed", "error", "error_type", "prompt", "topic"),
)
Key = tuple[str, int]


def write_prompts(path: Path, num_rows: int) -> Path:
    """Repetitive prompts of different lengths; greedy and sampled rows, some with samples."""
    rows: list[dict[str, Any]] = []
    for i in range(num_rows):
        row = {"id": f"r{i}", "prompt": f"row {i} " * (1 + i % 5), "topic": i % 3}
        params: dict[str, Any] = {"temperature": i % 2}
        if i % 8 == 3:
            params |= {"n": 2, "logprobs": 2}
        if i % 8 == 5:
            params |= {"top_p": 0.9, "repetition_penalty": 1.1, "max_tokens": 30}
        rows.append(row | {"sampling_params": params})
    rows.insert(num_rows // 2, {"id": "refused", "prompt": "x" * 5000, "topic": 0})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def parts_of(output: Path) -> list[Path]:
    return sorted((output / "data").glob("*.parquet"))


def read_rows(output: Path) -> dict[Key, dict[str, Any]]:
    """Every row of an output folder, checked against the promises of its columns."""
    parts = parts_of(output)
    assert len({pq.read_schema(part).remove_metadata().to_string() for part in parts}) == 1
    rows = pa.concat_tables(pq.read_table(part) for part in parts).to_pylist()
    keyed = {(row["id"], row["sample_idx"]): row for row in rows}
    assert len(keyed) == len(rows), "a row twice"
    for key, row in keyed.items():
        check_row(key, row)
    assert [p.name for p in (output / "data").iterdir() if p not in parts] == []
    return keyed


def check_row(key: Key, row: dict[str, Any]) -> None:
    assert (row["finish_reason"] == "error") == bool(row["error"]), key
    if row["error"]:
        assert row["error_type"], key
        return
    histogram, accepted = row["acceptance_histogram"], row["num_accepted_draft_tokens"]
    assert len(row["generated_tokens"]) == row["num_generated_tokens"] > 0, key
    assert sum(histogram) == row["num_spec_steps"] <= row["num_steps"], key
    assert sum(j * count for j, count in enumerate(histogram)) == accepted, key
    assert accepted <= row["num_draft_tokens"], key
    assert len(histogram) <= row["num_spec_tokens"] + 1, key
    cut = row["num_steps"] + accepted - row["num_generated_tokens"]
    assert 0 <= cut <= row["num_spec_tokens"], key
    if row["finish_reason"] == "length":
        assert cut == 0, key
    if row["num_spec_steps"]:
        assert row["mean_acceptance_length"] == pytest.approx(1 + accepted / row["num_spec_steps"])


def tokens_of(rows: dict[Key, dict[str, Any]]) -> dict[Key, tuple[Any, ...]]:
    return {key: tuple(row[name] for name in TOKEN_COLUMNS) for key, row in rows.items()}


Generate = Callable[..., int]


NUM_ROWS = 64
BASE = ("--max-tokens", 60, "--sampling.ignore_eos", "--seed", 5)


def copy_plan(run: Path, output: Path, keep_parts: Callable[[str], bool]) -> Path:
    """A folder as an interrupted run would leave it."""
    shutil.copytree(run, output, ignore=shutil.ignore_patterns("summary.json"))
    for part in parts_of(output):
        if not keep_parts(part.name):
            part.unlink()
    return output
