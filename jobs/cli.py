"""Command line and YAML file to one RunConfig; flags win, and an unknown key is an error by name."""

import argparse
import json
from collections.abc import Sequence
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from pipeline import storage
from pipeline.config import RunConfig
from pipeline.errors import InputError, describe

# The configuration keys people set every day, with the short flags they know.
SHORTCUTS = {
    "sampling.max_tokens": "max-tokens",
    "sampling.temperature": "temperature",
    "sampling.top_p": "top-p",
    "sampling.n": "n",
    "engine.proposer": "proposer",
    "engine.num_speculative_tokens": "num-speculative-tokens",
    "engine.max_num_seqs": "max-num-seqs",
    "quant.precision": "precision",
    "cluster.num_workers": "num-workers",
    "data.limit": "limit",
}


class _Settings(RunConfig, BaseSettings):
    """Generate a data set: prompts in, answers with acceptance statistics out.

    --config FILE reads a YAML file first. Every key of the configuration is a flag.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_prog_name="python -m jobs generate",
        cli_shortcuts=SHORTCUTS,
        cli_exit_on_error=False,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The file only, below the command line; the environment has no say."""
        return (init_settings,)


def parse_run(arguments: Sequence[str]) -> RunConfig:
    """The configuration a command line stands for.

    Raises:
        InputError: an unknown key, a value out of range, an unreadable file.
        SystemExit: --help was asked for.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    # Taken verbatim: the settings parser would split a value at its commas.
    first.add_argument("--input", nargs="*", action="extend")
    first.add_argument("--sampling.stop", action="append", dest="stop")
    try:
        known, rest = first.parse_known_args(_split_inputs(arguments))
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    verbatim: dict[str, Any] = {"input": known.input} if known.input else {}
    if known.stop:
        verbatim["sampling"] = {"stop": [stop for given in known.stop for stop in _stops(given)]}
    values = _read_config(known.config) if known.config else {}
    # The parser takes a one-letter name for a short flag.
    rest = ["--sampling.n" + a[3:] if a == "--n" or a.startswith("--n=") else a for a in rest]
    try:
        source = CliSettingsSource[Any](_Settings, cli_parse_args=rest)
        settings = _Settings(**_merge(_merge(values, source()), verbatim))
    except ValidationError as error:
        raise InputError(describe(error)) from error
    except SettingsError as error:
        raise InputError(_explain(str(error))) from error
    return RunConfig.model_validate(settings.model_dump())


def _read_config(uri: str) -> dict[str, Any]:
    content = storage.read_bytes(uri)
    if content is None:
        raise InputError(f"{uri}: no such file")
    try:
        values = yaml.safe_load(content)
    except yaml.YAMLError as error:
        raise InputError(f"{uri}: not valid YAML ({error})") from error
    if not isinstance(values, dict):
        raise InputError(f"{uri}: expected a mapping of keys")
    _check_keys(values, uri)
    return values


def _check_keys(values: dict[Any, Any], uri: str, prefix: str = "") -> None:
    """YAML allows keys that no configuration has, such as numbers."""
    for key, value in values.items():
        if not isinstance(key, str):
            raise InputError(f"{uri}: unknown key {prefix}{key!r}")
        if isinstance(value, dict):
            _check_keys(value, uri, f"{prefix}{key}.")


def _split_inputs(arguments: Sequence[str]) -> list[str]:
    """Let `--input=A B` name two files, as `--input A B` does."""
    split: list[str] = []
    for argument in arguments:
        is_input = argument.startswith("--input=")
        split += ["--input", argument.removeprefix("--input=")] if is_input else [argument]
    return split


def _stops(given: str) -> list[Any]:
    """A JSON list of stop strings, or one stop string as it stands."""
    try:
        values = json.loads(given) if given.startswith("[") else None
    except ValueError:
        values = None
    return values if isinstance(values, list) else [given]


def _merge(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Nested values, those of `above` first."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        merged[key] = (
            _merge(under, value) if isinstance(value, dict) and isinstance(under, dict) else value
        )
    return merged


def _explain(message: str) -> str:
    """The parser's message without its wrapping."""
    return message.removeprefix("error parsing CLI: ").strip()
