"""An output told from its folder alone: status, verify and repair, merge, what is left to retry."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.__main__ import main
from pipeline.admission import Admission, load_tokenizer
from pipeline.config import RunConfig
from pipeline.manifest import Manifest
from pipeline.plan import Plan
from tests.outputs import answer, commit, fail, make_output
from workers.config import SamplingParams

ROWS = [{"id": f"r{i}", "prompt": f"p{i}", "topic": i % 3} for i in range(9)]
ROWS[2] |= {"sampling_params": {"n": 2}}
ROWS[4] = {"id": "r4", "topic": 1}  # No prompt.


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(), 40, len(tokenizer))


@pytest.fixture(scope="module")
def complete(admission: Admission, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("complete") / "out"
    make_output(admission, output, ROWS)
    return output


@pytest.fixture
def output(complete: Path, tmp_path: Path) -> Path:
    """A copy of a complete run: shards of four, four and one row."""
    return Path(shutil.copytree(complete, tmp_path / "out"))


def loaded(output: Path) -> tuple[RunConfig, Plan]:
    from pipeline.inspection import read_config

    config, plan = read_config(str(output)), Plan.load(str(output))
    assert config is not None
    assert plan is not None
    return config, plan


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def part(output: Path, number: int) -> Path:
    return output / "data" / f"part-00000-{number:05d}.parquet"


class TestStatus:
    def test_a_complete_run(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        code, shown = run(capsys, "status", output)
        assert code == 0
        assert "9 of 9 done (100.0%)" in shown
        assert "10, 1 of them failed" in shown
        assert "complete" in shown

    def test_half_a_run_in_json(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        part(output, 1).unlink()
        (output / "manifest.json").unlink()
        code, shown = run(capsys, "status", output, "--json")
        told = json.loads(shown)
        assert code == 0
        assert (told["num_rows"], told["num_rows_planned"]) == (5, 9)
        assert (told["num_shards"], told["num_shards_planned"]) == (2, 3)
        assert (told["complete"], told["running"], told["damaged"]) == (False, None, [])
        assert told["num_generated_tokens"] == 6 * 5

    def test_a_damaged_part(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        part(output, 0).write_bytes(b"PAR1")
        code, shown = run(capsys, "status", output)
        assert code == 0
        assert f"{part(output, 0)}: is damaged" in shown
        assert "5 of 9 done" in shown

    def test_a_part_with_a_row_less(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        table = pq.read_table(part(output, 0))
        pq.write_table(table.slice(1), part(output, 0))
        code, shown = run(capsys, "status", output)
        assert code == 0
        assert f"{part(output, 0)}: is damaged (it has 3 rows instead of 4)" in shown
        assert "5 of 9 done" in shown
        assert "complete" not in shown

    def test_before_the_plan(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.rmtree(output / "plan")
        shutil.rmtree(output / "data")
        code, shown = run(capsys, "status", output)
        assert (code, "not planned yet" in shown) == (0, True)

    @pytest.mark.parametrize("command", ["status", "verify", "retry"])
    def test_no_output(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
    ) -> None:
        code, shown = run(capsys, command, tmp_path)
        assert (code, "no run has begun here" in shown) == (2, True)
        code, shown = run(capsys, "merge", tmp_path, "--into", tmp_path / "x.jsonl")
        assert (code, "no run has begun here" in shown) == (2, True)


class TestVerify:
    def test_a_whole_output(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = (output / "manifest.json").read_bytes()
        assert run(capsys, "verify", output) == (0, "3 of 3 parts are there, 0 findings\n")
        assert (output / "manifest.json").read_bytes() == before

    def test_the_manifest_can_be_made_again(
        self, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        before = (output / "manifest.json").read_bytes()
        for content in (None, b"", b"{}", b'{"parts": [{}]}'):
            if content is None:
                (output / "manifest.json").unlink()
            else:
                (output / "manifest.json").write_bytes(content)
            assert run(capsys, "verify", output)[0] == 0
            assert (output / "manifest.json").read_bytes() == before

    def test_parts_to_come_are_no_findings(
        self, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        part(output, 1).unlink()
        assert run(capsys, "verify", output) == (
            4,
            "2 of 3 parts are there, 0 findings; `generate` makes what is missing\n",
        )

    def rewrite(self, path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
        pq.write_table(change(pq.read_table(path)), path, compression="zstd")

    def test_damage_of_every_kind(
        self, output: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        kinds: dict[str, tuple[Callable[[Path], Any], str]] = {
            "cut": (lambda p: p.write_bytes(p.read_bytes()[:-9]), "is damaged"),
            "bits": (_flip, ""),
            "a row twice": (
                lambda p: self.rewrite(p, lambda t: pa.concat_tables([t, t.slice(0, 1)])),
                "its rows are not those of the shard",
            ),
            "a row lost": (lambda p: self.rewrite(p, lambda t: t.slice(1)), "missing: [('r0', 0)]"),
            "another order": (
                lambda p: self.rewrite(p, lambda t: t.take([1, 0, *range(2, len(t))])),
                "its rows are not those of the shard (missing: none)",
            ),
            "a column lost": (
                lambda p: self.rewrite(p, lambda t: t.drop_columns(["topic"])),
                "its columns are not those of the plan",
            ),
            "other tokens": (
                lambda p: self.rewrite(p, lambda t: _with(t, "generated_tokens", [[1]] * len(t))),
                "row 'r0': its tokens are not as many as it says",
            ),
            "no reason": (
                lambda p: self.rewrite(p, lambda t: _with(t, "error", ["x"] * len(t))),
                "row 'r0': an answer with an error, or neither",
            ),
            "histogram": (
                lambda p: self.rewrite(p, lambda t: _with(t, "num_spec_steps", [7] * len(t))),
                "row 'r0': its acceptance histogram does not add up",
            ),
            "other prompts": (
                lambda p: self.rewrite(p, lambda t: _with(t, "prompt", ["x"] * len(t))),
                "row 'r0': its prompt is not that of the plan",
            ),
            "other text": (
                lambda p: self.rewrite(p, lambda t: _with(t, "generated_text", ["x"] * len(t))),
                "not the file that was committed",
            ),
            "another part": (
                lambda p: shutil.copy(part(output, 1), p),
                "is damaged (it holds the rows of 00000-00001)",
            ),
        }
        for kind, (damage, reason) in kinds.items():
            copy = Path(shutil.copytree(output, tmp_path / kind))
            damage(part(copy, 0))
            code, shown = run(capsys, "verify", copy)
            assert code == 4, (kind, shown)
            assert f"{part(copy, 0)}: " in shown, (kind, shown)
            assert reason in shown, (kind, shown)
            assert shown.count("\n") == 2, (kind, shown)  # Nothing else is blamed.

    def test_repair_sets_aside_what_is_damaged(
        self, output: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _flip(part(output, 1))
        shard = output / "plan" / "shard-00000-00002.parquet"
        _flip(shard)
        code, shown = run(capsys, "verify", output, "--repair")
        assert code == 4
        assert "2 findings" in shown
        assert not part(output, 1).exists()
        assert not shard.exists()
        names = sorted(p.name for p in (output / "damaged").iterdir())
        assert names == [part(output, 1).name, shard.name]
        code, shown = run(capsys, "verify", output)
        assert f"{shard}: is missing" in shown

    def test_strangers(self, output: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (output / "data" / "notes.txt").touch()
        shutil.copy(part(output, 0), output / "data" / "part-00009-00000.parquet")
        code, shown = run(capsys, "verify", output)
        assert code == 4
        assert "notes.txt: is none of ours" in shown
        assert "part-00009-00000.parquet: belongs to no shard of the plan" in shown


def _flip(path: Path) -> None:
    """One bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _with(table: pa.Table, name: str, values: list[Any]) -> pa.Table:
    """The table with other values in a column, where it has any."""
    index = table.column_names.index(name)
    field = table.schema.field(index)
    kept = [
        v if old is not None or name == "error" else None
        for v, old in zip(values, table[name].to_pylist(), strict=True)
    ]
    return table.set_column(index, field, pa.array(kept, field.type))


ANSWERED = [("r0", 0), ("r1", 0), ("r2", 0), ("r2", 1), ("r3", 0)]
ANSWERED += [(f"r{i}", 0) for i in range(5, 9)]


class TestMerge:
    def keys(self, rows: list[dict[str, Any]]) -> list[tuple[str, int]]:
        return [(row["id"], row["sample_idx"]) for row in rows]

    def test_one_file(self, output: Path, tmp_path: Path) -> None:
        assert main(["merge", str(output), "--into", str(tmp_path / "all.parquet")]) == 0
        table = pq.read_table(tmp_path / "all.parquet")
        assert self.keys(table.to_pylist()) == ANSWERED
        assert table.schema.remove_metadata() == pq.read_schema(part(output, 0)).remove_metadata()

    def test_with_errors(self, output: Path, tmp_path: Path) -> None:
        target = tmp_path / "all.parquet"
        assert main(["merge", str(output), "--into", str(target), "--errors"]) == 0
        keys = self.keys(pq.read_table(target).to_pylist())
        assert keys == [*ANSWERED[:5], ("r4", 0), *ANSWERED[5:]]

    @pytest.mark.parametrize("packed", ["", ".gz", ".zst"])
    def test_json_lines(self, output: Path, tmp_path: Path, packed: str) -> None:
        from pipeline.readers import read_jsonl

        target = str(tmp_path / f"all.jsonl{packed}")
        assert main(["merge", str(output), "--into", target]) == 0
        rows = [row.columns for row in read_jsonl(target)]
        assert self.keys(rows) == ANSWERED  # type: ignore[arg-type]
        assert rows[0]["generated_tokens"] == [10, 11, 12, 13, 14]  # type: ignore[index]
        assert rows[0]["finished_at"].endswith("+00:00")  # type: ignore[index]

    def test_a_folder_of_files_of_a_size(
        self, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("jobs.merge._GROUP_BYTES", 1)
        given = ["merge", str(output), "--into", str(tmp_path / "all"), "--file-bytes", "1"]
        assert main(given) == 0
        files = sorted((tmp_path / "all").iterdir())
        assert [f.name for f in files] == [f"data-{n:05d}.parquet" for n in range(3)]
        rows = [row for file in files for row in pq.read_table(file).to_pylist()]
        assert self.keys(rows) == ANSWERED
        assert main([*given[:4], "--file-bytes", "1"]) == 2  # It is there already.

    def test_damage_is_not_merged(
        self, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        target = tmp_path / "all.parquet"
        _flip(part(output, 1))
        code, shown = run(capsys, "merge", output, "--into", target)
        assert code == 4
        assert f"error: {part(output, 1)}: is " in shown
        assert "`verify --repair` sets it aside" in shown
        assert not target.exists()

    @pytest.mark.parametrize("name", ["all.csv", "all.json", "all.jsonl.bz2"])
    def test_a_format_that_is_none_of_ours(
        self, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
    ) -> None:
        code, shown = run(capsys, "merge", output, "--into", tmp_path / name)
        assert (code, "unknown format" in shown) == (2, True)

    def test_half_a_run(
        self, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        part(output, 0).unlink()
        target = tmp_path / "all.parquet"
        code, shown = run(capsys, "merge", output, "--into", target)
        assert (code, "is not complete" in shown) == (4, True)
        assert not target.exists()
        assert run(capsys, "merge", output, "--into", target, "--partial")[0] == 0
        assert self.keys(pq.read_table(target).to_pylist()) == ANSWERED[5:]

    def test_a_part_that_is_not_the_plans(
        self, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A row less, or one twice, in a file that can be read."""
        table = pq.read_table(part(output, 0))
        less, twice = range(len(table) - 1), [0, *range(len(table))]
        for rows, told in ((less, "it has 3 rows instead of 4"), (twice, "its rows are not those")):
            pq.write_table(table.take(list(rows)), part(output, 0))
            code, shown = run(capsys, "merge", output, "--into", tmp_path / "all.parquet")
            assert (code, told in shown) == (4, True)
            assert not (tmp_path / "all.parquet").exists()

    def test_what_is_left_out_is_told(
        self, output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, shown = run(capsys, "merge", output, "--into", tmp_path / "a.jsonl")
        assert "9 rows written" in shown
        assert "1 failed ones are left out (--errors keeps them)" in shown
        _, shown = run(capsys, "merge", output, "--into", tmp_path / "b.jsonl", "--errors")
        assert "10 rows written" in shown
        assert "left out" not in shown


class TestFailedRows:
    """errors/ is held against the parts, and made again of them."""

    @pytest.fixture
    def errors(self, output: Path) -> Path:
        (path,) = (output / "errors").iterdir()
        return path

    @pytest.mark.parametrize("damage", ["lost", "cut", "less", "other"])
    def test_damage(
        self, output: Path, errors: Path, capsys: pytest.CaptureFixture[str], damage: str
    ) -> None:
        whole = pq.read_table(errors)
        if damage == "lost":
            errors.unlink()
        elif damage == "cut":
            errors.write_bytes(errors.read_bytes()[:-9])
        else:
            pq.write_table(whole.slice(0, 0) if damage == "less" else pa.table({"a": [1]}), errors)
        code, shown = run(capsys, "verify", output, "--repair")
        assert (code, f"{errors}: " in shown) == (4, True)
        assert pq.read_table(errors).equals(whole)
        assert run(capsys, "verify", output)[0] == 0

    def test_failures_that_are_none(
        self, output: Path, errors: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = errors.with_name("errors-00000-00000.parquet")
        other.write_bytes(errors.read_bytes())
        code, shown = run(capsys, "verify", output, "--repair")
        assert (code, "its rows are not those of the part" in shown) == (4, True)
        assert not other.exists()


class TestLostFiles:
    """The plan or the configuration: every command says the same."""

    @pytest.mark.parametrize("command", ["status", "verify", "retry", "merge"])
    @pytest.mark.parametrize("name", ["config.yaml", "plan/plan.json"])
    @pytest.mark.parametrize("content", [None, b"", b"[]", b"{'"])
    def test_what_is_said(
        self,
        output: Path,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        command: str,
        name: str,
        content: bytes | None,
    ) -> None:
        (output / name).unlink()
        if content is not None:
            (output / name).write_bytes(content)
        into = ["--into", tmp_path / "all.jsonl"] if command == "merge" else []
        code, shown = run(capsys, command, output, *into)
        assert code == 4
        assert name.rpartition("/")[2] in shown
        assert ("is lost" if content is None else "is damaged") in shown
        assert "put a copy of it back, or choose another output folder" in shown
        assert shown.count("\n") == 1


class TestManifest:
    def test_what_did_not_change_is_not_read(
        self, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        _, plan = loaded(output)
        names = [shard.name for shard in plan.shards]
        found, damaged = Manifest(str(output)).find_parts(plan.shards)
        assert (sorted(found), damaged) == (names, [])
        monkeypatch.setattr("pipeline.manifest.read_report", None)
        assert Manifest(str(output)).find_parts(plan.shards)[0] == found

    def test_a_part_of_another_size_is_read_again(self, output: Path) -> None:
        config, plan = loaded(output)
        name = plan.shards[0].name
        commit(output, plan, name, config, how=fail)
        found, _ = Manifest(str(output)).find_parts(plan.shards[:1])
        assert found[name].num_errors == 5


def test_only_failed_rows_are_worth_a_retry(
    output: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that were refused are not: their input must be mended."""
    started: list[tuple[Any, ...]] = []

    def start(*arguments: Any, **keywords: Any) -> int:
        started.append((*arguments, keywords))
        return 3

    monkeypatch.setattr("jobs.retry.start", start)
    told = "no row to try again (1 cannot run as they are)\n"
    assert run(capsys, "retry", output) == (0, told)
    config, plan = loaded(output)
    how = {"r5": fail}
    commit(output, plan, plan.shards[1].name, config, lambda r: how.get(r.id, answer)(r))
    assert run(capsys, "retry", output)[0] == 3
    ((given, uris, _, keywords),) = started
    assert (given.output, uris) == (str(output), [config.input[0]])
    assert keywords == {"retry": True}
