"""Rows of a finished data set generated again, and their tokens compared."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from jobs.cli import say
from jobs.weights import prepare_pieces
from pipeline.admission import load_tokenizer, tokenizer_digest
from pipeline.calibration import read_calibration
from pipeline.config import RunConfig, engine_config
from pipeline.inspection import State
from pipeline.parts import read_part
from pipeline.requests import build_requests
from pipeline.shards import read_shard
from quant.checkpoint import open_checkpoint
from quant.hub import find_checkpoint
from quant.prepare import recipe_digest, weights_digest
from workers.actor import use_threads
from workers.build import build_engine
from workers.model import TargetModel, build_backend
from workers.request import Request
from workers.stopping import TokenizerText

Answers = dict[tuple[str, int], list[int]]


def replay(output: str, state: State, share: float) -> int:
    """Generate a share of the answered rows again, without drafts; returns how many samples differ.

    Raises:
        InputError: the model is not the one that the output was made with.
    """
    assert state.plan is not None
    requests: list[Request] = []
    expected: Answers = {}
    for shard in state.done:
        requests += _pick(output, shard, state.config, share, expected)
    if not requests:
        say("no answer to compare with")
        return 0
    completions = _generate(state, requests)
    differing = [key for key, tokens in expected.items() if completions.get(key) != tokens]
    for row_id, sample_idx in differing[:20]:
        print(f"row {row_id!r}, sample {sample_idx}: other tokens than in the output")
    print(f"{len(expected)} samples generated again, {len(differing)} differ")
    return len(differing)


def _pick(
    output: str, shard: str, config: RunConfig, share: float, expected: Answers
) -> Iterator[Request]:
    """Requests of a shard's rows that the share falls on, always the same; their answers so far."""
    table, _ = read_part(output, shard)
    columns = ["id", "sample_idx", "generated_tokens"]
    answers = {
        (row["id"], row["sample_idx"]): row["generated_tokens"]
        for row in table.select(columns).to_pylist()
        if row["generated_tokens"] is not None
    }
    for row in read_shard(output, shard).to_pylist():
        if row["error"] is None and (_fraction(row["id"]) < share or not expected):
            for request in build_requests(row, config.sampling, config.seed):
                key = request.id, request.sample_idx
                if key in answers:
                    expected[key] = answers[key]
                    yield request


def _fraction(row_id: str) -> float:
    return int.from_bytes(hashlib.sha256(row_id.encode()).digest()[:8]) / 2**64


def _generate(state: State, requests: Sequence[Request]) -> Answers:
    config, plan = state.config, state.plan
    assert plan is not None
    checkpoint = open_checkpoint(find_checkpoint(config.model).resolve())
    tokenizer: Any = load_tokenizer(checkpoint.folder)
    texts = [] if checkpoint.is_quantized else read_calibration(config.quant, tokenizer)
    recipe = recipe_digest(checkpoint, config.quant, texts)
    origin = {"weights": weights_digest(config.quant, recipe)}
    plan.check_origin(origin | {"tokenizer": tokenizer_digest(tokenizer)})
    pieces = prepare_pieces(checkpoint, config.quant, texts, recipe)
    use_threads(os.cpu_count() or 1, in_kernels=config.quant.precision in ("w8a8", "bf16"))
    max_len = max(2, plan.max_total_tokens)
    backend = build_backend(config.quant.precision, config.cluster.pools[0].device)
    engine = build_engine(
        TargetModel(checkpoint.architecture, pieces, backend, max_len),
        engine_config("none", 0, max_num_seqs=config.engine.max_num_seqs),
        max_len,
        TokenizerText(tokenizer.backend_tokenizer.to_str()),
    )
    with torch.inference_mode():
        return {
            (c.request.id, c.request.sample_idx): list(c.token_ids)
            for c in engine.generate(requests)
        }
