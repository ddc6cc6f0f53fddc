"""What a report says of a run in words and numbers, whatever it is written as."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.cli import say
from pipeline.config import RunConfig
from pipeline.errors import DamagedOutputError
from pipeline.inspection import read_config
from pipeline.run_stats import RunStats
from pipeline.spans import Saved
from pipeline.summary import read_summary


@dataclass(frozen=True)
class Figure:
    """A number of a run: what it is, and how it is written; `is_measured` if two runs of the same rows
    differ in it, and a ratio says by how much.
    """

    name: str
    value: float | None
    text: str
    is_measured: bool = True


@dataclass(frozen=True)
class Facts:
    """A run in a few words: `figures` are its numbers, `lines` what ran, `config` what was asked for."""

    model: str
    when: str
    figures: list[Figure]
    lines: dict[str, str]
    config: RunConfig | None


def gather_facts(output: str, stats: RunStats) -> Facts:
    """From the parts; how it was asked for and how the weights were made is told where that is known."""
    spans, summary = stats.spans, read_summary(output)
    try:
        config = read_config(output)
    except DamagedOutputError as error:
        say(f"{error}; the report does without")
        config = None
    names = sorted({footer["model"] for footer in stats.footers if "model" in footer})
    model = ", ".join(names) or str(summary.get("model") or (config and config.model) or "?")
    when = "no answer yet"
    if len(spans.starts):
        first, last = (
            datetime.fromtimestamp(at, UTC) for at in (spans.starts.min(), spans.ends.max())
        )
        when = f"{first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"
    return Facts(
        model.rstrip("/").rpartition("/")[2],
        when,
        _figures(stats),
        _lines(stats, summary, config),
        config,
    )


def _figures(stats: RunStats) -> list[Figure]:
    total, seconds = stats.total, stats.spans.seconds
    drafts = total.stats
    speed = total.num_tokens / seconds if seconds else None
    per_step = total.num_tokens / drafts.num_steps if drafts.num_steps else None
    figures = [
        _count("rows", stats.num_rows),
        _count("samples", total.num_samples),
        _count("failed", total.num_errors),
        _count("tokens generated", total.num_tokens),
        Figure("tokens per second", speed, "-" if speed is None else f"{speed:,.0f}"),
        Figure("time of generation", seconds, str(timedelta(seconds=round(seconds)))),
        _ratio("tokens per step", per_step),
        _ratio("acceptance length", drafts.mean_acceptance_length),
        _share("of drafted tokens accepted", drafts.draft_acceptance_rate),
    ]
    if stats.num_shared:
        figures.insert(3, _count("answers of other rows", stats.num_shared))
    if (fill := stats.batch_fill) is not None:
        figures.append(_share("of the batch filled", fill))
    if (saved := stats.saved) is not None and saved.is_likely:
        figures.append(_share("of the decoding time saved by drafts (estimate)", saved.share))
    return figures


def _count(name: str, value: int) -> Figure:
    return Figure(name, value, f"{value:,}", is_measured=False)


def _ratio(name: str, value: float | None) -> Figure:
    return Figure(name, value, number(value))


def _share(name: str, value: float | None) -> Figure:
    return Figure(name, value, percent(value), is_measured=False)


def _lines(stats: RunStats, summary: dict[str, Any], config: RunConfig | None) -> dict[str, str]:
    lines: dict[str, str] = {}
    if config is not None:
        sampling = config.sampling
        lines["model"] = config.model
        lines["input"] = ", ".join(config.input)
        lines["sampling"] = (
            f"temperature {sampling.temperature:g}, top_p {sampling.top_p:g}, up to "
            f"{sampling.max_tokens} tokens, {sampling.n} of a prompt, seed {config.seed} (a row's own "
            "parameters win)"
        )
        lines["drafts"] = (
            f"{config.engine.proposer}, up to {config.engine.num_speculative_tokens} a step, "
            f"{config.engine.draft_lengths}"
        )
    if weights := summary.get("weights"):
        lines["weights"] = _weights(summary.get("precision", "?"), weights)
    for key, name in (("weights_digest", "weights digest"), ("config_digest", "config digest")):
        if found := sorted({footer[key] for footer in stats.footers if key in footer}):
            lines[name] = ", ".join(found)
    if devices := sorted(stats.devices):
        shown = ", ".join(devices[:8])
        lines["devices"] = shown + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")
    versions = {tuple(sorted(footer.get("versions", {}).items())) for footer in stats.footers}
    lines["versions"] = "; ".join(
        ", ".join(f"{k} {v}" for k, v in each) for each in sorted(versions)
    )
    ended = ", ".join(f"{name} {count:,}" for name, count in stats.finish_reasons.most_common())
    lines["answers ended by"] = ended
    if saved := stats.saved:
        lines["time saved (estimate)"] = _saved(saved)
    return lines


def _saved(saved: Saved) -> str:
    took = f"of the {saved.busy_seconds:,.1f} s that workers were busy, passes that gave tokens make up"
    if not saved.is_likely:
        return (
            f"none that can be told: {took} {saved.seconds:,.1f} s only, by the step times measured when "
            "the workers started. The rest went to prompts, to attention over long rows, or to "
            "other programs on the machine"
        )
    return (
        f"{saved.plain_seconds - saved.seconds:,.1f} s. By the step times measured when the workers "
        f"started, {took} {saved.seconds:,.1f} s; with one token a row and pass, and as many rows under "
        f"way, the {saved.num_tokens:,} tokens had taken {saved.plain_seconds:,.1f} s. Prompts, the "
        "attention over long rows and what proposing drafts takes are not in it"
    )


def _weights(precision: str, weights: dict[str, Any]) -> str:
    if weights.get("recipe") is None:
        return f"{precision}, as the checkpoint has them"
    text = f"{precision}, recipe {weights['recipe']}"
    text += f", {weights['int8_share_of_linears']:.1%} of the linears in int8"
    if weights.get("top1_agreement") is not None:
        text += (
            f"; on the calibration texts {weights['top1_agreement']:.1%} of first choices as in float32, "
            f"KL {weights['mean_kl']:.4f}"
        )
    return text


def number(value: float | None) -> str:
    """Two places, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A share of a hundred, or a dash."""
    return "-" if value is None else f"{value:.0%}"


def ratio(above: float, below: float) -> str:
    """A quotient, or a dash."""
    return number(above / below if below else None)
