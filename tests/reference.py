"""Naive decoding, to be read against the definition: one row, one token at a time, nothing kept.

Every step starts from nothing but the token list: a fresh prefill in a fresh cache, the penalties and
the text worked out anew. No batch, no draft, no engine.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.fakes import ByteDetokenizer
from workers.backend import StepBatch
from workers.config import SamplingParams
from workers.model import TargetModel
from workers.request import Request
from workers.sampling import draw, filtered_probs, uniform


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    text: str
    logprobs: tuple[tuple[float, int], ...]  # Of each token: log-probability and rank.


@cache
def next_logits(model: TargetModel, token_ids: tuple[int, ...]) -> np.ndarray:
    """The logits [V] behind the tokens, by a prefill of all of them."""
    length = len(token_ids)
    batch = StepBatch(
        token_ids=torch.tensor(token_ids),
        rows=torch.zeros(length, dtype=torch.int64),
        positions=torch.arange(length),
        logit_indices=torch.tensor([length - 1]),
    )
    with torch.inference_mode():
        return model.forward(batch, model.new_cache(1, length))[0].numpy()


def reference_answer(model: TargetModel, request: Request, max_len: int) -> Answer:
    """The answer that every engine must give, whatever it drafts and whoever else it serves."""
    params, prompt = request.params, list(request.prompt_token_ids)
    eos = set() if params.ignore_eos else set(model.architecture.eos_token_ids)
    generated: list[int] = []
    logprobs: list[tuple[float, int]] = []
    while True:
        raw = next_logits(model, tuple(prompt + generated))
        token_id = _choose(raw, request, generated, eos | set(params.stop_token_ids))
        generated.append(token_id)
        logprobs.append(_logprob_and_rank(raw, token_id))
        end = _ends(generated, params, eos, len(prompt) + len(generated) == max_len)
        if end is not None:
            return Answer(tuple(generated), **end, logprobs=tuple(logprobs))


def _choose(raw: np.ndarray, request: Request, generated: list[int], ends: set[int]) -> int:
    params = request.params
    logits = [float(value) for value in raw]
    for i in {*request.prompt_token_ids, *generated}:
        rises = logits[i] > 0
        logits[i] *= 1 / params.repetition_penalty if rises else params.repetition_penalty
    for i in set(generated):
        logits[i] -= params.presence_penalty + params.frequency_penalty * generated.count(i)
    if len(generated) < params.min_tokens:
        for i in ends:
            logits[i] = -math.inf
    if params.temperature == 0:
        return logits.index(max(logits))
    u = uniform(request.seed, request.sample_idx, len(generated))
    return draw(filtered_probs(np.array(logits), params), u)


def _logprob_and_rank(raw: np.ndarray, token_id: int) -> tuple[float, int]:
    logits = torch.from_numpy(raw).double()
    rank = 1 + sum(value > float(raw[token_id]) for value in raw.tolist())
    return float(torch.log_softmax(logits, 0)[token_id]), rank


def _ends(
    generated: list[int], params: SamplingParams, eos: set[int], full: bool
) -> dict[str, Any] | None:
    text = ByteDetokenizer().decode(generated)
    if len(generated) > params.min_tokens:
        if generated[-1] in params.stop_token_ids:
            return {"finish_reason": "stop", "stop_reason": generated[-1], "text": text}
        if generated[-1] in eos:
            return {"finish_reason": "stop", "stop_reason": None, "text": text}
        found = [(text.find(stop), stop) for stop in params.stop if stop in text]
        if found:
            at, stop = min(found)
            return {"finish_reason": "stop", "stop_reason": stop, "text": text[:at]}
    if full or len(generated) == params.max_tokens:
        return {"finish_reason": "length", "stop_reason": None, "text": text}
    return None
