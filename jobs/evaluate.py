"""How far W8A8 is from the original on held-out prompts, bfloat16 beside it: `fidelity.json` and a table.

The text is each prompt with the bfloat16 model's greedy answer. At every token of the answers the float32
model's prediction is compared with those of the models as workers run them (the kernels, not a
simulation). Prompts that carry an answer or tests are graded for both models' own greedy answers.
"""

import json
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from jobs.cli import say
from jobs.prompts import Prompt
from pipeline.config import QuantizeConfig
from pipeline.grading import grade, wilson_interval
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.config import QuantConfig
from quant.fidelity import Fidelity, compare
from quant.quantize import ROUND_TO_NEAREST
from quant.simulate import Head, run_texts
from workers.backend import StepBatch
from workers.build import build_engine, load_model
from workers.config import EngineConfig, SamplingParams
from workers.model import TargetModel
from workers.request import Request
from workers.stopping import TokenizerText


@dataclass(frozen=True)
class _Answer:
    token_ids: tuple[int, ...]
    text: str


@torch.inference_mode()
def evaluate(
    config: QuantizeConfig,
    checkpoint: Checkpoint,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    output: Path,
) -> None:
    """Measure the folder `output` against the original; writes and prints the report."""
    quantized = open_checkpoint(output)
    max_len = max(len(p.token_ids) for p in prompts) + config.max_tokens
    text = TokenizerText(tokenizer.backend_tokenizer.to_str())
    say(f"measuring on {len(prompts)} prompts, {config.max_tokens} tokens each")
    reference = QuantConfig().reference()
    head = Head(checkpoint, reference)
    answers: dict[str, list[_Answer]] = {}
    fidelity: dict[str, Any] = {}
    texts: list[tuple[int, ...]] = []
    for name, source_of, recipe in (
        ("bf16", checkpoint, QuantConfig(precision="bf16")),
        ("w8a8", quantized, config.quant),
    ):
        model = load_model(source_of, recipe, max_len)
        answers[name] = _answer(model, prompts, config.max_tokens, text, max_len)
        if not texts:
            given = zip(prompts, answers[name], strict=True)
            texts = [(*prompt.token_ids, *answer.token_ids) for prompt, answer in given]
            states_TC = run_texts(checkpoint, reference, ROUND_TO_NEAREST, texts)
        fidelity[name] = _measure(model, head, states_TC, prompts, texts).to_dict()
        del model
    report = {
        "model": config.model,
        "texts": list(config.evaluate),
        "fidelity": fidelity,
        "exact_match": _grade(prompts, answers),
    }
    path = output / "fidelity.json"
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    show(report)
    print(f"The numbers are in {path}.")


def _answer(
    model: TargetModel,
    prompts: Sequence[Prompt],
    max_tokens: int,
    text: TokenizerText,
    max_len: int,
) -> list[_Answer]:
    """Each prompt's greedy answer: token ids and text."""
    # Without step times every draft would be verified in full, which loses with so many rows at once.
    engine = build_engine(model, EngineConfig(proposer="none"), max_len, text)
    params = SamplingParams(max_tokens=max_tokens, temperature=0)
    requests = (Request(str(i), p.token_ids, params, seed=0) for i, p in enumerate(prompts))
    answers = {c.request.id: _Answer(c.token_ids, c.text) for c in engine.generate(requests)}
    return [answers[str(i)] for i in range(len(prompts))]


def _measure(
    model: TargetModel,
    head: Head,
    states_TC: torch.Tensor,
    prompts: Sequence[Prompt],
    texts: Sequence[tuple[int, ...]],
) -> Fidelity:
    """The model against the original, whose last states are given, on the answers' tokens."""
    cache = model.new_cache(1, max(map(len, texts)))
    parts = []
    states = states_TC.split([len(text) for text in texts])
    for prompt, text, state_C in zip(prompts, texts, states, strict=True):
        start = len(prompt.token_ids)
        batch = StepBatch(
            token_ids=torch.tensor(text[:-1]),
            rows=torch.zeros(len(text) - 1, dtype=torch.int64),
            positions=torch.arange(len(text) - 1),
            logit_indices=torch.arange(start - 1, len(text) - 1),
        )
        logits_TV = model.forward(batch, cache)
        parts.append(compare(head(state_C[start - 1 : -1]), logits_TV, torch.tensor(text[start:])))
    return reduce(operator.add, parts)


def _grade(prompts: Sequence[Prompt], answers: dict[str, list[_Answer]]) -> dict[str, Any]:
    """By task and model: right answers, graded ones, and the 95 % confidence interval of their share."""
    marks: dict[str, dict[str, list[bool]]] = {}
    for name, given in answers.items():
        for prompt, answer in zip(prompts, given, strict=True):
            mark = grade(prompt.columns, answer.text)
            if mark is not None:
                marks.setdefault(prompt.task, {}).setdefault(name, []).append(mark)
    return {
        task: {
            name: {
                "num_right": sum(marked),
                "num_graded": len(marked),
                "confidence_interval": wilson_interval(sum(marked), len(marked)),
            }
            for name, marked in by_model.items()
        }
        for task, by_model in marks.items()
    }


def show(report: dict[str, Any]) -> None:
    """Print a report's table."""
    console = Console()
    table = Table(title="against the float32 model, teacher-forced on held-out answers")
    names = list(report["fidelity"])
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    fidelity = [report["fidelity"][name] for name in names]
    table.add_row("tokens", *(str(f["num_tokens"]) for f in fidelity))
    table.add_row(
        "top-1 agreement",
        *(
            f"{f['top1_agreement']:.2%} ± {f['top1_agreement_standard_error']:.2%}"
            for f in fidelity
        ),
    )
    table.add_row("mean KL", *(f"{f['mean_kl']:.5f}" for f in fidelity))
    table.add_row("99th percentile KL", *(f"{f['p99_kl']:.4f}" for f in fidelity))
    table.add_row("perplexity ratio", *(f"{f['perplexity_ratio']:.4f}" for f in fidelity))
    for edge in fidelity[0]["flip_margins"]:
        label = f"flips, margin {edge}"
        table.add_row(label, *(str(f["flip_margins"][edge]) for f in fidelity))
    for task, by_model in report["exact_match"].items():
        cells = (_share(by_model[name]) for name in names)
        table.add_row(f"{task} right (95 % interval)", *cells)
    console.print(table)


def _share(graded: dict[str, Any]) -> str:
    low, high = graded["confidence_interval"]
    return f"{graded['num_right']} of {graded['num_graded']} ({low:.0%} to {high:.0%})"
