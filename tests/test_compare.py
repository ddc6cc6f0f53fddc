"""Two runs side by side: which tokens are promised to be equal, and whether they are."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.__main__ import main
from jobs.comparison import Comparison, compare
from pipeline import agreement
from pipeline.admission import Admission, load_tokenizer
from pipeline.agreement import Agreement, Unequal
from tests.outputs import Answer, answer, commit, fail, make_output
from workers.config import EngineConfig, SamplingParams
from workers.request import Completion, Request

ROWS: list[dict[str, Any]] = [{"id": f"r{i}", "prompt": f"p{i}", "topic": i % 2} for i in range(20)]
ROWS[7] |= {"sampling_params": {"n": 3}}
ROWS[9] = {"id": "r9", "topic": 1}  # No prompt.
NUM_ANSWERED = 21  # 19 rows, one of them three times.


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(), 60, len(tokenizer))


Make = Callable[..., str]


@pytest.fixture
def make(admission: Admission, tmp_path: Path) -> Make:
    """Makes an output; `changed` is of its configuration, `made` of its footers."""

    def make(
        name: str,
        rows: list[dict[str, Any]] = ROWS,
        how: Answer = answer,
        rows_per_shard: int = 8,
        made: dict[str, Any] | None = None,
        **changed: Any,
    ) -> str:
        output = tmp_path / name / "out"
        config, plan = make_output(admission, output, rows, rows_per_shard)
        for shard in plan.shards:
            commit(output, plan, shard.name, config, how, **made or {})
        (output / "config.yaml").write_text(config.model_copy(update=changed).to_yaml())
        return str(output.rename(tmp_path / f"{name}-run"))

    return make


def wrong_at(wrong: dict[tuple[str, int], tuple[int, ...]]) -> Answer:
    """Answers like others, but for some samples."""

    def how(request: Request) -> Completion:
        tokens = wrong.get((request.id, request.sample_idx))
        return answer(request) if tokens is None else replace(answer(request), token_ids=tokens)

    return how


def test_equal_where_only_drafts_and_batches_differ(make: Make) -> None:
    engine = EngineConfig(proposer="none", max_num_seqs=3)
    found = compare(make("a"), make("b", engine=engine))
    assert found.reasons == []
    assert found.agreement == Agreement(num_equal=NUM_ANSWERED, num_unanswered=1)
    assert not found.is_broken
    assert "all 21 samples that both runs answered are equal" in found.verdict
    assert [(d.name, d.first, d.second) for d in found.differences] == [
        ("engine.max_num_seqs", "16", "3"),
        ("engine.proposer", "suffix", "none"),
        *[(d.name, d.first, d.second) for d in found.differences if d.name == "input"],
    ]


@pytest.mark.parametrize("rows_per_shard", [8, 3])
def test_what_is_not_equal_is_named(make: Make, rows_per_shard: int) -> None:
    wrong = {("r3", 0): (10, 11, 99, 13, 14), ("r7", 2): (10, 11, 12), ("r19", 0): (1,)}
    found = compare(make("a"), make("b", how=wrong_at(wrong), rows_per_shard=rows_per_shard))
    assert found.is_broken
    assert (found.agreement.num_equal, found.agreement.num_unequal) == (NUM_ANSWERED - 3, 3)
    assert found.agreement.num_alone == (0, 0)
    assert found.agreement.unequal == [
        Unequal("r3", 0, 2, (5, 5)),
        Unequal("r7", 2, 3, (5, 3)),
        Unequal("r19", 0, 0, (5, 1)),
    ]
    assert "3 of 21 samples are not equal" in found.verdict


def test_only_so_many_are_named(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "MOST_NAMED", 2)
    wrong = {(f"r{i}", 0): (0,) for i in range(0, 20, 4)}
    found = compare(make("a"), make("b", how=wrong_at(wrong)))
    assert [row.id for row in found.agreement.unequal] == ["r0", "r4"]
    assert found.unequal_title == "5 unequal, the first 2 of them"


@pytest.mark.parametrize("rows_per_shard", [8, 3])
def test_what_cannot_be_compared_is_counted(make: Make, rows_per_shard: int) -> None:
    others = [dict(row) for row in ROWS[:18]]
    others[2]["prompt"] = "another"
    others[4]["sampling_params"] = {"max_tokens": 5}  # Not to be seen in the part.
    others.append({"id": "new", "prompt": "p"})

    def how(request: Request) -> Completion:
        return fail(request) if request.id == "r5" else answer(request)

    a, b = make("a"), make("b", rows=others, how=how, rows_per_shard=rows_per_shard)
    found = compare(a, b).agreement
    assert found.num_alone == (2, 1)
    assert found.num_asked_differently == 2
    assert found.num_unanswered == 2  # r5 and r9.
    assert found.num_equal == NUM_ANSWERED - 2 - 2 - 1
    backwards = compare(b, a)
    assert backwards.agreement == replace(found, num_alone=(1, 2))
    assert "2 were asked something else" in backwards.verdict


def reasons_of(found: Comparison) -> str:
    return "; ".join(found.reasons)


def test_why_equal_tokens_are_not_promised(make: Make) -> None:
    a = make("a", made={"versions": {"torch": "1", "ray": "2"}})
    for name, made, changed, reason in (
        ("ray", {"versions": {"torch": "1", "ray": "3"}}, {}, ""),
        ("more", {}, {"sampling": SamplingParams(n=2, logprobs=3)}, ""),
        (
            "hot",
            {},
            {"sampling": SamplingParams(temperature=0.8)},
            "sampling.temperature: 0.0 against",
        ),
        ("seed", {}, {"seed": 3}, "other seed: 0 against 3"),
        (
            "short",
            {},
            {"engine": EngineConfig(max_model_len=50)},
            "max_model_len: none against 50",
        ),
        ("weights", {"weights_digest": "v"}, {}, "other weights: w against v"),
        ("torch", {"versions": {"torch": "2"}}, {}, "other versions: torch 1 against torch 2"),
    ):
        made = {"versions": {"torch": "1", "ray": "2"}} | made
        found = compare(a, make(name, made=made, **changed))
        assert reason in reasons_of(found)
        assert bool(found.reasons) == bool(reason), name
        assert found.agreement.num_equal == NUM_ANSWERED, "compared all the same"
        assert ("Equal tokens are not promised" in found.verdict) == bool(reason)


def test_parts_alone_promise_nothing_and_are_compared(make: Make) -> None:
    a, b = make("a"), make("b", how=wrong_at({("r1", 0): (10,)}))
    for name in ("plan", "config.yaml"):
        path = Path(b) / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = compare(a, b)
    assert found.reasons == [
        "the tokenizer is not known: a plan is not here",
        "sampling is not known: a configuration is not here",
    ]
    assert (found.agreement.num_equal, found.agreement.num_unequal) == (NUM_ANSWERED - 1, 1)
    assert not found.is_broken


def test_a_page_and_a_text(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [dict(row) for row in ROWS]
    rows[3]["id"] = "<script>alert(1)</script>"
    a, b = make("a", rows), make("b", rows, wrong_at({("<script>alert(1)</script>", 0): (1,)}))
    assert main(["report", a, b]) == 0
    assert "1 of 21 samples are not equal" in capsys.readouterr().err
    page = (Path(a) / "compare.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert(1)" not in page
    assert "20 of 21" in page
    assert main(["report", a, b, "--format", "md"]) == 0
    text = (Path(a) / "compare.md").read_text(encoding="utf-8")
    assert "| acceptance length | 3.00 | 3.00 | 1.00\u00d7 |" in text
    assert "| &lt;script&gt;alert(1)&lt;/script&gt; | 0 | 0 | 5 | 1 |" in text
    assert not (Path(b) / "compare.md").exists()
    assert not (Path(a) / "README.md").exists()


def test_what_cannot_be_compared_at_all(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    a = make("a")
    assert main(["report", a, str(Path(a) / "nowhere")]) == 2
    assert "nowhere: has no parts to report on" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["report", a, a, a])
    (Path(a) / "plan" / "shard-00000-00001.parquet").write_bytes(b"cut off")
    assert main(["report", a, make("b")]) == 4
    assert "shard-00000-00001.parquet: is damaged" in capsys.readouterr().err
