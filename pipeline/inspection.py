"""What an output folder holds, told from the folder alone: no cluster, no model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from pipeline import storage
from pipeline.config import RunConfig
from pipeline.errors import DamagedOutputError, DamagedPartError, InputError
from pipeline.failed_rows import check_errors, errors_uri
from pipeline.lease import Holder, read_holder
from pipeline.manifest import Manifest
from pipeline.parts import PartReport, list_parts, part_uri, read_part, report_of
from pipeline.plan import Plan
from pipeline.requests import num_samples
from pipeline.schema import output_schema, schema_digest
from pipeline.shards import Shard, check_shard, read_shard, shard_uri
from pipeline.summary import Summary, sum_reports
from workers.config import SamplingParams

_REMEDY = "put a copy of it back, or choose another output folder"


@dataclass(frozen=True)
class State:
    """An output folder: what was asked for, what is planned (None: not yet), done and damaged, and by
    whom it is in use.
    """

    config: RunConfig
    plan: Plan | None
    done: dict[str, PartReport]
    damaged: tuple[str, ...]
    holder: Holder | None

    @property
    def summary(self) -> Summary:
        """Sums over the parts."""
        return sum_reports(self.done.values())

    @property
    def is_complete(self) -> bool:
        """Whether every shard has its part."""
        return self.plan is not None and len(self.done) == len(self.plan.shards)


def read_config(output: str) -> RunConfig | None:
    """The configuration that a run left in its output; None if there is none.

    Raises:
        DamagedOutputError: it is damaged, or lost.
    """
    content = storage.read_bytes(storage.join(output, "config.yaml"))
    if content is None:
        if storage.exists(storage.join(output, "plan", "plan.json")):
            raise DamagedOutputError(f"output {output}: config.yaml is lost; {_REMEDY}")
        return None
    try:
        return RunConfig.from_yaml(content)
    except ValueError as error:
        raise DamagedOutputError(f"output {output}: config.yaml is damaged; {_REMEDY}") from error


def read_plan(output: str) -> Plan | None:
    """The plan of an output folder; None if there is none yet.

    Raises:
        DamagedOutputError: it is damaged, or lost though there are parts that belong to it.
    """
    plan = Plan.load(output)
    if plan is None and list_parts(output):
        raise DamagedOutputError(
            f"output {output}: has parts, and the plan that they belong to (plan/plan.json) is lost; "
            f"{_REMEDY}"
        )
    return plan


def read_state(output: str) -> State:
    """Look at an output folder.

    Raises:
        InputError: it is none.
        DamagedOutputError: its plan or its configuration is lost or damaged.
        OSError: its storage does not answer.
    """
    config = read_config(output)
    if config is None:
        raise InputError(f"output {output}: no run has begun here (it has no config.yaml)")
    plan = read_plan(output)
    done: dict[str, PartReport] = {}
    damaged: list[str] = []
    if plan is not None:
        done, damaged = Manifest(output).find_parts(plan.shards)
    return State(config, plan, done, tuple(damaged), read_holder(output))


@dataclass(frozen=True)
class Finding:
    """Something that is not as promised.

    `uri` is the file to be made again, None if none is to blame; if it is the failed rows of a part,
    `errors_of` names its shard.
    """

    message: str
    uri: str | None = None
    errors_of: str | None = None


def check_output(output: str, config: RunConfig, plan: Plan) -> Iterator[Finding]:
    """Hold every file of an output against the plan, and the manifest against the files.

    What is not there yet is no finding. The manifest is written anew.
    """
    manifest = Manifest(output)
    there = list_parts(output)
    yield from _check_strangers(output, plan, there)
    schema = output_schema(plan.carried)
    reports: dict[str, PartReport] = {}
    for shard in plan.shards:
        if (known := manifest.get(shard.name)) is not None and shard.name in there:
            reports[shard.name] = known  # Of a part that is damaged too: the next look must see it.
        if wrong := check_shard(output, shard):
            yield Finding(wrong, shard_uri(output, shard.name))
        elif shard.name in there:
            uri = part_uri(output, shard.name)
            try:
                table, content = read_part(output, shard.name)
            except DamagedPartError as error:
                yield Finding(str(error), uri)
                continue
            wrong = check_part(table, schema, shard, output, config.sampling)
            if not wrong:
                report = report_of(shard.name, table, content)
                if reports.setdefault(shard.name, report) != report:
                    wrong = "it is not the file that was committed"
            if wrong:
                yield Finding(f"{uri}: {wrong}", uri)
            elif wrong := check_errors(output, shard.name, table):
                uri = errors_uri(output, shard.name)
                yield Finding(f"{uri}: {wrong}", uri, shard.name)
    manifest.keep(reports)
    manifest.save()


def _check_strangers(output: str, plan: Plan, there: dict[str, int]) -> Iterator[Finding]:
    for name in sorted(there.keys() - {shard.name for shard in plan.shards}):
        yield Finding(f"{part_uri(output, name)}: belongs to no shard of the plan")
    ours = {part_uri(output, name).rpartition("/")[2] for name in there}
    for uri in storage.list_files(storage.join(output, "data")):
        if uri.rpartition("/")[2] not in ours:
            yield Finding(
                f"{uri}: is none of ours, and readers of the folder may take it for a part"
            )


def check_part(
    table: pa.Table, schema: pa.Schema, shard: Shard, output: str, defaults: SamplingParams
) -> str:
    """What is wrong with a part; empty if nothing is."""
    if schema_digest(table.schema) != schema_digest(schema):
        return "its columns are not those of the plan"
    columns = ["id", "sampling_params", "error", "prompt", "messages"]
    planned = read_shard(output, shard.name, columns).to_pylist()
    expected = [
        (row["id"], index)
        for row in planned
        for index in range(1 if row["error"] else num_samples(row, defaults))
    ]
    keys = list(zip(table["id"].to_pylist(), table["sample_idx"].to_pylist(), strict=True))
    if keys != expected:
        missing = [key for key in expected if key not in set(keys)]
        return f"its rows are not those of the shard (missing: {missing[:3] or 'none'})"
    asked = {row["id"]: (row["prompt"], row["messages"]) for row in planned}
    for row in table.select(["id", "prompt", "messages"]).to_pylist():
        if (row["prompt"], row["messages"]) != asked[row["id"]]:
            return f"row {row['id']!r}: its prompt is not that of the plan"
    refused = {row["id"] for row in planned if row["error"]}
    columns = ["id", "finish_reason", "error", "error_type", "generated_tokens"]
    columns += ["num_generated_tokens", "num_steps", "num_spec_steps", "num_draft_tokens"]
    columns += ["num_accepted_draft_tokens", "acceptance_histogram"]
    for row in table.select(columns).to_pylist():
        if wrong := _check_row(row, is_refused=row["id"] in refused):
            return f"row {row['id']!r}: {wrong}"
    return ""


def _check_row(row: dict[str, Any], *, is_refused: bool) -> str:
    failed = row["finish_reason"] == "error"
    if failed != bool(row["error"]) or failed != bool(row["error_type"]):
        return "an answer with an error, or neither"
    if failed:
        return ""
    if is_refused:
        return "it was refused, and has an answer"
    tokens, histogram = row["generated_tokens"], row["acceptance_histogram"]
    if tokens is None or histogram is None or len(tokens) != row["num_generated_tokens"]:
        return "its tokens are not as many as it says"
    accepted = sum(j * count for j, count in enumerate(histogram))
    if (sum(histogram), accepted) != (row["num_spec_steps"], row["num_accepted_draft_tokens"]):
        return "its acceptance histogram does not add up"
    if not 0 <= accepted <= row["num_draft_tokens"]:
        return "it accepts more than was drafted"
    return ""
