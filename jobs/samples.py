"""What samples of one prompt save by sharing it: against as many prompts that share nothing."""

import statistics
import time
from typing import Any

from workers.build import build_engine
from workers.config import EngineConfig, SamplingParams
from workers.model import TargetModel
from workers.request import Request
from workers.stopping import Detokenizer

NUM_SAMPLES, PROMPT_TOKENS, ANSWER_TOKENS = 8, 500, 64
MAX_LEN = PROMPT_TOKENS + ANSWER_TOKENS
_REPEATS = 2


def measure_samples(model: TargetModel, text: Detokenizer) -> dict[str, Any]:
    """Seconds (medians) of 8 samples of one prompt, and of 8 prompts of its length; all rows at once."""
    vocab_size = model.architecture.vocab_size
    prompts = [
        tuple(
            (sample + 31 * i * i + 7 * i * (sample + 1)) % vocab_size for i in range(PROMPT_TOKENS)
        )
        for sample in range(NUM_SAMPLES)
    ]
    shared, separate = [], []
    for _ in range(_REPEATS):
        separate.append(_seconds(model, text, prompts))
        shared.append(_seconds(model, text, prompts[:1] * NUM_SAMPLES))
    return {
        "num_samples": NUM_SAMPLES,
        "prompt_tokens": PROMPT_TOKENS,
        "answer_tokens": ANSWER_TOKENS,
        "separate_seconds": statistics.median(separate),
        "shared_seconds": statistics.median(shared),
        "ratio": statistics.median(a / b for a, b in zip(separate, shared, strict=True)),
    }


def _seconds(model: TargetModel, text: Detokenizer, prompts: list[tuple[int, ...]]) -> float:
    config = EngineConfig(proposer="none", max_num_seqs=NUM_SAMPLES)
    params = SamplingParams(temperature=1, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    engine = build_engine(model, config, MAX_LEN, text)
    requests = [
        Request(str(i), prompt, params, seed=0, sample_idx=i) for i, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()
    num_tokens = sum(len(completion.token_ids) for completion in engine.generate(requests))
    assert num_tokens == NUM_SAMPLES * ANSWER_TOKENS
    return time.perf_counter() - started
