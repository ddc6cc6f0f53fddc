"""A benchmark's numbers as Markdown."""

import statistics
from collections.abc import Sequence
from typing import Any

_Runs = list[dict[str, Any]]


def format_bench(report: dict[str, Any]) -> str:
    """All tables of a report (what `jobs.bench` writes)."""
    by_arm = _by_arm(report["runs"])
    sections = [
        _title(report),
        "## Speed",
        _speed(by_arm),
        "## Where the time goes",
        _phases(by_arm),
        "## Acceptance",
        _acceptance(by_arm),
    ]
    if tasks := _tasks(by_arm):
        sections += ["## By task, one row at a time", tasks]
    if report["roofline"]:
        sections += ["## Against the raw kernels", _roofline(report["roofline"])]
    if report["samples"]:
        sections += ["## Samples of one prompt", _samples(report["samples"])]
    return "\n\n".join(sections) + "\n"


def _title(report: dict[str, Any]) -> str:
    made, config, prompts = report["provenance"], report["config"], report["prompts"]
    num_tokens = sum(prompt["num_tokens"] for prompt in prompts)
    return (
        f"# Benchmark of {config['model'].rstrip('/').rsplit('/', 1)[-1]}\n\n"
        f"{made['device']}, {made['num_threads']} threads; {made['time'][:10]}, commit {made['commit']}. "
        f"{len(prompts)} prompts of {num_tokens} tokens, up to {config['max_tokens']} new tokens each; "
        f"{config['num_repeats']} interleaved runs of every arm. Medians, with the least and the most."
    )


def _by_arm(runs: _Runs) -> dict[tuple[Any, ...], _Runs]:
    """The runs of every arm by repeat, the arms as the first repeat ran them."""
    grouped: dict[tuple[Any, ...], _Runs] = {}
    for run in sorted(runs, key=lambda run: run["repeat"]):
        arm = run["arm"]
        key = arm["temperature"], arm["batch_size"], arm["precision"], arm["drafts"]
        grouped.setdefault(key, []).append(run)
    return grouped


def _median(runs: _Runs, key: str) -> float:
    return float(statistics.median(run[key] for run in runs))


def _speed(by_arm: dict[tuple[Any, ...], _Runs]) -> str:
    """Tokens per second of the whole call, and ratios within each repeat."""
    rows = []
    for (temperature, batch, precision, drafts), runs in by_arm.items():
        rates = [run["tokens_per_second"] for run in runs]
        plain = by_arm.get((temperature, batch, precision, "none"))
        bf16 = by_arm.get((temperature, batch, "bf16", "none"))
        same = by_arm.get((temperature, batch, "bf16", drafts)) if precision == "w8a8" else None
        equal = all(run["tokens_equal_first_arm"] for run in runs)
        rows.append(
            [
                f"{temperature:g}",
                str(batch),
                precision,
                drafts,
                f"{statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})",
                f"{_median(runs, 'decode_tokens_per_second'):.1f}",
                _ratio(runs, plain),
                _ratio(runs, bf16),
                _ratio(runs, same),
                "yes" if equal else "NO",
            ]
        )
    head = [
        *("T", "rows", "verifier", "drafts", "tokens/s", "decoding"),
        *("over no drafts", "over bf16 without", "over bf16 with the same", "same tokens"),
    ]
    return _table(head, rows)


def _ratio(runs: _Runs, base: _Runs | None) -> str:
    """The median over the repeats of the ratio of tokens per second."""
    if not base:
        return ""
    pairs = zip(runs, base, strict=True)
    return f"{statistics.median(a['tokens_per_second'] / b['tokens_per_second'] for a, b in pairs):.2f}"


def _phases(by_arm: dict[tuple[Any, ...], _Runs]) -> str:
    names = list(next(iter(by_arm.values()))[0]["phases"])
    rows = []
    for (temperature, batch, precision, drafts), runs in by_arm.items():
        total = statistics.median(run["seconds"] for run in runs)
        shares = [
            statistics.median(r["phases"][name] / r["seconds"] for r in runs) for name in names
        ]
        rows.append(
            [
                *(f"{temperature:g}", str(batch), precision, drafts, f"{total:.1f}"),
                *(f"{share:.1%}" for share in shares),
            ]
        )
    return _table(["T", "rows", "verifier", "drafts", "seconds", *names], rows)


def _acceptance(by_arm: dict[tuple[Any, ...], _Runs]) -> str:
    rows = []
    for (temperature, batch, precision, drafts), runs in by_arm.items():
        stats = runs[0]["stats"]
        if not stats["num_spec_steps"]:
            continue
        rows.append(
            [
                *(f"{temperature:g}", str(batch), precision, drafts),
                f"{runs[0]['num_tokens'] / stats['num_steps']:.2f}",
                f"{stats['num_spec_steps'] / stats['num_steps']:.0%}",
                f"{stats['mean_acceptance_length']:.2f}",
                f"{stats['draft_acceptance_rate']:.0%}",
                " ".join(f"{share:.2f}" for share in stats["acceptance_by_position"]),
            ]
        )
    head = [
        *("T", "rows", "verifier", "drafts", "tokens/step", "steps with a draft"),
        *("acceptance length", "acceptance rate", "accepted at position 1, 2, ..."),
    ]
    return _table(head, rows)


def _tasks(by_arm: dict[tuple[Any, ...], _Runs]) -> str:
    """Speed by task, over bf16 without drafts where that was run; for single rows, as only these have a
    time of their own.
    """
    single = {key: runs for key, runs in by_arm.items() if key[1] == 1}
    if not single:
        return ""
    tasks = list(next(iter(single.values()))[0]["tasks"])
    rows = []
    for (temperature, batch, precision, drafts), runs in single.items():
        base = single.get((temperature, batch, "bf16", "none")) or single.get(
            (temperature, batch, precision, "none")
        )
        cells = [_task_cell(runs, base, task) for task in tasks]
        rows.append([f"{temperature:g}", precision, drafts, *cells])
    note = (
        "Tokens/s of the rows, and in brackets over bf16 (else the same verifier) without drafts."
    )
    return note + "\n\n" + _table(["T", "verifier", "drafts", *tasks], rows)


def _task_cell(runs: _Runs, base: _Runs | None, task: str) -> str:
    rates = [_rate(run, task) for run in runs]
    cell = f"{statistics.median(rates):.1f}"
    if base:
        ratios = [a / _rate(b, task) for a, b in zip(rates, base, strict=True)]
        cell += f" ({statistics.median(ratios):.2f})"
    return cell


def _rate(run: dict[str, Any], task: str) -> float:
    of_task = run["tasks"][task]
    return float(of_task["num_tokens"] / of_task["row_seconds"])


def _roofline(records: _Runs) -> str:
    rows = [
        [
            record["pass"],
            *(f"{record[f'{name}_seconds'] * 1e3:.1f}" for name in ("raw", "matrix", "step")),
            f"{record['raw_of_matrix']:.0%}",
            f"{record['raw_of_step']:.0%}",
        ]
        for record in records
    ]
    head = ["pass", "raw, ms", "linears, ms", "whole pass, ms", "raw / linears", "raw / pass"]
    return _table(head, rows)


def _samples(found: dict[str, Any]) -> str:
    return (
        f"{found['num_samples']} samples of a prompt of {found['prompt_tokens']} tokens, "
        f"{found['answer_tokens']} new ones each: {found['shared_seconds']:.1f} s; as many "
        f"separate prompts: {found['separate_seconds']:.1f} s, {found['ratio']:.2f} times as long."
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
