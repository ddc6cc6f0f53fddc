"""A plan row becomes requests for the engine: parameters merged, seeds made, samples spread out."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from workers.config import SamplingParams
from workers.request import Request


def build_requests(row: dict[str, Any], defaults: SamplingParams, run_seed: int) -> list[Request]:
    """The n requests of an admitted plan row; rows that share answers have one seed."""
    params = merge_params(row, defaults)
    digest = row.get("prompt_digest")
    named = digest.hex() if digest else row["id"]
    seed = params.seed if params.seed is not None else derive_seed(run_seed, named)
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


def digest_prompt(token_ids: Sequence[int], params: dict[str, Any]) -> bytes:
    """Name a prompt and a row's own parameters (128 bits): rows that share them can share answers."""
    digest = hashlib.blake2b(np.asarray(token_ids, np.int32).tobytes(), digest_size=16)
    digest.update(json.dumps(params, sort_keys=True).encode())
    return digest.digest()


def derive_seed(run_seed: int, name: str) -> int:
    """A row's seed (63 bits) from the run's seed and its id, so that equal prompts differ by row."""
    digest = hashlib.sha256(f"{run_seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
