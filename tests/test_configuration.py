"""docs/configuration.md says what the models say, and names the flags that the command line has."""

from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from pydantic_settings import CliSettingsSource

from jobs import cli, configuration

FILE = Path(__file__).parents[1] / "docs" / "configuration.md"
SETTINGS = {"generate and plan": cli._Generate, "quantize": cli._Quantize, "bench": cli._Bench}


def test_the_committed_file_is_what_the_models_say() -> None:
    assert FILE.read_text(encoding="utf-8") == configuration.render(), "run `make docs`"


@pytest.mark.parametrize(("command", "model", "shortcuts"), configuration.COMMANDS)
def test_the_flags_are_those_of_the_command_line(
    command: str, model: type[BaseModel], shortcuts: dict[str, str]
) -> None:
    parser = CliSettingsSource[Any](SETTINGS[command], cli_parse_args=[]).root_parser
    there = {flag for action in parser._actions for flag in action.option_strings}
    there = {f"--{flag.lstrip('-')}" for flag in there}  # -n is what --n becomes, see `parse_run`.
    there = {flag for flag in there if not flag.startswith("--no-")} - {"--h", "--help"}
    there -= {f"--{name}" for name, _ in configuration._groups(model)}  # Hidden: JSON of it all.
    named = configuration.flags(model, shortcuts)
    assert "--model" in named
    assert named == there


def test_every_short_flag_sets_its_key() -> None:
    needed = ["--model", "m", "--input", "i", "--output", "o"]
    config = cli.parse_run([*needed, "--n", "3", "--max-tokens", "7", "--chat", "--limit", "2"])
    assert (config.sampling.n, config.sampling.max_tokens) == (3, 7)
    assert (config.data.chat, config.data.limit) == (True, 2)


class _Entry(BaseModel):
    """One of the things."""

    kind: Literal["a", "b"] = Field("a", description="Which | one.")
    count: int | None = Field(None, ge=1, lt=5, description="How many.")


class _Group(BaseModel):
    """Things that belong together.

    More about them.
    """

    things: tuple[_Entry, ...] = Field((), max_length=4, description="The things.")
    names: tuple[Annotated[str, Field(min_length=2)], ...] = Field(
        ("x1", "y2"), description="Their names."
    )
    share: float = Field(0.25, gt=0, description="Of all.")
    is_on: bool = Field(True, description="Whether.")


class _Model(BaseModel):
    path: str = Field(min_length=1, description="Where.")
    group: _Group = _Group()


def test_tables_of_a_model_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configuration, "_HEADER", "")
    monkeypatch.setattr(configuration, "COMMANDS", (("run", _Model, {"group.share": "share"}),))
    expected = """
## `run`

| key | type | default | range | meaning |
| --- | --- | --- | --- | --- |
| `path` | text | required | not empty | Where. |

### group

Things that belong together.

| key | short flag | type | default | range | meaning |
| --- | --- | --- | --- | --- | --- |
| `group.things` |  | list of mappings (below) | empty | length ≤ 4 | The things. |
| `group.names` |  | list of texts | `x1`, `y2` | each length ≥ 2 | Their names. |
| `group.share` | `--share` | number | `0.25` | > 0 | Of all. |
| `group.is_on` |  | yes or no | yes |  | Whether. |

#### an entry of group.things

One of the things.

| key | type | default | range | meaning |
| --- | --- | --- | --- | --- |
| `kind` | `a`, `b` | `a` |  | Which \\| one. |
| `count` | integer or none | none | ≥ 1, < 5 | How many. |
"""
    assert configuration.render() == expected
    assert configuration.flags(_Model, {"group.share": "share"}) == {
        *("--path", "--group.things", "--group.names"),
        *("--group.share", "--share", "--group.is_on"),
    }
