"""What `jobs plan` says of a plan: every number worked out by hand."""

from pathlib import Path

import numpy as np
import pytest

from jobs.plan import format_histogram
from pipeline.admission import Admission, load_tokenizer
from pipeline.config import DataConfig, TooLong
from pipeline.plan_report import PlanReport, estimate_seconds, report_plan
from tests.outputs import make_plan, write_jsonl
from tests.runs import Generate
from workers.config import SamplingParams
from workers.step_times import StepTimes

MAX_LEN = 40
ROWS = [
    {"prompt": "abcd"},  # 4 tokens, 8 of an answer.
    {"prompt": "abcd", "sampling_params": {"n": 2, "max_tokens": 3}},  # The same prompt.
    {"prompt": "x" * 36},  # 36 tokens; there is room for 4.
    {"prompt": "x" * 60},  # Too long.
    "no json",
    {"prompt": ""},
    {"prompt": "abcde"},
]


def admission_of(checkpoint: Path, too_long: TooLong = "refuse") -> Admission:
    tokenizer = load_tokenizer(checkpoint)
    data = DataConfig(too_long=too_long)
    return Admission(tokenizer, SamplingParams(max_tokens=8), MAX_LEN, len(tokenizer), data)


def report_of(admission: Admission, folder: Path) -> PlanReport:
    uri = write_jsonl(folder / "a.jsonl", ROWS)
    plan = make_plan(admission, [uri], folder / "out", rows_per_shard=2)
    return report_plan(plan, str(folder / "out"), SamplingParams(max_tokens=8), MAX_LEN)


def test_a_report_is_the_sum_of_the_rows(tiny_checkpoint: Path, tmp_path: Path) -> None:
    report = report_of(admission_of(tiny_checkpoint), tmp_path)
    assert report.num_rows == 7
    assert report.refusals == {"PromptTooLong": 1, "BadRow": 1, "InvalidPrompt": 1}
    assert "line 4: the prompt has 60 tokens" in report.first_refusal
    assert (report.num_truncated, report.num_duplicates) == (0, 1)
    assert report.num_samples == 1 + 2 + 1 + 1
    assert report.lengths.tolist() == [4, 4, 36, 5]
    assert report.num_input_tokens == 49
    assert report.max_output_tokens == 8 + 2 * 3 + 4 + 8
    assert len(report.first_prompt) == 4


@pytest.mark.parametrize("too_long", ["truncate-left", "truncate-right"])
def test_prompts_are_cut_where_that_is_asked_for(
    tiny_checkpoint: Path, tmp_path: Path, too_long: TooLong
) -> None:
    report = report_of(admission_of(tiny_checkpoint, too_long), tmp_path)
    assert report.refusals == {"BadRow": 1, "InvalidPrompt": 1}
    assert report.num_truncated == 2
    assert report.lengths.tolist() == [4, 4, 32, 32, 5]  # 40 less 8 of an answer.


def test_which_end_is_cut(tiny_checkpoint: Path) -> None:
    from pipeline.readers import RawRow

    row = RawRow(1, "here", {"prompt": "a" * 30 + "b" * 30})
    left, right = (
        admission_of(tiny_checkpoint, name).admit(row, "s")
        for name in ("truncate-left", "truncate-right")
    )
    assert left.prompt_token_ids is not None
    assert right.prompt_token_ids is not None
    assert (len(left.prompt_token_ids), left.num_truncated_tokens) == (32, 28)
    assert left.prompt_token_ids[-30:] == [left.prompt_token_ids[-1]] * 30
    assert right.prompt_token_ids[:30] == [right.prompt_token_ids[0]] * 30
    assert left.prompt == right.prompt == row.columns["prompt"]  # type: ignore[index]


def test_an_answer_as_long_as_the_model_leaves_half_to_the_prompt(tiny_checkpoint: Path) -> None:
    from pipeline.readers import RawRow

    columns = {"prompt": "x" * 60, "sampling_params": {"max_tokens": 100}}
    row = admission_of(tiny_checkpoint, "truncate-left").admit(RawRow(1, "h", columns), "s")
    assert row.prompt_token_ids is not None
    assert len(row.prompt_token_ids) == MAX_LEN // 2


def test_an_estimate() -> None:
    times = StepTimes((1, 512), (1.0, 512.0))  # A second a token.
    report = PlanReport(num_samples=100, num_input_tokens=1024, max_output_tokens=500)
    assert estimate_seconds(report, times, 16, 2) == pytest.approx((1024 + 500) / 2)
    free = StepTimes((1, 512), (1.0, 1.0))  # A second a pass.
    assert estimate_seconds(report, free, 16, 1) == pytest.approx(1024 / 512 + 500 / 16)


def test_a_histogram() -> None:
    lines = format_histogram(np.array([1, 2, 3, 3, 8, 9])).splitlines()
    assert [line.strip().split("  ")[0] for line in lines] == ["1 to 1", "2 to 3", "8 to 15"]
    assert [line.rsplit(" ", 1)[1] for line in lines] == ["1", "3", "2"]


@pytest.mark.ray
def test_a_plan_is_what_generate_goes_on_with(
    generate: Generate,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from jobs.__main__ import main

    uri = write_jsonl(tmp_path / "a.jsonl", ROWS)
    bare = tmp_path / "bare"  # A model's folder without its weights.
    bare.mkdir()
    for path in tiny_checkpoint.iterdir():
        if path.suffix != ".safetensors":
            (bare / path.name).write_bytes(path.read_bytes())
    output = tmp_path / "out"
    given = ["--input", uri, "--output", str(output), "--max-tokens", "2", "--recipe", "rtn"]
    assert main(["plan", "--model", str(bare), *given]) == 0
    shown = capsys.readouterr().out
    assert "7 of 1 sources" in shown
    assert "BadRow 1" in shown
    assert "1 rows have the prompt of an earlier one" in shown
    assert "'abcd'" in shown
    assert "not known: no run has measured" in shown
    assert "GiB on each node" in shown
    assert main(["status", str(output)]) == 0
    assert "0 of 7 done" in capsys.readouterr().out
    planned = (output / "plan" / "plan.json").read_bytes()
    assert generate("--model", tiny_checkpoint, *given[:-2], "--resume", "always") == 0
    assert (output / "plan" / "plan.json").read_bytes() != planned  # It knows the weights now.
    assert main(["verify", str(output)]) == 0
