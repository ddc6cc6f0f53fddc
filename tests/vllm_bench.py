"""The same prompts through this engine and through vLLM's CPU build, in turn: tokens per second.

    python -m tests.vllm_bench FOLDER --input FILE... [--vllm-python PYTHON] [--every 15] ...

FOLDER is one that `jobs quantize` wrote. vLLM is run by the Python of another environment (see
CONTRIBUTING.md); where there is none, the script says so and exits with 0. Each engine loads once, in a
process of its own with the allocator set the same way, and waits while another one works. `together`
gives an engine all prompts at once, `alone` one at a time. EOS is ignored, so that every arm emits the
same number of tokens. Ratios are taken within a repeat. Loading and warming up do not count.

On CPUs without VNNI vLLM's int8 product saturates: its tokens are wrong there, and so is what its
drafts gain; the script says so. `tests/vllm_check.py` is about tokens, this is about time.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

OURS = ("none", "ngram:5", "suffix:budget")
VLLM = ("none", "ngram:5")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--input", nargs="+", required=True)
    parser.add_argument("--vllm-python", default=os.environ.get("VLLM_PYTHON"))
    parser.add_argument(
        "--every", type=int, default=15, help="take every so many rows of each file"
    )
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--alone-every", type=int, default=1, help="alone: one in so many prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16, help="of this engine, together")
    parser.add_argument("--modes", nargs="+", default=["together", "alone"])
    parser.add_argument("--ours", nargs="+", default=list(OURS))
    parser.add_argument("--vllm", nargs="+", default=list(VLLM))
    parser.add_argument("--dtype", default="bfloat16", help="vLLM's, for what is not int8")
    parser.add_argument("--head", default="int8", help="this engine's")
    parser.add_argument(
        "--output", type=Path, help="where the numbers go as JSON, with the lengths of the prompts"
    )
    arguments = parser.parse_args()
    if not arguments.vllm_python:
        print("skipped: no vLLM here (give --vllm-python or $VLLM_PYTHON)")
        return 0
    job = {
        "folder": str(arguments.folder.resolve()),
        "prompts": read(arguments),
        "max_tokens": arguments.max_tokens,
        "alone_every": arguments.alone_every,
        "batch_size": arguments.batch_size,
        "dtype": arguments.dtype,
        "head": arguments.head,
    }
    engines = [
        *(Engine("ours", drafts, sys.executable, job) for drafts in arguments.ours),
        *(Engine("vllm", drafts, arguments.vllm_python, job) for drafts in arguments.vllm),
    ]
    runs: list[dict[str, Any]] = []
    try:
        for engine in engines:  # All load and warm up before anything counts.
            engine.run("together")
        for repeat in range(arguments.repeats):
            for mode in arguments.modes:
                for engine in engines:
                    run = engine.run(mode) | {"repeat": repeat, "mode": mode}
                    runs.append(run | {"engine": engine.name})
                    print(
                        f"{repeat} {mode} {engine.name}: {run['tokens_per_second']:.1f}", flush=True
                    )
    finally:
        for engine in engines:
            engine.close()
    print(format_runs(runs, arguments))
    if any(engine.saturates for engine in engines):
        print("\nvLLM's int8 product saturates on this CPU: its tokens are wrong, its time is not.")
    if arguments.output:
        told = job | {"folder": arguments.folder.name, "prompts": [len(p) for p in job["prompts"]]}
        arguments.output.write_text(json.dumps({"job": told, "runs": runs}, indent=1) + "\n")
    return 0


def read(arguments: argparse.Namespace) -> list[list[int]]:
    from jobs.prompts import read_prompts
    from pipeline.admission import load_tokenizer

    tokenizer = load_tokenizer(arguments.folder)
    prompts = [
        list(prompt.token_ids)
        for uri in arguments.input
        for prompt in list(read_prompts(uri, tokenizer, "input"))[:: arguments.every]
    ]
    count = min(arguments.num_prompts, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


class Engine:
    """An engine in a process of its own; it loads when it is first asked to run."""

    def __init__(self, kind: str, drafts: str, python: str, job: dict[str, Any]) -> None:
        from workers.actor import worker_environment

        self.name, self.saturates = f"{kind} {drafts}", False
        self._job: dict[str, Any] | None = job  # Until it has been sent.
        environment = worker_environment(os.cpu_count() or 1)
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        if kind == "vllm":  # The allocator's settings alone: its threads are its own.
            environment = {k: v for k, v in environment.items() if k.startswith("MALLOC_")}
        self._process = subprocess.Popen(
            [python, __file__, "--engine", kind, drafts],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def run(self, mode: str) -> dict[str, Any]:
        """All prompts once."""
        if self._job is not None:
            self._send(self._job)
            self._job = None
        self._send(mode)
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("@"):
                answer: dict[str, Any] = json.loads(line[1:])
                self.saturates |= answer.pop("saturates")
                answer["tokens_per_second"] = answer["num_tokens"] / answer["seconds"]
                return answer
        raise SystemExit(f"{self.name}: ended; its messages are above")

    def close(self) -> None:
        """Let it end."""
        self._process.kill()
        self._process.wait()

    def _send(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"{self.name}: ended; its messages are above") from None


def format_runs(runs: list[dict[str, Any]], arguments: argparse.Namespace) -> str:
    """A Markdown table; `over vLLM` is over its better mode, within each repeat."""
    lines = ["| | engine | tokens/s (least to most) | over vLLM's better |", "|---|---|---|---|"]
    for mode in arguments.modes:
        of_mode = [run for run in runs if run["mode"] == mode]
        best = [
            max(
                r["tokens_per_second"]
                for r in of_mode
                if r["repeat"] == i and "vllm" in r["engine"]
            )
            for i in range(arguments.repeats)
        ]
        for name in dict.fromkeys(run["engine"] for run in of_mode):
            rates = [run["tokens_per_second"] for run in of_mode if run["engine"] == name]
            ratio = statistics.median(rate / least for rate, least in zip(rates, best, strict=True))
            spread = f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
            lines.append(f"| {mode} | {name} | {spread} | {ratio:.2f} |")
    return "\n".join(lines)


# --- What the engines' own processes run ---


def serve(kind: str, drafts: str) -> None:
    """Read the job, then run it in the modes that are asked for."""
    job = json.loads(sys.stdin.readline())
    load = load_ours if kind == "ours" else load_vllm
    generate, saturates = load(drafts, job)
    for line in sys.stdin:
        prompts = job["prompts"]
        together = json.loads(line) == "together"
        batches = [prompts] if together else [[p] for p in prompts[:: job["alone_every"]]]
        started = time.perf_counter()
        num_tokens = sum(generate(batch) for batch in batches)
        seconds = time.perf_counter() - started
        answer = {"seconds": seconds, "num_tokens": num_tokens, "saturates": saturates}
        print("\n@" + json.dumps(answer), flush=True)


Generate = Callable[[list[list[int]]], int]  # Prompts to the number of tokens answered.


def load_ours(drafts: str, job: dict[str, Any]) -> tuple[Generate, bool]:
    import torch

    from pipeline.config import engine_config
    from quant.checkpoint import open_checkpoint
    from quant.config import QuantConfig
    from workers.actor import use_threads
    from workers.build import build_engine, load_model
    from workers.config import SamplingParams
    from workers.request import Request
    from workers.step_times import measure_step_times
    from workers.stopping import TokenizerText

    folder, num_threads = Path(job["folder"]), os.cpu_count() or 1
    longest = max(map(len, job["prompts"])) + job["max_tokens"]
    config = QuantConfig(recipe="rtn", head=job["head"])
    model = load_model(open_checkpoint(folder), config, longest)
    use_threads(num_threads, in_kernels=True)
    keys = engine_config(drafts, 5, max_num_seqs=job["batch_size"])
    with torch.inference_mode():
        model.warm_up()
        times = measure_step_times(model, longest) if keys.has_budget else None
    text = TokenizerText((folder / "tokenizer.json").read_text(encoding="utf-8"))
    params = SamplingParams(max_tokens=job["max_tokens"], temperature=0, ignore_eos=True)

    def generate(prompts: list[list[int]]) -> int:
        engine = build_engine(model, keys, longest, text, times)
        requests = [Request(str(i), tuple(p), params, seed=0) for i, p in enumerate(prompts)]
        return sum(len(c.token_ids) for c in engine.generate(requests))

    return generate, False


def load_vllm(drafts: str, job: dict[str, Any]) -> tuple[Generate, bool]:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm  # type: ignore[import-not-found]

    keys: dict[str, Any] = {}
    proposer, _, length = drafts.partition(":")
    if proposer != "none":
        keys["speculative_config"] = {
            "method": proposer,
            "num_speculative_tokens": int(length),
            "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }
    longest = max(map(len, job["prompts"])) + job["max_tokens"] + 16
    llm = vllm.LLM(
        model=job["folder"],
        dtype=job["dtype"],
        max_model_len=longest,
        max_num_seqs=len(job["prompts"]),
        enable_prefix_caching=False,
        **keys,
    )
    params = vllm.SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True)

    def generate(prompts: list[list[int]]) -> int:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate, saturates()


def saturates() -> bool:
    """Whether vLLM's int8 product is wrong on this CPU."""
    import torch
    from vllm import _custom_ops as ops  # type: ignore[import-not-found]

    weight, ones = torch.full((64, 64), 127, dtype=torch.int8), torch.ones(64, 1)
    handler = ops.create_onednn_scaled_mm(weight.t(), ones, torch.float32, True, False, 32)
    got = torch.empty(4, 64)
    codes = torch.full((4, 64), 126, dtype=torch.int8)
    ops.onednn_scaled_mm(handler, codes, got, torch.ones(4, 1), None, None, None)
    return not bool((got == 127 * 126 * 64).all())


if __name__ == "__main__":
    if "--engine" in sys.argv:
        serve(*sys.argv[2:4])
        sys.exit(0)
    sys.exit(main())
