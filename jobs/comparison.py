"""Two runs side by side, in words and numbers: what differs, and whether the tokens are equal."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jobs.report_facts import Facts, gather_facts
from pipeline.agreement import Agreement, compare_tokens
from pipeline.plan import Plan
from pipeline.run_stats import RunStats, read_stats

# Of the configuration, what tokens depend on beside the weights and what a row asks.
_DECISIVE = re.compile(
    r"seed|quant\.precision|sampling\.(?!n$|logprobs$).*|engine\.max_model_len|data\.(too_long|share_duplicates)"
)
_NO_MATTER = ("output", "resume")
_VERSIONS = ("quasar-batch", "torch", "numba")


@dataclass(frozen=True)
class Side:
    """One of the runs."""

    output: str
    stats: RunStats
    facts: Facts
    plan: Plan | None

    def told(self, key: str) -> set[str]:
        """What the parts' footers say under a key."""
        return {str(footer[key]) for footer in self.stats.footers if key in footer}


@dataclass(frozen=True)
class Pair:
    """Something of both runs, as written; `ratio` is the second's over the first's, if that says much."""

    name: str
    first: str
    second: str
    ratio: str = ""


@dataclass(frozen=True)
class Comparison:
    """Two runs: `reasons` are why equal tokens are not promised, none if they are."""

    names: tuple[str, str]
    sides: tuple[Side, Side]
    reasons: list[str]
    agreement: Agreement
    figures: list[Pair]
    differences: list[Pair]

    @property
    def is_broken(self) -> bool:
        """Whether tokens are not equal that were promised to be."""
        return not self.reasons and self.agreement.num_unequal > 0

    @property
    def equal(self) -> str:
        """How many are equal, in short."""
        return f"{self.agreement.num_equal:,} of {self.agreement.num_compared:,}"

    @property
    def unequal_title(self) -> str:
        """What stands above those that are named."""
        count, named = self.agreement.num_unequal, len(self.agreement.unequal)
        return f"{count:,} unequal" + (f", the first {named} of them" if count > named else "")

    @property
    def verdict(self) -> str:
        """In sentences, what became of the promise."""
        return " ".join(_verdict(self))


def compare(one: str, other: str) -> Comparison:
    """Read two outputs and hold them against each other.

    Raises:
        DamagedPartError: a part cannot be read.
        DamagedOutputError: a plan cannot be read.
        OSError: the storage does not answer.
    """
    first, second = sides = (_read(one), _read(other))
    reasons = list(_reasons(first, second))
    by_plan = first.plan is not None and second.plan is not None
    agreement = compare_tokens(one, other, by_plan=by_plan)
    return Comparison(
        _names(one, other),
        sides,
        reasons,
        agreement,
        list(_figures(first.facts, second.facts)),
        list(_differences(first, second)),
    )


def _read(output: str) -> Side:
    stats = read_stats(output)
    return Side(output, stats, gather_facts(output, stats), Plan.load(output))


def _names(one: str, other: str) -> tuple[str, str]:
    """The folders' names, or all of their locations where they are called the same."""
    short = one.rstrip("/").rpartition("/")[2], other.rstrip("/").rpartition("/")[2]
    if short[0] != short[1]:
        return short
    return (one, other) if one != other else (f"{one} (first)", f"{other} (second)")


def _reasons(one: Side, other: Side) -> Iterator[str]:
    """Why the tokens of the two are not promised to be equal."""
    digests = [side.told("weights_digest") for side in (one, other)]
    yield from _unless_one("weights", *digests)
    yield from _unless_one("versions", _versions(one), _versions(other))
    tokenizers = [side.plan and side.plan.origin.get("tokenizer") for side in (one, other)]
    if None in tokenizers:
        yield "the tokenizer is not known: a plan is not here"
    elif tokenizers[0] != tokenizers[1]:
        yield "other tokenizer"
    kinds = {device.partition(":")[0] for side in (one, other) for device in side.stats.devices}
    if len(kinds) > 1:
        yield f"other kinds of devices: {', '.join(sorted(kinds))}"
    if one.facts.config is None or other.facts.config is None:
        yield "sampling is not known: a configuration is not here"
        return
    flat = one.facts.config.flat(), other.facts.config.flat()
    for key in filter(_DECISIVE.fullmatch, flat[0]):
        if flat[0][key] != flat[1][key]:
            yield f"other {key}: {_against(flat[0][key], flat[1][key])}"


def _unless_one(name: str, *told: set[str]) -> Iterator[str]:
    """A reason, unless the parts of both runs say the same one thing."""
    if any(len(of_one) > 1 for of_one in told):
        yield f"not one for all parts of a run: {name}"
    elif told[0] != told[1]:
        yield f"other {name}: {_against(*map(_joined, told))}"


def _versions(side: Side) -> set[str]:
    found = set()
    for footer in side.stats.footers:
        known = footer.get("versions", {})
        found.add(", ".join(f"{name} {known[name]}" for name in _VERSIONS if name in known))
    return found


def _against(one: Any, other: Any) -> str:
    return f"{_written(one)} against {_written(other)}"


def _written(value: Any) -> str:
    """A value of a configuration, for people; digests are cut."""
    if isinstance(value, list | tuple):
        return ", ".join(map(_written, value)) or "none"
    text = "none" if value is None else str(value)
    return f"{text[:12]}…" if re.fullmatch("[0-9a-f]{32,}", text) else text


def _figures(one: Facts, other: Facts) -> Iterator[Pair]:
    there = {figure.name: figure for figure in other.figures}
    names = [figure.name for figure in one.figures]
    for figure in (*one.figures, *(f for f in other.figures if f.name not in names)):
        first = figure if figure.name in names else None
        second = there.get(figure.name)
        ratio = ""
        if first and second and first.value and second.value and figure.is_measured:
            ratio = f"{second.value / first.value:.2f}\u00d7"
        yield Pair(figure.name, first.text if first else "-", second.text if second else "-", ratio)


def _differences(one: Side, other: Side) -> Iterator[Pair]:
    configs = one.facts.config, other.facts.config
    flat: list[Mapping[str, Any]] = [{} if config is None else config.flat() for config in configs]
    keys = dict.fromkeys((*flat[0], *flat[1]))
    for key in sorted(keys, key=lambda key: (not key.startswith(("quant", "engine")), key)):
        values = [of.get(key, "?") for of in flat]
        if key not in _NO_MATTER and values[0] != values[1]:
            yield Pair(key, _written(values[0]), _written(values[1]))
    digests = [_joined(side.told("weights_digest")) for side in (one, other)]
    if digests[0] != digests[1]:
        yield Pair("weights digest", *digests)
    for name in ("devices", "versions"):
        lines = [side.facts.lines.get(name, "?") for side in (one, other)]
        if lines[0] != lines[1]:
            yield Pair(name, *lines)


def _joined(texts: Iterable[str]) -> str:
    return ", ".join(map(_written, sorted(texts))) or "?"


def _verdict(comparison: Comparison) -> Iterator[str]:
    found = comparison.agreement
    if not found.num_compared:
        yield "No sample was answered in both runs."
    elif comparison.reasons:
        yield f"Equal tokens are not promised, for the reasons below; {comparison.equal} samples agree."
    elif found.num_unequal:
        yield (
            f"Equal tokens are promised, whatever is drafted, and {found.num_unequal:,} of "
            f"{found.num_compared:,} samples are not equal."
        )
    else:
        yield (
            "Equal tokens are promised, whatever is drafted, and so it is: all "
            f"{found.num_compared:,} samples that both runs answered are equal, token by token."
        )
    others = {
        "failed in one of them, or are answers of other rows": found.num_unanswered,
        "were asked something else": found.num_asked_differently,
        f"only {comparison.names[0]} has": found.num_alone[0],
        f"only {comparison.names[1]} has": found.num_alone[1],
    }
    if told := [f"{count:,} {what}" for what, count in others.items() if count]:
        yield f"Not compared: {'; '.join(told)}."
