"""Every input row comes out once, whatever it is: from files to parts, with no model needed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline import shard_worker, storage
from pipeline.admission import Admission, load_tokenizer
from pipeline.config import RunConfig
from pipeline.inspection import check_output
from pipeline.parts import part_uri
from pipeline.shard_worker import ShardWorker
from tests.outputs import make_plan
from tests.test_shard_worker import Engine, settings_for
from workers.config import SamplingParams

_TEXT = st.text(max_size=30) | st.just("x" * 500) | st.sampled_from(["", " ", "é\u2028\x00", "😀"])
_SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.just(2**70) | _TEXT
_PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(-1, 3),
        "max_tokens": st.integers(0, 50),
        "temperature": st.floats(-1, 2) | _SCALARS,
        "unknown": _SCALARS,
    },
)
_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "system", "assistant", "robot"]), "content": _SCALARS}
    ),
    max_size=3,
)
_ROWS = st.fixed_dictionaries(
    {},
    optional={
        "prompt": _TEXT | _SCALARS,
        "messages": _MESSAGES | _SCALARS,
        "prompt_token_ids": st.lists(st.integers(-1, 300), max_size=50),
        "sampling_params": _PARAMS | _SCALARS,
        "topic": _TEXT,
    },
)
_LINES = st.lists(
    _ROWS.map(lambda row: json.dumps(row).encode())
    | _ROWS.map(lambda row: json.dumps(row, ensure_ascii=False).encode(errors="replace"))
    | st.binary(max_size=20).map(lambda b: b.replace(b"\n", b"").replace(b"\r", b"") or b"{")
    | st.sampled_from([b"{}", b"[]", b"{", b"null", b'{"prompt": "a"', b'{"prompt": "same"}']),
    min_size=1,
    max_size=20,
)


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(max_tokens=8), 40, len(tokenizer))


@settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(lines=_LINES, rows_per_shard=st.integers(1, 8))
def test_every_row_comes_out_once(
    admission: Admission,
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    rows_per_shard: int,
) -> None:
    folder = tmp_path_factory.mktemp("once")
    (folder / "in.jsonl").write_bytes(b"\n".join(lines))
    output, uri = folder / "out", str(folder / "in.jsonl")
    config = RunConfig(model="m", input=(uri,), output=str(output))
    expected = [number for number, line in enumerate(lines, start=1) if line.strip()]
    if not expected:
        return
    plan = make_plan(admission, [uri], output, rows_per_shard=rows_per_shard)

    async def main() -> None:
        worker = ShardWorker([None], settings_for(output, plan))  # type: ignore[list-item]
        for shard in plan.shards:
            await worker.run(shard.name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_worker, "start_engine", lambda *_: Engine())
        asyncio.run(asyncio.wait_for(main(), 60))
    assert list(check_output(str(output), config, plan)) == []
    rows: list[dict[str, Any]] = []
    for shard in plan.shards:
        assert storage.exists(part_uri(str(output), shard.name))
        rows += pq.read_table(part_uri(str(output), shard.name)).to_pylist()
    assert list(dict.fromkeys(row["id"] for row in rows)) == [f"in.jsonl:{n}" for n in expected]
    keys = [(row["id"], row["sample_idx"]) for row in rows]
    assert len(set(keys)) == len(keys)
    for row in rows:
        assert (row["finish_reason"] == "error") == bool(row["error"]) == bool(row["error_type"])
