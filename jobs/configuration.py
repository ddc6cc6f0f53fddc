"""Every key of the configuration as docs/configuration.md has it, from the models: `make docs`.

A test fails where the file is not what this writes.
"""

import types
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, TypeGuard, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from jobs.cli import BENCH_SHORTCUTS, QUANTIZE_SHORTCUTS, SHORTCUTS
from pipeline.config import BenchConfig, QuantizeConfig, RunConfig

# Groups of keys that commands share are described once, where they come first.
COMMANDS: tuple[tuple[str, type[BaseModel], Mapping[str, str]], ...] = (
    ("generate and plan", RunConfig, SHORTCUTS),
    ("quantize", QuantizeConfig, QUANTIZE_SHORTCUTS),
    ("bench", BenchConfig, BENCH_SHORTCUTS),
)
_NAMES = {str: "text", int: "integer", float: "number", bool: "yes or no"}
_TWO_63 = 2**63
_SIGNS = ((Ge, "ge", "≥"), (Gt, "gt", ">"), (Le, "le", "≤"), (Lt, "lt", "<"))
_HEADER = """\
# Configuration

<!-- Written by `make docs` (jobs/configuration.py). -->

Every key can stand in a YAML file (`--config FILE`, groups as nested mappings), and is a flag:
`sampling.top_k: 40` is `--sampling.top_k 40`. Flags win over the file. Keys that are set often have a
short flag, too. An unknown key, or a value out of its range, is an error (exit code 2).

Keys of the type "yes or no" are flags without a value: `--data.chat`, `--no-data.chat`. `input`,
`evaluate`, `precisions`, `drafts`, `batch_sizes` and `temperatures` take several values behind one
flag; `sampling.stop` and `sampling.stop_token_ids` are given once for each value.

What a run was given, defaults included, lies in `OUT/config.yaml`, which `--config` reads again. A row's
own `sampling_params` win over the keys of `sampling`.
"""


def render() -> str:
    """The whole file."""
    sections, known = [_HEADER], set[type[BaseModel]]()
    for command, model, shortcuts in COMMANDS:
        title = " and ".join(f"`{name}`" for name in command.split(" and "))
        sections.append(f"## {title}\n\n{_table(model, '', shortcuts)}")
        sections += _describe_entries(model, "")
        for name, group in _groups(model):
            if group not in known:
                sections += _describe_group(name, group, shortcuts)
                known.add(group)
            else:
                sections.append(_refer(name, group, shortcuts))
    return "\n".join(sections)


def flags(model: type[BaseModel], shortcuts: Mapping[str, str]) -> set[str]:
    """Every flag that the tables name for a command."""
    keys = {key: shortcuts.get(key) for key, _ in _keys(model, "")}
    return {f"--{key}" for key in keys} | {f"--{short}" for short in keys.values() if short}


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    """All keys of a model and its groups, dotted."""
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            yield from _keys(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def _groups(model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        if _is_model(field.annotation):
            yield name, field.annotation


def _describe_group(name: str, group: type[BaseModel], shortcuts: Mapping[str, str]) -> list[str]:
    section = f"### {name}\n\n{_about(group)}\n\n{_table(group, f'{name}.', shortcuts)}"
    return [section, *_describe_entries(group, f"{name}.")]


def _describe_entries(model: type[BaseModel], prefix: str) -> list[str]:
    """A section for each list of a model whose entries are models themselves."""
    return [
        f"#### an entry of {prefix}{key}\n\n{_about(entry)}\n\n{_table(entry, '', {})}"
        for key, field in model.model_fields.items()
        for entry in _models_in(field.annotation)
    ]


def _about(model: type[BaseModel]) -> str:
    return (model.__doc__ or "").strip().splitlines()[0]


def _refer(name: str, group: type[BaseModel], shortcuts: Mapping[str, str]) -> str:
    """Where a group was described before, and which of its short flags this command lacks."""
    keys = [f"{name}.{key}" for key in group.model_fields]
    missing = [f"`--{SHORTCUTS[key]}`" for key in keys if key in SHORTCUTS.keys() - shortcuts]
    without = f", without the short flag {', '.join(missing)}" if missing else ""
    return f"Also the keys of [{name}](#{name}){without}.\n"


def _table(model: type[BaseModel], prefix: str, shortcuts: Mapping[str, str]) -> str:
    rows = [["key", "short flag", "type", "default", "range", "meaning"], ["---"] * 6]
    for name, field in model.model_fields.items():
        if not _is_model(field.annotation):
            short = shortcuts.get(f"{prefix}{name}")
            rows.append([f"`{prefix}{name}`", f"`--{short}`" if short else "", *_describe(field)])
    if not any(row[1] for row in rows[2:]):
        rows = [[row[0], *row[2:]] for row in rows]
    return "".join(f"| {' | '.join(map(_cell, row))} |\n" for row in rows)


def _describe(field: FieldInfo) -> list[str]:
    ranges = _range(field.annotation, field.metadata)
    return [_type(field.annotation), _default(field), ranges, field.description or ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _type(annotation: Any) -> str:
    """A type in words."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(inner[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if t is types.NoneType else _type(t) for t in inner)
    if origin in (tuple, list):
        entry = _type(inner[0])
        return f"list of {entry}s" if entry in _NAMES.values() else f"list of {entry}"
    if origin is dict:
        return f"mapping of {_type(inner[0])} to {_type(inner[1])}"
    if _is_model(annotation):
        return "mappings (below)"
    return _NAMES.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value is PydanticUndefined:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple | dict):
        return ", ".join(f"`{_plain(one)}`" for one in value) or "empty"
    return f"`{_plain(value)}`"


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _range(annotation: Any, metadata: list[Any]) -> str:
    """The bounds of a value, and those of a list's entries."""
    bounds = [text for bound in metadata if (text := _bound(bound))]
    inner_types = get_args(annotation)
    entry = inner_types[-1 if get_origin(annotation) is dict else 0] if inner_types else None
    if get_origin(entry) is Annotated:
        _, *extras = get_args(entry)
        inner = [bound for extra in extras for bound in getattr(extra, "metadata", [extra])]
        bounds += [f"each {text}" for bound in inner if (text := _bound(bound))]
    return ", ".join(bounds)


def _bound(bound: Any) -> str:
    """One bound; empty for what is none."""
    if isinstance(bound, MinLen):
        return "not empty" if bound.min_length == 1 else f"length ≥ {bound.min_length}"
    if isinstance(bound, MaxLen):
        return f"length ≤ {bound.max_length}"
    for kind, attribute, sign in _SIGNS:
        if isinstance(bound, kind):
            value = getattr(bound, attribute)
            return f"{sign} {'2^63' if value == _TWO_63 else value}"
    return ""


def _is_model(annotation: Any) -> TypeGuard[type[BaseModel]]:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Models that entries of a list are; the groups themselves are none."""
    for inner in get_args(annotation):
        if _is_model(inner):
            yield inner
        else:
            yield from _models_in(inner)


if __name__ == "__main__":
    print(render(), end="")
