"""What a report says of a run in words and numbers, whatever it is written as."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from jobs.cli import say
from pipeline.config import RunConfig
from pipeline.errors import DamagedOutputError
from pipeline.inspection import read_config
from pipeline.run_stats import RunStats
from pipeline.summary import read_summary


@dataclass(frozen=True)
class Facts:
    """A run in a few words: `tiles` are its figures, (value, what it is); `lines` what ran."""

    model: str
    when: str
    tiles: list[tuple[str, str]]
    lines: dict[str, str]


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
        model.rstrip("/").rpartition("/")[2], when, _tiles(stats), _lines(stats, summary, config)
    )


def _tiles(stats: RunStats) -> list[tuple[str, str]]:
    total, seconds = stats.total, stats.spans.seconds
    drafts = total.stats
    tiles = [
        (f"{stats.num_rows:,}", "rows"),
        (f"{total.num_samples:,}", "samples"),
        (f"{total.num_errors:,}", "failed"),
        (f"{total.num_tokens:,}", "tokens generated"),
        (f"{total.num_tokens / seconds:,.0f}" if seconds else "-", "tokens per second"),
        (str(timedelta(seconds=round(seconds))), "time of generation"),
        (number(drafts.mean_acceptance_length), "acceptance length"),
        (percent(drafts.draft_acceptance_rate), "of drafted tokens accepted"),
        (ratio(total.num_tokens, drafts.num_steps), "tokens per step"),
    ]
    if stats.num_shared:
        tiles.insert(3, (f"{stats.num_shared:,}", "answers of other rows"))
    return tiles


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
    if devices := sorted(set(stats.spans.devices)):
        shown = ", ".join(devices[:8])
        lines["devices"] = shown + (f" and {len(devices) - 8} more" if len(devices) > 8 else "")
    versions = {tuple(sorted(footer.get("versions", {}).items())) for footer in stats.footers}
    lines["versions"] = "; ".join(
        ", ".join(f"{k} {v}" for k, v in each) for each in sorted(versions)
    )
    ended = ", ".join(f"{name} {count:,}" for name, count in stats.finish_reasons.most_common())
    lines["answers ended by"] = ended
    return lines


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
