"""Command line and YAML file to one configuration; flags win, and an unknown key is an error by name."""

import argparse
import json
import logging
import sys
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
from pipeline.config import BenchConfig, QuantizeConfig, RunConfig
from pipeline.errors import InputError, describe

# The configuration keys people set every day, with the short flags they know.
QUANT_SHORTCUTS = {
    f"quant.{key}": key.replace("_", "-")
    for key in (
        "recipe",
        "alpha",
        "calibration",
        "num_calibration_samples",
        "target_agreement",
        "max_float_bytes",
    )
}
SHORTCUTS = QUANT_SHORTCUTS | {
    "sampling.max_tokens": "max-tokens",
    "sampling.temperature": "temperature",
    "sampling.top_p": "top-p",
    "sampling.n": "n",
    "engine.proposer": "proposer",
    "engine.num_speculative_tokens": "num-speculative-tokens",
    "engine.max_num_seqs": "max-num-seqs",
    "quant.precision": "precision",
    "cluster.num_workers": "num-workers",
    "max_error_rate": "max-error-rate",
    "cluster.max_attempts_per_row": "max-attempts-per-row",
    "data.limit": "limit",
    "data.prompt_column": "prompt-column",
    "data.prompt_template": "prompt-template",
    "data.system_prompt": "system-prompt",
    "data.chat": "chat",
    "data.too_long": "too-long",
    "data.share_duplicates": "share-duplicates",
}
QUANTIZE_SHORTCUTS = QUANT_SHORTCUTS | {
    "num_evaluation_samples": "num-evaluation-samples",
    "max_tokens": "max-tokens",
}
BENCH_SHORTCUTS = QUANT_SHORTCUTS | {
    name: name.replace("_", "-") for name in BenchConfig.model_fields if "_" in name
}
_LISTS = {"input", "evaluate", "precisions", "drafts", "batch_sizes", "temperatures"}


class _Settings(BaseSettings):
    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        cli_exit_on_error=False,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
    )

    @classmethod
    def settings_customise_sources(  # The signature is pydantic-settings'.
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The file only, below the command line; the environment has no say."""
        return (init_settings,)


class _Generate(RunConfig, _Settings):
    """Generate a data set: prompts in, answers with acceptance statistics out.

    --config FILE reads a YAML file first. Every key of the configuration is a flag.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="python -m jobs generate", cli_shortcuts=SHORTCUTS
    )


class _Quantize(QuantizeConfig, _Settings):
    """Convert a checkpoint to W8A8 and write it as a compressed-tensors folder.

    --config FILE reads a YAML file first. Every key of the configuration is a flag.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="python -m jobs quantize", cli_shortcuts=QUANTIZE_SHORTCUTS
    )


class _Bench(BenchConfig, _Settings):
    """Measure this machine, model and prompts: precisions, drafts, batch sizes and temperatures.

    --config FILE reads a YAML file first. Every key of the configuration is a flag.
    """

    model_config = SettingsConfigDict(
        cli_prog_name="python -m jobs bench", cli_shortcuts=BENCH_SHORTCUTS
    )


def say(line: str) -> None:
    """Tell people what is going on, beside the output proper."""
    print(line, file=sys.stderr, flush=True)


class _Teller(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


_TELLER = _Teller(logging.INFO)


def say_events() -> None:
    """From now on, tell what happens in a run: a line for each event."""
    for package in ("pipeline", "quant"):
        logger = logging.getLogger(package)
        logger.setLevel(logging.INFO)
        logger.addHandler(_TELLER)  # Once, however often.


def parse_run(arguments: Sequence[str]) -> RunConfig:
    """The configuration of `generate` that a command line stands for.

    Raises:
        InputError: an unknown key, a value out of range, an unreadable file.
        SystemExit: --help was asked for.
    """
    # The parser takes a one-letter name for a short flag.
    arguments = [
        "--sampling.n" + a[3:] if a == "--n" or a.startswith("--n=") else a for a in arguments
    ]
    return RunConfig.model_validate(_parse(_Generate, arguments).model_dump())


def parse_quantize(arguments: Sequence[str]) -> QuantizeConfig:
    """The configuration of `quantize` that a command line stands for; raises as `parse_run` does."""
    return QuantizeConfig.model_validate(_parse(_Quantize, arguments).model_dump())


def parse_bench(arguments: Sequence[str]) -> BenchConfig:
    """The configuration of `bench` that a command line stands for; raises as `parse_run` does."""
    return BenchConfig.model_validate(_parse(_Bench, arguments).model_dump())


def _parse(settings: type[_Settings], arguments: Sequence[str]) -> _Settings:
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--config")
    # Taken verbatim: the settings parser would split a value at its commas.
    for name in _LISTS & settings.model_fields.keys():
        flags = {f"--{name}", f"--{name.replace('_', '-')}"}
        first.add_argument(*flags, dest=name, nargs="*", action="extend")
    if "sampling" in settings.model_fields:
        first.add_argument("--sampling.stop", action="append", dest="stop")
    try:
        known, rest = first.parse_known_args(_split_lists(arguments))
    except argparse.ArgumentError as error:
        raise InputError(str(error)) from error
    verbatim = {name: given for name in _LISTS if (given := getattr(known, name, None))}
    if stops := getattr(known, "stop", None):
        verbatim["sampling"] = {"stop": [stop for given in stops for stop in _stops(given)]}
    values = _read_config(known.config) if known.config else {}
    try:
        source = CliSettingsSource[Any](settings, cli_parse_args=rest)
        return settings(**_merge(_merge(values, source()), verbatim))
    except ValidationError as error:
        raise InputError(describe(error)) from error
    except SettingsError as error:
        raise InputError(_explain(str(error))) from error


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


def _split_lists(arguments: Sequence[str]) -> list[str]:
    """Let `--input=A B` name two files, as `--input A B` does."""
    split: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        is_list = equals and flag.removeprefix("--").replace("-", "_") in _LISTS
        split += [flag, value] if is_list else [argument]
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
