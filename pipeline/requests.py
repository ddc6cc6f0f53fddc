"""A plan row becomes requests for the engine: parameters merged, seeds made, samples spread out."""

import hashlib
import json
from typing import Any

from workers.config import SamplingParams
from workers.request import Request


def build_requests(row: dict[str, Any], defaults: SamplingParams, run_seed: int) -> list[Request]:
    """The n requests of an admitted plan row."""
    params = merge_params(row, defaults)
    seed = params.seed if params.seed is not None else derive_seed(run_seed, row["id"])
    prompt = tuple(row["prompt_token_ids"])
    return [Request(row["id"], prompt, params, seed, sample_idx) for sample_idx in range(params.n)]


def num_samples(row: dict[str, Any], defaults: SamplingParams) -> int:
    """How many samples an admitted plan row asks for."""
    return merge_params(row, defaults).n


def merge_params(row: dict[str, Any], defaults: SamplingParams) -> SamplingParams:
    """The run's parameters with the plan row's own over them."""
    if not row["sampling_params"]:
        return defaults
    merged = json.dumps(defaults.model_dump(mode="json") | json.loads(row["sampling_params"]))
    return SamplingParams.model_validate_json(merged)


def derive_seed(run_seed: int, row_id: str) -> int:
    """A row's seed (63 bits) from the run's seed and its id, so that equal prompts differ by row."""
    digest = hashlib.sha256(f"{run_seed}:{row_id}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
