"""The plan: every row in exactly one shard, by fixed rules, and conflicts named early."""

import gzip
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.admission import Admission, load_tokenizer
from pipeline.errors import DamagedOutputError, InputError
from pipeline.plan import Plan
from pipeline.schema import PLAN_SCHEMA, schema_from_json, schema_to_json
from pipeline.shards import Shard, SourceGroup, read_shard, write_shards
from tests.outputs import make_plan, write_jsonl
from workers.config import SamplingParams


@pytest.fixture(scope="module")
def admission(tiny_checkpoint: Path) -> Admission:
    tokenizer = load_tokenizer(tiny_checkpoint)
    return Admission(tokenizer, SamplingParams(max_tokens=8), 40, len(tokenizer))


def prompts(count: int, **columns: Any) -> list[dict[str, Any]]:
    return [{"prompt": f"p{i}", **columns} for i in range(count)]


def all_rows(plan: Plan, output: Path) -> list[dict[str, Any]]:
    return [row for shard in plan.shards for row in read_shard(str(output), shard.name).to_pylist()]


@pytest.mark.parametrize(
    ("num_rows", "rows_per_shard", "sizes"),
    [
        (1, 256, [1]),
        (8, 256, [8]),
        (9, 256, [8, 1]),
        (600, 256, [8, 16, 32, 64, 128, 256, 96]),
        (100, 40, [8, 16, 32, 40, 4]),
        (20, 8, [8, 8, 4]),
        (3, 1, [1, 1, 1]),
    ],
)
def test_shards_grow(
    admission: Admission, tmp_path: Path, num_rows: int, rows_per_shard: int, sizes: list[int]
) -> None:
    uri = write_jsonl(tmp_path / "a.jsonl", prompts(num_rows))
    plan = make_plan(admission, [uri], tmp_path / "out", rows_per_shard=rows_per_shard)
    assert [shard.num_rows for shard in plan.shards] == sizes
    assert [shard.name for shard in plan.shards] == [f"00000-{i:05d}" for i in range(len(sizes))]
    assert plan.num_rows == num_rows
    rows = all_rows(plan, tmp_path / "out")
    assert [row["id"] for row in rows] == [f"a.jsonl:{i + 1}" for i in range(num_rows)]
    assert [row["prompt"] for row in rows] == [f"p{i}" for i in range(num_rows)]


def test_several_files_have_shards_of_their_own(admission: Admission, tmp_path: Path) -> None:
    uris = [write_jsonl(tmp_path / f"{name}.jsonl", prompts(20)) for name in "ba"]
    plan = make_plan(admission, uris, tmp_path / "out")
    names = ["00000-00000", "00000-00001", "00001-00000", "00001-00001"]
    assert [shard.name for shard in plan.shards] == names
    ids = [row["id"] for row in all_rows(plan, tmp_path / "out")]
    assert ids == [f"{name}.jsonl:{i}" for name in "ba" for i in range(1, 21)]


def test_a_plan_made_again_is_the_same_bytes(admission: Admission, tmp_path: Path) -> None:
    uris = [write_jsonl(tmp_path / f"{name}.jsonl", prompts(20, k=1)) for name in "ab"]
    for out in ("one", "two"):
        make_plan(admission, uris, tmp_path / out)
    one = {p.name: p.read_bytes() for p in (tmp_path / "one" / "plan").iterdir()}
    two = {p.name: p.read_bytes() for p in (tmp_path / "two" / "plan").iterdir()}
    assert one == two
    assert len(one) == 5


@pytest.mark.parametrize(
    ("limit", "counts"), [(5, (5, 0)), (20, (20, 0)), (23, (20, 3)), (99, (20, 20))]
)
def test_a_limit_counts_across_files(
    admission: Admission, tmp_path: Path, limit: int, counts: tuple[int, int]
) -> None:
    uris = [write_jsonl(tmp_path / f"{name}.jsonl", prompts(20)) for name in "ab"]
    plan = make_plan(admission, uris, tmp_path / "out", limit=limit)
    sources = [row["source"] for row in all_rows(plan, tmp_path / "out")]
    assert (sources.count("a.jsonl"), sources.count("b.jsonl")) == counts


def test_a_bad_row_counts_toward_the_limit(admission: Admission, tmp_path: Path) -> None:
    uri = write_jsonl(tmp_path / "a.jsonl", ["no json", {"prompt": "a"}, {"prompt": "b"}])
    plan = make_plan(admission, [uri], tmp_path / "out", limit=2)
    rows = all_rows(plan, tmp_path / "out")
    assert [row["prompt"] for row in rows] == [None, "a"]
    assert "line 1" in rows[0]["error"]


def test_shards_describe_themselves(admission: Admission, tmp_path: Path) -> None:
    rows = [{"prompt": "abc"}, {"prompt": ""}, {"prompt": "x" * 50}, {"prompt": "x" * 30}]
    plan = make_plan(admission, [write_jsonl(tmp_path / "a.jsonl", rows)], tmp_path / "out")
    # 3 + 30 tokens admitted; the longest: 30 + 8 of an answer.
    content = (tmp_path / "out" / "plan" / "shard-00000-00000.parquet").read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    assert plan.shards == (Shard("00000-00000", 4, 2, 33, 38, len(content), sha256, sha256),)
    assert (plan.num_rows, plan.max_total_tokens) == (4, 38)


def test_same_file_names_in_two_folders(admission: Admission, tmp_path: Path) -> None:
    uris = [write_jsonl(tmp_path / folder / "a.jsonl", prompts(2)) for folder in ("x", "y")]
    plan = make_plan(admission, uris, tmp_path / "out")
    ids = [row["id"] for row in all_rows(plan, tmp_path / "out")]
    assert ids == [f"{uri}:{i}" for uri in uris for i in (1, 2)]


def test_the_same_file_twice_is_refused(admission: Admission, tmp_path: Path) -> None:
    uri = write_jsonl(tmp_path / "a.jsonl", prompts(2))
    with pytest.raises(InputError, match=r"a\.jsonl"):
        make_plan(admission, [uri, uri], tmp_path / "out")


def test_an_id_that_occurs_twice_names_both_places(admission: Admission, tmp_path: Path) -> None:
    one = [{"prompt": f"p{i}", "id": f"a{i}"} for i in range(20)]
    two = [{"prompt": f"p{i}", "id": f"b{i}"} for i in range(20)]
    two[18]["id"] = "a3"
    uris = [write_jsonl(tmp_path / "a.jsonl", one), write_jsonl(tmp_path / "b.jsonl", two)]
    with pytest.raises(InputError) as raised:
        make_plan(admission, uris, tmp_path / "out")
    for words in ("'a3'", "a.jsonl: line 4", "b.jsonl: line 19"):
        assert words in str(raised.value)
    assert Plan.load(str(tmp_path / "out")) is None


def test_a_given_id_may_not_be_that_of_a_made_one(admission: Admission, tmp_path: Path) -> None:
    uri = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": "b", "id": "a.jsonl:1"}])
    with pytest.raises(InputError, match=r"line 2.*line 1"):
        make_plan(admission, [uri], tmp_path / "out")


def test_a_number_and_its_text_are_one_id(admission: Admission, tmp_path: Path) -> None:
    uri = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "id": 7}, {"prompt": "b", "id": "7"}])
    with pytest.raises(InputError, match="'7'"):
        make_plan(admission, [uri], tmp_path / "out")


def test_no_rows(admission: Admission, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no rows"):
        make_plan(admission, [write_jsonl(tmp_path / "a.jsonl", [])], tmp_path / "out")


def test_a_file_damaged_half_way_is_refused(admission: Admission, tmp_path: Path) -> None:
    content = gzip.compress(b'{"prompt": "a"}\n' * 5000)
    (tmp_path / "a.jsonl.gz").write_bytes(content[:-20])
    with pytest.raises(InputError, match=r"a\.jsonl\.gz"):
        make_plan(admission, [str(tmp_path / "a.jsonl.gz")], tmp_path / "out")
    assert Plan.load(str(tmp_path / "out")) is None


def test_types_of_carried_columns(admission: Admission, tmp_path: Path) -> None:
    when = datetime(2026, 1, 2, 3, 4, 5, 678, UTC)
    columns = {
        "prompt": pa.array(["a", "b"]),
        "when": pa.array([when, None], pa.timestamp("us", "UTC")),
        "tags": pa.array([["x"], []], pa.list_(pa.string())),
        "score": pa.array([0.5, None], pa.float64()),
        "count": pa.array([1, 2**40], pa.int64()),
        "flag": pa.array([True, None]),
        "raw": pa.array([b"\xff", b""]),
        "meta": pa.array([{"k": 1}, None], pa.struct([("k", pa.int64())])),
        "nothing": pa.nulls(2),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    plan = make_plan(admission, [str(tmp_path / "a.parquet")], tmp_path / "out")
    carried = {field.name.removeprefix("carried."): field.type for field in plan.carried}
    assert carried == {name: array.type for name, array in columns.items() if name != "prompt"}
    table = read_shard(str(tmp_path / "out"), "00000-00000")
    for name in carried:
        assert table.column(f"carried.{name}").to_pylist() == columns[name].to_pylist(), name


@pytest.mark.parametrize(
    "kind",
    [
        *(pa.int32(), pa.uint8(), pa.float32(), pa.large_string(), pa.date32()),
        *(pa.timestamp("ms"), pa.timestamp("ns"), pa.decimal128(21, 2), pa.duration("us")),
    ],
    ids=str,
)
def test_narrow_types_keep_their_values(
    admission: Admission, tmp_path: Path, kind: pa.DataType
) -> None:
    """A column may come out wider, but never with another value."""
    values = pa.array([1, None, 3], pa.int32() if kind == pa.date32() else pa.int64())
    column = values.cast(kind)
    pq.write_table(pa.table({"prompt": ["a", "b", "c"], "x": column}), tmp_path / "a.parquet")
    make_plan(admission, [str(tmp_path / "a.parquet")], tmp_path / "out")
    carried = read_shard(str(tmp_path / "out"), "00000-00000").column("carried.x")
    assert carried.cast(kind).to_pylist() == column.to_pylist()


def carried_or_refused(admission: Admission, uri: str, output: Path, name: str) -> bool:
    """Whether a plan could be made; if not, the refusal must name the column."""
    try:
        make_plan(admission, [uri], output)
    except InputError as error:
        if name not in str(error):
            raise
        return False
    return True


def test_a_map_column_is_carried_or_refused_by_name(admission: Admission, tmp_path: Path) -> None:
    column = pa.array([[("k", 1)], []], pa.map_(pa.string(), pa.int64()))
    pq.write_table(pa.table({"prompt": ["a", "b"], "pairs": column}), tmp_path / "a.parquet")
    if carried_or_refused(admission, str(tmp_path / "a.parquet"), tmp_path / "out", "'pairs'"):
        table = read_shard(str(tmp_path / "out"), "00000-00000")
        first, second = table.column("carried.pairs").to_pylist()
        assert (dict(first), dict(second)) == ({"k": 1}, {})


def test_a_type_conflict_within_a_file_is_named(admission: Admission, tmp_path: Path) -> None:
    uri = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one"}])
    with pytest.raises(InputError) as raised:
        make_plan(admission, [uri], tmp_path / "out")
    assert f"{uri}: line 2: column 'x'" in str(raised.value)
    assert "make them of one type" in str(raised.value)


def test_a_type_conflict_between_files_is_named(admission: Admission, tmp_path: Path) -> None:
    uris = [
        write_jsonl(tmp_path / "a.jsonl", prompts(2, x=1)),
        write_jsonl(tmp_path / "b.jsonl", prompts(2, x="one")),
    ]
    with pytest.raises(InputError) as raised:
        make_plan(admission, uris, tmp_path / "out")
    for word in ("'x'", "int64", "string"):
        assert word in str(raised.value)


def test_carried_columns_are_unified_over_shards(admission: Admission, tmp_path: Path) -> None:
    one = [*prompts(16, x=1, tags=[], meta={"k": 1}), {"prompt": "z", "late": True}]
    two = prompts(3, x=0.5, tags=["t"], meta={"other": "o"}, nothing=None)
    uris = [write_jsonl(tmp_path / "a.jsonl", one), write_jsonl(tmp_path / "b.jsonl", two)]
    plan = make_plan(admission, uris, tmp_path / "out")
    kinds = {field.name.removeprefix("carried."): field.type for field in plan.carried}
    assert kinds["x"] == pa.float64()
    assert kinds["tags"] == pa.list_(pa.string())
    assert kinds["late"] == pa.bool_()
    assert {kinds["meta"].field(i).name for i in range(2)} == {"k", "other"}
    assert pa.types.is_null(kinds["nothing"])


@pytest.mark.parametrize("value", [{}, [{}], {"k": {}}], ids=str)
def test_empty_objects_are_carried_or_refused_by_name(
    admission: Admission, tmp_path: Path, value: Any
) -> None:
    """Parquet cannot hold a struct without fields."""
    uri = write_jsonl(tmp_path / "a.jsonl", prompts(2, meta=value))
    carried_or_refused(admission, uri, tmp_path / "out", "'meta'")


def test_odd_column_names(admission: Admission, tmp_path: Path) -> None:
    names = ["", " ", "carried.x", "a.b", "é", "source", "row", "prompt "]
    uri = write_jsonl(tmp_path / "a.jsonl", [{"prompt": "p", **dict.fromkeys(names, 1)}])
    make_plan(admission, [uri], tmp_path / "out")
    table = read_shard(str(tmp_path / "out"), "00000-00000")
    assert table.column_names == [*PLAN_SCHEMA.names, *(f"carried.{name}" for name in names)]
    assert table.column("source").to_pylist() == ["a.jsonl"]


def test_a_plan_is_complete_only_with_its_manifest(admission: Admission, tmp_path: Path) -> None:
    out = tmp_path / "out"
    uri = write_jsonl(tmp_path / "a.jsonl", prompts(20, x=1))
    plan = make_plan(admission, [uri], out)
    assert Plan.load(str(out)) == plan
    manifest = out / "plan" / "plan.json"
    whole = manifest.read_bytes()
    for damaged in (b"", b"{", b"[]", b"{}", whole[:-40], whole.replace(b"num_rows", b"nums")):
        manifest.write_bytes(damaged)
        with pytest.raises(DamagedOutputError, match=r"plan\.json: is damaged; put a copy"):
            Plan.load(str(out))
    for flipped in (b'"num_rows": 8', b'"num_rows": 9'), (b'"num_refused": 0', b'"num_refused": 1'):
        assert flipped[0] in whole
        manifest.write_bytes(whole.replace(*flipped, 1))
        with pytest.raises(DamagedOutputError, match=r"plan\.json: is damaged"):
            Plan.load(str(out))
    manifest.unlink()
    assert Plan.load(str(out)) is None


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    with pytest.raises(DamagedOutputError, match=r"shard-00000-00003.*: is missing"):
        read_shard(str(tmp_path), "00000-00003")


class TestMending:
    """Prompt shards that are lost are made again of their source, if that gives the same."""

    ROWS = prompts(30, x=1)

    def plan_of(self, admission: Admission, folder: Path) -> Plan:
        uri = write_jsonl(folder / "a.jsonl", self.ROWS)
        return make_plan(admission, [uri], folder / "out", rows_per_shard=8)

    def write(self, admission: Admission, folder: Path, plan: Plan) -> list[Shard]:
        (group,) = plan.groups_of([plan.shards[1], plan.shards[3]], None)
        written = write_shards(group, admission, str(folder / "out"), 8)
        return [shard for shard, _ in written]

    def test_the_same_source(self, admission: Admission, tmp_path: Path) -> None:
        plan = self.plan_of(admission, tmp_path)
        lost = [tmp_path / "out" / "plan" / f"shard-00000-{i:05d}.parquet" for i in (1, 3)]
        before = [path.read_bytes() for path in lost]
        for path in lost:
            path.unlink()
        assert self.write(admission, tmp_path, plan) == [plan.shards[1], plan.shards[3]]
        assert [path.read_bytes() for path in lost] == before

    @pytest.mark.parametrize("row", [{"prompt": "q9", "x": 1}, {"prompt": "p9", "x": 2}])
    def test_a_source_with_other_words_in_it(
        self, admission: Admission, tmp_path: Path, row: dict[str, Any]
    ) -> None:
        """A prompt, or a carried value, as long as before."""
        plan = self.plan_of(admission, tmp_path)
        write_jsonl(tmp_path / "a.jsonl", [*self.ROWS[:9], row, *self.ROWS[10:]])
        lost = tmp_path / "out" / "plan" / "shard-00000-00001.parquet"
        lost.unlink()
        with pytest.raises(InputError, match=r"a\.jsonl: has changed since it was planned"):
            self.write(admission, tmp_path, plan)
        assert not lost.exists(), "nothing is there rather than something else"


def test_groups_survive_the_journey() -> None:
    sources = ((0, "s3://b/é.jsonl", "é.jsonl"), (1, "b", "b"))
    group = SourceGroup(sources, 5, {"00000-00001": "digest"})
    assert SourceGroup.from_json(group.to_json()) == group


def test_schemas_survive_the_journey() -> None:
    schema = pa.schema([("a", pa.timestamp("us", "UTC")), ("b", pa.list_(pa.null()))])
    assert schema_from_json(schema_to_json(schema)) == schema


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(values=st.lists(_VALUES, min_size=1, max_size=4))
def test_carried_values_come_through_or_are_refused_by_name(
    admission: Admission, tmp_path_factory: pytest.TempPathFactory, values: list[Any]
) -> None:
    tmp_path = tmp_path_factory.mktemp("plan")
    uri = write_jsonl(
        tmp_path / "a.jsonl",
        [
            json.dumps({"prompt": "p", "x": v}).replace("NaN", "1").replace("Infinity", "2")
            for v in values
        ],
    )
    if carried_or_refused(admission, uri, tmp_path / "out", "'x'"):
        assert read_shard(str(tmp_path / "out"), "00000-00000").num_rows == len(values)


class TestAddedSources:
    """Files that came since the plan was made add shards; what was planned stays as it is."""

    def test_only_the_new_file_is_planned(self, admission: Admission, tmp_path: Path) -> None:
        out = tmp_path / "out"
        first = write_jsonl(tmp_path / "b.jsonl", prompts(10, n=1))
        before = make_plan(admission, [first], out)
        Path(first).write_text("no longer read", encoding="utf-8")
        second = write_jsonl(tmp_path / "a.jsonl", prompts(3, n=2))
        for _ in range(2):  # The second time, nothing is new.
            plan = make_plan(admission, [second, first], out)
            assert plan.shards[: len(before.shards)] == before.shards
            assert [s.name for s in plan.shards] == ["00000-00000", "00000-00001", "00001-00000"]
            assert plan.sources == ((first, "b.jsonl"), (second, "a.jsonl"))
            assert plan.carried == before.carried
            assert Plan.load(str(out)) == plan
            ids = [row["id"] for row in all_rows(plan, out)]
            assert ids[-3:] == ["a.jsonl:1", "a.jsonl:2", "a.jsonl:3"]

    def test_a_file_of_the_same_name_has_ids_of_its_own(
        self, admission: Admission, tmp_path: Path
    ) -> None:
        uris = [write_jsonl(tmp_path / name / "a.jsonl", prompts(1)) for name in ("x", "y")]
        make_plan(admission, uris[:1], tmp_path / "out")
        plan = make_plan(admission, uris, tmp_path / "out")
        ids = [row["id"] for row in all_rows(plan, tmp_path / "out")]
        assert ids == ["a.jsonl:1", f"{uris[1]}:1"]

    def test_ids_must_differ_from_the_planned_ones(
        self, admission: Admission, tmp_path: Path
    ) -> None:
        uris = [
            write_jsonl(tmp_path / f"{name}.jsonl", [{"id": "x", "prompt": "p"}]) for name in "ab"
        ]
        make_plan(admission, uris[:1], tmp_path / "out")
        with pytest.raises(InputError, match="the id 'x' is also that of"):
            make_plan(admission, uris, tmp_path / "out")

    def test_a_planned_file_must_stay_in_the_input(
        self, admission: Admission, tmp_path: Path
    ) -> None:
        uris = [write_jsonl(tmp_path / f"{name}.jsonl", prompts(1)) for name in "ab"]
        make_plan(admission, uris[:1], tmp_path / "out")
        with pytest.raises(InputError, match=r"a\.jsonl: was planned in this output"):
            make_plan(admission, uris[1:], tmp_path / "out")

    @pytest.mark.parametrize(
        ("columns", "reason"),
        [
            ({"n": 1, "m": 2}, "column 'm' is in the added files only"),
            ({"n": "x"}, "column 'n' is string in the added files, and int64 in this output"),
            ({"n": 0.5}, "column 'n' is double in the added files, and int64 in this output"),
        ],
    )
    def test_columns_cannot_change(
        self, admission: Admission, tmp_path: Path, columns: dict[str, Any], reason: str
    ) -> None:
        uris = [
            write_jsonl(tmp_path / "a.jsonl", prompts(1, n=1)),
            write_jsonl(tmp_path / "b.jsonl", prompts(1, **columns)),
        ]
        make_plan(admission, uris[:1], tmp_path / "out")
        with pytest.raises(InputError, match=reason):
            make_plan(admission, uris, tmp_path / "out")

    def test_columns_may_be_missing(self, admission: Admission, tmp_path: Path) -> None:
        uris = [
            write_jsonl(tmp_path / "a.jsonl", prompts(1, n=1)),
            write_jsonl(tmp_path / "b.jsonl", prompts(1)),
        ]
        before = make_plan(admission, uris[:1], tmp_path / "out")
        assert make_plan(admission, uris, tmp_path / "out").carried == before.carried

    @pytest.mark.parametrize(("limit", "num_rows"), [(3, 3), (4, 4), (10, 6)])
    def test_a_limit_counts_what_is_planned(
        self, admission: Admission, tmp_path: Path, limit: int, num_rows: int
    ) -> None:
        uris = [write_jsonl(tmp_path / f"{name}.jsonl", prompts(3)) for name in "ab"]
        make_plan(admission, uris[:1], tmp_path / "out", limit=limit)
        assert make_plan(admission, uris, tmp_path / "out", limit=limit).num_rows == num_rows

    def test_a_planned_file_that_has_changed_is_told(
        self, admission: Admission, tmp_path: Path
    ) -> None:
        uris = [write_jsonl(tmp_path / f"{name}.jsonl", prompts(2)) for name in "ab"]
        assert make_plan(admission, uris, tmp_path / "out").changed_sources() == []
        with Path(uris[1]).open("a", encoding="utf-8") as file:
            file.write('{"prompt": "one more"}\n')
        plan = make_plan(admission, uris, tmp_path / "out")
        assert plan.changed_sources() == [uris[1]]
        first = Path(uris[0])
        first.write_bytes(first.read_bytes().replace(b"0", b"9"))  # As long as it was.
        assert plan.changed_sources() == uris
        first.unlink()
        Path(uris[1]).unlink()
        assert plan.changed_sources() == []


def test_a_number_that_no_column_holds_is_one_row(admission: Admission, tmp_path: Path) -> None:
    rows = [{"prompt": "a", "x": 1}, {"prompt": "b", "x": {"y": [2**63]}}, {"prompt": "c"}]
    rows[1]["x"] = 2**63
    uri = write_jsonl(tmp_path / "a.jsonl", [*rows, {"prompt": "d", "z": [{"y": -(2**70)}]}])
    plan = make_plan(admission, [uri], tmp_path / "out")
    errors = [row["error"] for row in all_rows(plan, tmp_path / "out")]
    assert [error is None for error in errors] == [True, False, True, False]
    assert f"{uri}: line 2: column 'x' has a whole number of more than 64 bits" == errors[1]


def test_a_dictionary_is_what_its_entries_are(admission: Admission, tmp_path: Path) -> None:
    table = pa.table({"prompt": ["a", "b"], "kind": pa.array(["x", "y"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "a.parquet")
    other = write_jsonl(tmp_path / "b.jsonl", [{"prompt": "c", "kind": "z"}])
    plan = make_plan(admission, [str(tmp_path / "a.parquet"), other], tmp_path / "out")
    assert plan.carried.field("carried.kind").type == pa.string()


def test_a_plan_of_something_else_is_refused_key_by_key() -> None:
    plan = Plan((), pa.schema([]), (), {"weights": "a", "tokenizer": "b"})
    plan.check_origin({"weights": "a", "tokenizer": "b"})
    with pytest.raises(InputError, match=r"\(weights was a, is c\)"):
        plan.check_origin({"weights": "c", "tokenizer": "b"})
    with pytest.raises(InputError, match="tokenizer was b, is d; weights was a, is c"):
        plan.check_origin({"weights": "c", "tokenizer": "d"})
