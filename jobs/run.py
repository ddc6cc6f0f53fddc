"""The main job from an opened model to the last part: one plan, one conversion, all shards committed."""

import importlib.metadata
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.cli import say
from pipeline import failpoints, storage
from pipeline.admission import Admission, load_tokenizer, tokenizer_digest
from pipeline.calibration import read_calibration
from pipeline.config import RunConfig
from pipeline.graph import write_plan
from pipeline.lease import Lease
from pipeline.manifest import Manifest, has_failed_rows
from pipeline.parts import PartReport, Provenance
from pipeline.places import Kind
from pipeline.plan import Plan
from pipeline.pool import WorkerPool
from pipeline.progress import Course
from pipeline.schema import schema_to_json
from pipeline.shard_task import GenerateSettings
from pipeline.summary import Summary, describe_drafts, read_summary, sum_reports, write_summary
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.compressed import read_report
from quant.config import QuantConfig
from quant.convert import check_precision
from quant.prepare import cached_folder, is_cached
from quant.store import WeightsRef, convert_to_store
from workers.actor import WorkerSettings

_ENOUGH_SAMPLES = 100  # That their failures say something of the rest.


@dataclass(frozen=True)
class Model:
    """A checkpoint that was found usable, with its tokenizer."""

    checkpoint: Checkpoint
    tokenizer: Any


@dataclass(frozen=True)
class Setting:
    """What a run finds when it begins: its kinds of workers, where to say how it is doing, and when the
    job began (monotonic).
    """

    kinds: Sequence[Kind]
    course: Course
    started: float


def open_model(folder: Path, config: QuantConfig) -> Model:
    """Check a model's folder; raises InputError or CheckpointError with the reason."""
    checkpoint = open_checkpoint(folder)
    check_precision(checkpoint, config)
    read_report(checkpoint.folder)  # Damaged, it would be noticed when all is done.
    return Model(checkpoint, load_tokenizer(checkpoint.folder))


def run(
    config: RunConfig,
    uris: Sequence[str],
    model: Model,
    lease: Lease,
    setting: Setting,
    *,
    retry: bool = False,
) -> int:
    """Plan the sources, convert, generate and sum up; returns the exit code. Ray is running.

    With `retry`, rows that failed are tried again, too.
    """
    course = setting.course
    weights = _convert(config, model)
    plan = _make_plan(config, uris, model, weights)
    manifest = Manifest(config.output)
    done, damaged = manifest.find_parts(plan.shards)
    for reason in damaged:
        say(f"{reason}; it is made again")
    if retry:
        done = {n: r for n, r in done.items() if not has_failed_rows(r, plan.shard(n))}
    total, fresh = sum_reports(done.values()), Summary()
    pending = {s.name: s.num_rows for s in plan.shards if s.name not in done}
    say(f"{plan.num_rows} rows in {len(plan.shards)} shards, {len(done)} of them done")
    course.num_rows_planned, course.before, course.total = plan.num_rows, total, total
    first_part_after = None
    settings = _settings(config, model, plan, weights, lease.run, retry=retry)
    pool = WorkerPool(weights, settings, config.cluster, setting.kinds)
    course.phase, course.places = "starting", pool.places
    for report in _generate(pool, weights, pending):
        lease.check()
        manifest.add(report)
        failpoints.reach("part-listed", report.shard)
        total, fresh = total.add(report), fresh.add(report)
        course.total = total
        first_part_after = first_part_after or time.monotonic() - setting.started
        if total.num_samples >= _ENOUGH_SAMPLES and total.error_rate > config.max_error_rate:
            break
    storage.remove_leftovers(storage.join(config.output, "data"))  # Of workers that died.
    manifest.read_again(pool.issued_twice)
    manifest.save()
    run = _describe_run(config, weights, fresh, first_part_after)
    run["this_run"]["num_shards_issued_twice"] = len(pool.issued_twice)
    if len(pool.kinds) > 1:
        run["this_run"]["agreement_of_workers"] = pool.probe.to_dict()
    if pending:
        run |= describe_weights(weights.wait())
    else:  # They were not made this time: what was said of them stays.
        run |= {
            "weights": read_summary(config.output).get("weights", describe_weights({})["weights"])
        }
    write_summary(config.output, total, run)
    if total.num_rows == plan.num_rows:
        course.phase = "complete"
    print(format_summary(total.to_dict() | run))
    return _exit_code(config, plan, total)


def _convert(config: RunConfig, model: Model) -> WeightsRef:
    """Submit the conversion, and say so where it will take a while."""
    texts = []
    if not model.checkpoint.is_quantized:
        texts = read_calibration(config.quant, model.tokenizer)
    weights = convert_to_store(model.checkpoint, config.quant, texts, config.cluster.weights)
    if texts and not is_cached(weights.recipe):
        say(
            f"calibrating on {sum(map(len, texts))} tokens; this takes a while, once: the weights "
            f"are kept in {cached_folder(weights.recipe)}"
        )
    return weights


def _make_plan(config: RunConfig, uris: Sequence[str], model: Model, weights: WeightsRef) -> Plan:
    limit = config.engine.max_model_len or model.checkpoint.architecture.max_position_embeddings
    vocab_size = model.checkpoint.architecture.vocab_size
    admission = Admission(model.tokenizer, config.sampling, limit, vocab_size, config.data)
    origin = {"weights": weights.digest, "tokenizer": tokenizer_digest(model.tokenizer)}
    plan = write_plan(config, uris, admission, origin)
    for uri in plan.changed_sources():
        say(
            f"{uri}: was changed since it was planned (its size or its date); what was planned stays"
        )
    plan.check_refused(config.output, config.max_error_rate)
    return plan


def _exit_code(config: RunConfig, plan: Plan, total: Summary) -> int:
    """0, or 3 where more samples failed than may."""
    if total.error_rate <= config.max_error_rate:
        return 0
    stopped = "" if total.num_rows == plan.num_rows else "; the run was stopped"
    say(
        f"{total.num_errors} of {total.num_samples} samples failed, more than --max-error-rate "
        f"{config.max_error_rate} allows{stopped}"
    )
    return 3


def _generate(
    pool: WorkerPool, weights: WeightsRef, pending: Mapping[str, int]
) -> Iterator[PartReport]:
    """Generate the pending shards; raises CheckpointError if the weights turn out unusable."""
    if not pending:
        return
    try:
        yield from pool.run(pending)
    except Exception:
        weights.wait()  # Workers start while the conversion runs: if it failed, its error is the one.
        raise


def format_summary(summary: dict[str, Any]) -> str:
    """The run in a few lines for people."""
    drafts = describe_drafts(summary["mean_acceptance_length"], summary["draft_acceptance_rate"])
    run = summary["this_run"]
    shared = f", {summary['num_shared']} shared" if summary["num_shared"] else ""
    lines = {
        "rows": f"{summary['num_rows']} ({summary['num_samples']} samples, "
        f"{summary['num_errors']} errors{shared})",
        "tokens": f"{summary['num_input_tokens']} in, {summary['num_generated_tokens']} out",
        "drafts": drafts,
        "speed": f"{run['tokens_per_second']:.0f} tokens/s over {run['generation_seconds']:.1f} s"
        if run["num_shards"]
        else "nothing was left to do",
        "weights": _format_weights(summary),
        "output": summary["output"],
    }
    return "\n".join(f"{key:>8}  {value}" for key, value in lines.items())


def describe_weights(report: dict[str, Any]) -> dict[str, Any]:
    """What a summary says of how the weights were made (`quant.prepare`'s report)."""
    fidelity = report.get("fidelity_on_calibration_texts") or {}
    return {
        "weights": {
            "recipe": (report.get("recipe") or {}).get("recipe"),
            "int8_share_of_linears": report.get("int8_share_of_linears"),
            "float_linears": report.get("float_linears", []),
            "top1_agreement": fidelity.get("top1_agreement"),
            "mean_kl": fidelity.get("mean_kl"),
        }
    }


def _format_weights(summary: dict[str, Any]) -> str:
    weights = summary["weights"]
    if weights["recipe"] is None:
        is_foreign = summary["precision"] == "w8a8"
        return f"{summary['precision']}{', as the checkpoint has them' if is_foreign else ''}"
    text = f"{summary['precision']} ({weights['recipe']}), {weights['int8_share_of_linears']:.1%} of the "
    text += "linears in int8"
    if weights["top1_agreement"] is None:
        return text + "; distance to the original not measured"
    return text + (
        f"; {weights['top1_agreement']:.1%} of first choices as in float32, KL {weights['mean_kl']:.4f}"
    )


def _settings(
    config: RunConfig, model: Model, plan: Plan, weights: WeightsRef, run_id: str, *, retry: bool
) -> GenerateSettings:
    packages = ("quasar-batch", "torch", "transformers", "ray", "numba", "pyarrow")
    versions = {name: importlib.metadata.version(name) for name in packages}
    # Room for the longest row, and for one position at least where every row was refused.
    max_model_len = max(2, plan.max_total_tokens)
    return GenerateSettings(
        output=config.output,
        run=run_id,
        retry=retry,
        sampling=config.sampling,
        seed=config.seed,
        max_attempts_per_row=config.cluster.max_attempts_per_row,
        provenance=Provenance(
            model=config.model,
            weights_digest=weights.digest,
            config_digest=config.digest(),
            versions=versions | {"python": platform.python_version()},
        ),
        carried=schema_to_json(plan.carried),
        worker=WorkerSettings(
            engine=config.engine,
            quant=config.quant,
            max_model_len=max_model_len,
            tokenizer_json=model.tokenizer.backend_tokenizer.to_str(),
            num_threads=1,  # These two are the kind of worker's own.
            device="cpu",
        ),
    )


def _describe_run(
    config: RunConfig, weights: WeightsRef, fresh: Summary, first_part_after: float | None
) -> dict[str, Any]:
    return {
        "model": config.model,
        "precision": config.quant.precision,
        "proposer": config.engine.proposer,
        "weights_digest": weights.digest,
        "config_digest": config.digest(),
        "output": config.output,
        "this_run": {
            "num_shards": fresh.num_shards,
            "num_generated_tokens": fresh.num_generated_tokens,
            "generation_seconds": round(fresh.seconds, 3),
            "tokens_per_second": round(fresh.tokens_per_second, 1),
            "first_part_after_seconds": first_part_after and round(first_part_after, 1),
        },
    }
