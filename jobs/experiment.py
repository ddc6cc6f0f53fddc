"""A benchmark's arms, run in turn in one process: what every run took, and what came out."""

import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from jobs.cli import say
from jobs.prompts import Prompt
from jobs.roofline import measure_roofline
from jobs.samples import MAX_LEN, measure_samples
from jobs.weights import load_pieces
from pipeline.admission import load_tokenizer
from pipeline.config import BenchConfig, engine_config, recipe_of
from pipeline.requests import derive_seed
from quant.checkpoint import open_checkpoint
from quant.config import Precision
from workers.actor import use_threads
from workers.build import build_engine
from workers.config import EngineConfig, SamplingParams
from workers.model import TargetModel, build_backend
from workers.phases import Phases
from workers.request import Completion, Request
from workers.stats import AcceptanceStats
from workers.step_times import StepTimes, measure_step_times
from workers.stopping import Detokenizer, TokenizerText


@dataclass(frozen=True)
class Arm:
    """One way to run the prompts."""

    precision: Precision
    drafts: str
    batch_size: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.precision} {self.drafts} x{self.batch_size} T={self.temperature:g}"


@dataclass(frozen=True)
class Measured:
    """A model with its step times."""

    model: TargetModel
    times: StepTimes


def measure(
    config: BenchConfig, folder: Path, prompts: Sequence[Prompt], num_threads: int
) -> dict[str, Any]:
    """Load the models, and measure all there is: step times, passes against raw kernels, the arms."""
    checkpoint, tokenizer = open_checkpoint(folder), load_tokenizer(folder)
    use_threads(os.cpu_count() or 1, in_kernels=False)
    pieces = {
        p: load_pieces(checkpoint, recipe_of(config, p), tokenizer) for p in config.precisions
    }
    use_threads(num_threads, in_kernels=True)
    longest = max(len(prompt.token_ids) for prompt in prompts) + config.max_tokens
    longest = max(longest, MAX_LEN)
    text = TokenizerText(tokenizer.backend_tokenizer.to_str())
    samples: dict[str, Any] | None = None
    models: dict[Precision, Measured] = {}
    roofline: list[dict[str, Any]] = []
    with torch.inference_mode():
        for precision, of_model in pieces.items():
            backend = build_backend(precision)
            model = TargetModel(checkpoint.architecture, of_model, backend, longest)
            model.warm_up()
            models[precision] = Measured(model, measure_step_times(model, longest))
        if "w8a8" in pieces:
            say("comparing passes with the raw kernels")
            roofline = measure_roofline(checkpoint.architecture, pieces["w8a8"])
            say("comparing samples of one prompt with separate prompts")
            samples = measure_samples(models["w8a8"].model, text)
    return {
        "step_times": {precision: asdict(m.times) for precision, m in models.items()},
        "roofline": roofline,
        "samples": samples,
        "runs": list(run_arms(config, prompts, models, text)),
    }


def arms(config: BenchConfig) -> list[Arm]:
    """Every combination, in the order of the tables."""
    return [
        Arm(precision, drafts, batch_size, temperature)
        for temperature, batch_size, precision, drafts in product(
            config.temperatures, config.batch_sizes, config.precisions, config.drafts
        )
    ]


def run_arms(
    config: BenchConfig,
    prompts: Sequence[Prompt],
    models: dict[Precision, Measured],
    text: Detokenizer,
) -> Iterator[dict[str, Any]]:
    """Yield a record of every run: each repeat runs all arms, and begins with another one.

    The first answers to each precision and temperature are what later ones must repeat, token by token.
    """
    todo = arms(config)
    first: dict[tuple[str, float], list[tuple[int, ...]]] = {}
    for repeat in range(config.num_repeats):
        start = repeat * len(todo) // config.num_repeats
        for arm in todo[start:] + todo[:start]:
            run = _run(config, arm, prompts, models[arm.precision], text)
            expected = first.setdefault((arm.precision, arm.temperature), run.token_ids)
            record = run.to_dict(prompts) | {
                "arm": asdict(arm),
                "repeat": repeat,
                "tokens_equal_first_arm": run.token_ids == expected,
            }
            say(
                f"{repeat + 1}/{config.num_repeats} {arm}: {record['tokens_per_second']:.1f} tokens/s"
            )
            yield record


@dataclass(frozen=True)
class _Run:
    seconds: float
    phases: Phases
    completions: list[Completion]

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        return [completion.token_ids for completion in self.completions]

    def to_dict(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        num_tokens = sum(map(len, self.token_ids))
        phases = {k: v for k, v in asdict(self.phases).items() if not k.startswith("_")}
        decoding = self.seconds - phases["prefill"]
        tasks = list(dict.fromkeys(prompt.task for prompt in prompts))
        return {
            "seconds": self.seconds,
            "num_tokens": num_tokens,
            "tokens_per_second": num_tokens / self.seconds,
            "decode_tokens_per_second": num_tokens / decoding,
            "phases": phases,
            "stats": _stats(self.completions),
            "tasks": {
                task: _task(
                    [c for c, p in zip(self.completions, prompts, strict=True) if p.task == task]
                )
                for task in tasks
            },
        }


def _run(
    config: BenchConfig,
    arm: Arm,
    prompts: Sequence[Prompt],
    measured: Measured,
    text: Detokenizer,
) -> _Run:
    """All prompts once, with a fresh engine; a budget learns anew, and the pool is empty."""
    engine_keys: EngineConfig = engine_config(
        arm.drafts, config.num_speculative_tokens, max_num_seqs=arm.batch_size
    )
    longest = max(len(prompt.token_ids) for prompt in prompts) + config.max_tokens
    params = SamplingParams(max_tokens=config.max_tokens, temperature=arm.temperature)
    requests = [
        Request(str(i), prompt.token_ids, params, derive_seed(config.seed, str(i)))
        for i, prompt in enumerate(prompts)
    ]
    times = measured.times if engine_keys.has_budget else None
    engine = build_engine(measured.model, engine_keys, longest, text, times)
    gc.collect()
    started = time.perf_counter()
    completions = list(engine.generate(requests))
    seconds = time.perf_counter() - started
    completions.sort(key=lambda completion: int(completion.request.id))
    return _Run(seconds, engine.phases, completions)


def _stats(completions: Sequence[Completion]) -> dict[str, Any]:
    total = sum((c.stats for c in completions), AcceptanceStats())
    steps = max(total.num_spec_steps, 1)
    return asdict(total) | {
        "num_spec_steps": total.num_spec_steps,
        "num_accepted_draft_tokens": total.num_accepted_draft_tokens,
        "mean_acceptance_length": total.mean_acceptance_length,
        "draft_acceptance_rate": total.draft_acceptance_rate,
        # Position i: the share of the steps with a draft that accepted more than i of its tokens.
        "acceptance_by_position": [
            sum(total.histogram[i + 1 :]) / steps for i in range(len(total.histogram) - 1)
        ],
    }


def _task(completions: Sequence[Completion]) -> dict[str, Any]:
    """Sums of a task's rows; `row_seconds` is each row's own time, company or not."""
    return {
        "num_rows": len(completions),
        "num_tokens": sum(len(c.token_ids) for c in completions),
        "row_seconds": sum(c.seconds for c in completions),
        "stats": _stats(completions),
    }
