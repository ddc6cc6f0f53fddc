"""Whether vLLM generates from a folder that `jobs quantize` wrote, and how often it agrees with us.

    python -m tests.vllm_check FOLDER [--vllm-python PYTHON] [--prompts FILE] [--tokens 32]

vLLM wants versions of its own, so it is run by the Python of another environment (`--vllm-python`, or
$VLLM_PYTHON; see CONTRIBUTING.md); where there is none, the check says so and exits with 0. vLLM answers
the prompts greedily; our model then reads the same tokens, and at every token of the answers its first
choice is compared with vLLM's. Exit code 1: they agree less often than `--least`.

On CPUs without VNNI, vLLM's int8 product saturates without a word; the check probes for that, says so,
and replaces the product alone by an exact one, so that all else of vLLM is what is checked.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PROMPTS = Path(__file__).parents[1] / "examples" / "prompts.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument("--prompts", type=Path, default=PROMPTS)
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32", help="vLLM's dtype for what is not int8")
    parser.add_argument("--least", type=float, default=0.9)
    arguments = parser.parse_args()
    if not arguments.vllm_python:
        print("skipped: no vLLM here (give --vllm-python or $VLLM_PYTHON)")
        return 0
    prompts = read_prompts(arguments.folder, arguments.prompts, arguments.num_prompts)
    job = {
        "folder": str(arguments.folder),
        "prompts": prompts,
        "tokens": arguments.tokens,
        "dtype": arguments.dtype,
    }
    result = subprocess.run(
        [arguments.vllm_python, __file__, "--in-vllm"],
        input=json.dumps(job),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if result.returncode:
        print("vLLM failed; its messages are above")
        return 1
    said = json.loads(result.stdout.splitlines()[-1])
    agreement, count = compare(arguments.folder, prompts, said["answers"])
    if said["saturates"]:
        print("vLLM's int8 product saturates on this CPU; an exact one was put in its place")
    print(f"first answer: {said['texts'][0]!r}")
    print(f"{agreement:.1%} of vLLM's {count} greedy tokens are our model's first choice, too")
    return int(agreement < arguments.least)


def read_prompts(folder: Path, prompts: Path, count: int) -> list[list[int]]:
    from pipeline.admission import load_tokenizer
    from pipeline.calibration import read_texts

    return read_texts(str(prompts), load_tokenizer(folder), count, max_tokens=400)


def compare(folder: Path, prompts: list[list[int]], answers: list[list[int]]) -> tuple[float, int]:
    """The share of vLLM's tokens that our model would choose as well, and how many there are."""
    import torch

    from quant.checkpoint import open_checkpoint
    from quant.config import QuantConfig
    from workers.backend import StepBatch
    from workers.build import load_model

    checkpoint, config = open_checkpoint(folder), QuantConfig(head="bf16")
    model = load_model(checkpoint, config, 512)
    num_equal, count = 0, 0
    for prompt, answer in zip(prompts, answers, strict=True):
        text = torch.tensor(prompt + answer)
        batch = StepBatch(
            token_ids=text[:-1],
            rows=torch.zeros(len(text) - 1, dtype=torch.int64),
            positions=torch.arange(len(text) - 1),
            logit_indices=torch.arange(len(prompt) - 1, len(text) - 1),
        )
        with torch.inference_mode():
            chosen = model.forward(batch, model.new_cache(1, 512)).argmax(dim=1)
        num_equal += int((chosen == text[len(prompt) :]).sum())
        count += len(answer)
    return num_equal / count, count


def run_in_vllm(job: dict[str, Any]) -> dict[str, Any]:
    """The part that vLLM's Python runs; nothing of this project is imported there."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # One process: `make_exact` must reach it.
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm  # type: ignore[import-not-found]

    saturates = make_exact()
    llm = vllm.LLM(
        model=job["folder"],
        dtype=job["dtype"],
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=16,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt in job["prompts"]],
        vllm.SamplingParams(temperature=0, max_tokens=job["tokens"]),
        use_tqdm=False,
    )
    return {
        "saturates": saturates,
        "answers": [list(output.outputs[0].token_ids) for output in outputs],
        "texts": [output.outputs[0].text for output in outputs],
    }


def make_exact() -> bool:
    """Replace vLLM's int8 product if it saturates here; returns whether it does."""
    import torch
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    current_platform.import_kernels()
    weight, ones = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64, 1)
    handler = ops.create_onednn_scaled_mm(weight.t(), ones, torch.float32, True, False, 32)
    got = torch.empty(4, 64)
    codes = torch.full((4, 64), 126, dtype=torch.int8)
    ops.onednn_scaled_mm(handler, codes, got, torch.ones(4, 1), None, None, None)
    if bool((got == 127 * 126 * 64).all()):
        return False

    def create(weight_KN: Any, scales: Any, *_: Any) -> Any:
        k, n = weight_KN.shape
        return SimpleNamespace(
            k=k, n=n, weight_KN=weight_KN.double(), scales=scales.flatten().double()
        )

    def multiply(handler: Any, x: Any, output: Any, x_scale: Any, *rest: Any) -> None:
        sums = (x.double() @ handler.weight_KN) * x_scale.reshape(-1, 1) * handler.scales
        bias = rest[-1]
        output.copy_(sums if bias is None else sums + bias)

    ops.create_onednn_scaled_mm, ops.onednn_scaled_mm = create, multiply
    return True


if __name__ == "__main__":
    if "--in-vllm" in sys.argv:
        answer = run_in_vllm(json.load(sys.stdin))
        sys.stdout.flush()
        print("\n" + json.dumps(answer))
        sys.exit(0)
    sys.exit(main())
