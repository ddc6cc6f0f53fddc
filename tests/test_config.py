"""One frozen configuration from flags and a file, and every mistake named."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from jobs.__main__ import main
from jobs.cli import SHORTCUTS, parse_run
from pipeline.cluster import WorkersConfig
from pipeline.config import RunConfig
from pipeline.errors import InputError
from workers.config import SamplingParams

NEEDED = ("--model", "m", "--input", "a.jsonl", "--output", "out")


def write_yaml(folder: Path, text: str) -> str:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_defaults_are_the_documented_ones() -> None:
    config = parse_run(NEEDED)
    assert (config.model, config.input, config.output, config.seed) == ("m", ("a.jsonl",), "out", 0)
    sampling = config.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p) == (256, 0, 1)
    assert (sampling.n, sampling.seed) == (1, None)
    assert (config.engine.proposer, config.engine.num_speculative_tokens) == ("suffix", 5)
    assert (config.engine.max_num_seqs, config.cluster.num_workers) == (16, 1)
    assert (config.quant.precision, config.data.limit) == ("w8a8", None)


def test_the_flags_that_scripts_rely_on() -> None:
    config = parse_run(
        [
            *("--model", "hub/model", "--input", "a.jsonl", "b.parquet", "s3://c/d.jsonl.gz"),
            *("--output", "out", "--max-tokens", "12", "--temperature", "0.5", "--top-p", "0.9"),
            *("--seed", "7", "--n", "2", "--proposer", "none", "--num-speculative-tokens", "3"),
            *("--precision", "bf16", "--max-num-seqs", "4", "--num-workers", "2", "--limit", "9"),
        ]
    )
    assert config.model == "hub/model"
    assert config.input == ("a.jsonl", "b.parquet", "s3://c/d.jsonl.gz")
    assert config.sampling == SamplingParams(max_tokens=12, temperature=0.5, top_p=0.9, n=2)
    assert (config.seed, config.data.limit, config.cluster.num_workers) == (7, 9, 2)
    assert (config.engine.proposer, config.engine.num_speculative_tokens) == ("none", 3)
    assert (config.engine.max_num_seqs, config.quant.precision) == (4, "bf16")


def leaves(model: Any, prefix: str = "") -> dict[str, Any]:
    """Every key of a configuration, dotted, with its value."""
    found: dict[str, Any] = {}
    for name, value in model:
        nested = hasattr(value, "model_fields_set")
        found |= leaves(value, f"{prefix}{name}.") if nested else {f"{prefix}{name}": value}
    return found


# A legal value for each key that differs from its default.
_OTHER = {
    "seed": 5,
    "data.share_duplicates": True,
    "sampling.temperature": 0.25,
    "sampling.top_p": 0.5,
    "sampling.top_k": 40,
    "sampling.min_p": 0.125,
    "sampling.max_tokens": 33,
    "sampling.min_tokens": 2,
    "sampling.stop": ("END",),
    "sampling.stop_token_ids": (4,),
    "sampling.seed": 6,
    "sampling.n": 3,
    "sampling.logprobs": 4,
    "sampling.repetition_penalty": 1.5,
    "sampling.presence_penalty": -0.5,
    "sampling.frequency_penalty": 0.75,
    "sampling.ignore_eos": True,
    "engine.max_num_seqs": 3,
    "engine.max_num_batched_tokens": 64,
    "engine.max_model_len": 128,
    "engine.proposer": "none",
    "engine.num_speculative_tokens": 2,
    "engine.draft_lengths": "fixed",
    "engine.suffix_pool_tokens": 0,
    "engine.prompt_lookup_max": 4,
    "engine.prompt_lookup_min": 2,
    "quant.precision": "float64",
    "quant.recipe": "smoothquant",
    "quant.alpha": 0.5,
    "quant.calibration": "texts.jsonl",
    "quant.num_calibration_samples": 7,
    "quant.max_calibration_tokens": 33,
    "quant.target_agreement": 0.9,
    "quant.max_float_bytes": 1000,
    "quant.head": "bf16",
    "quant.down_activations": "int16",
    "quant.embeddings": "int8",
    "resume": "never",
    "max_error_rate": 0.25,
    "data.limit": 10,
    "data.prompt_column": "question",
    "data.prompt_template": "Q: {{ prompt }}",
    "data.chat": True,
    "data.too_long": "truncate-left",
    "data.system_prompt": "Be brief.",
    "data.rows_per_shard": 32,
    "cluster.num_workers": 2,
    "cluster.num_cpus_per_worker": 1,
    "cluster.shards_per_worker": 2,
    "cluster.weights": "file",
    "cluster.device": "cuda",
    "cluster.workers": (WorkersConfig(num_workers=3, resources={"rack": 1}),),
    "cluster.max_restarts": 5,
    "cluster.max_attempts_per_row": 4,
}


def as_text(value: object) -> object:
    """The value on a command line; of several, the first."""
    if isinstance(value, tuple):
        return as_text(value[0])
    return f"[{value.model_dump_json()}]" if isinstance(value, WorkersConfig) else value


def test_every_key_is_a_dotted_flag() -> None:
    defaults = leaves(parse_run(NEEDED))
    keys = defaults.keys() - {"model", "input", "output"}
    assert keys - _OTHER.keys() == set(), "a new key: give it a value in _OTHER"
    for key in keys:
        value = _OTHER[key]
        text = as_text(value)
        flags = [f"--{key}"] if value is True else [f"--{key}", str(text)]
        changed = leaves(parse_run([*NEEDED, *flags]))
        assert changed[key] == value != defaults[key]
        assert {k for k in changed if changed[k] != defaults[k]} == {key}


@pytest.mark.parametrize("key", SHORTCUTS)
def test_a_shortcut_is_its_dotted_flag(key: str) -> None:
    value = [] if _OTHER[key] is True else [str(_OTHER[key])]
    assert parse_run([*NEEDED, f"--{SHORTCUTS[key]}", *value]) == parse_run(
        [*NEEDED, f"--{key}", *value]
    )


@pytest.mark.parametrize(
    "given",
    [
        ["--input", "a", "b", "c"],
        ["--input=a", "b", "c"],
        ["--input", "a", "--input", "b", "c"],
        ["--input", "a", "b", "--seed", "0", "--input=c"],
    ],
)
def test_several_inputs(given: list[str]) -> None:
    assert parse_run(["--model", "m", "--output", "o", *given]).input == ("a", "b", "c")


@pytest.mark.parametrize(
    "name", ["a b.jsonl", "a,b.jsonl", "é-ß-文.jsonl", "[a].jsonl", "{a}.jsonl", "a'b.jsonl"]
)
def test_odd_file_names(name: str) -> None:
    given = ["--model", "m", "--output", "o", "--input", name, "second.jsonl"]
    assert parse_run(given).input == (name, "second.jsonl")


@pytest.mark.parametrize("name", ['a"b.jsonl', "a\\b.jsonl"])
def test_file_names_with_quotes_and_backslashes(name: str) -> None:
    assert parse_run(["--model", "m", "--output", "o", "--input", name]).input == (name,)


@pytest.mark.parametrize("flag", ["--n", "--sampling.n"])
def test_n(flag: str) -> None:
    assert parse_run([*NEEDED, flag, "2"]).sampling.n == 2
    assert parse_run([*NEEDED, f"{flag}=3"]).sampling.n == 3


def test_stop_strings_by_flag() -> None:
    assert parse_run([*NEEDED, "--sampling.stop", "A", "--sampling.stop", "B"]).sampling.stop == (
        "A",
        "B",
    )
    assert parse_run([*NEEDED, '--sampling.stop=["x, y", "z"]']).sampling.stop == ("x, y", "z")


def test_a_file_below_flags_above_defaults(tmp_path: Path) -> None:
    text = "model: m\ninput: [a, b]\noutput: o\nsampling: {temperature: 0.5, top_k: 3}\nseed: 4\n"
    config = parse_run(["--config", write_yaml(tmp_path, text), "--temperature", "0.75"])
    assert config.input == ("a", "b")
    assert config.sampling == SamplingParams(temperature=0.75, top_k=3)
    assert (config.seed, config.sampling.max_tokens) == (4, 256)
    config = parse_run([f"--config={write_yaml(tmp_path, text)}", "--input", "c", "--seed", "0"])
    assert (config.input, config.seed, config.sampling.temperature) == (("c",), 0, 0.5)


def test_the_environment_has_no_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEED", "9")
    monkeypatch.setenv("MODEL", "other")
    config = parse_run(NEEDED)
    assert (config.seed, config.model) == (0, "m")


# arguments beside NEEDED -> what the message must name
MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "unknown flag": (["--no-such", "1"], ["--no-such"]),
    "unknown dotted flag": (["--sampling.topk", "1"], ["--sampling.topk"]),
    "unknown group": (["--decoding.top_k", "1"], ["--decoding.top_k"]),
    "abbreviated flag": (["--temp", "1"], ["--temp"]),
    "another's spelling": (["--max_tokens", "5"], ["--max_tokens"]),
    "negative temperature": (["--temperature", "-1"], ["sampling.temperature", "-1"]),
    "temperature is no number": (["--temperature", "warm"], ["sampling.temperature", "warm"]),
    "infinite temperature": (["--temperature", "inf"], ["sampling.temperature", "inf"]),
    "temperature NaN": (["--temperature", "nan"], ["sampling.temperature", "nan"]),
    "top_p 0": (["--top-p", "0"], ["sampling.top_p"]),
    "top_p above 1": (["--top-p", "1.01"], ["sampling.top_p"]),
    "wrong proposer": (["--proposer", "oracle"], ["engine.proposer", "oracle", "ngram"]),
    "wrong precision": (["--precision", "fp3"], ["quant.precision", "fp3", "w8a8"]),
    "max_tokens 0": (["--max-tokens", "0"], ["sampling.max_tokens"]),
    "max_tokens a fraction": (["--max-tokens", "1.5"], ["sampling.max_tokens", "1.5"]),
    "n 0": (["--n", "0"], ["sampling.n"]),
    "negative seed": (["--seed", "-1"], ["seed", "-1"]),
    "limit 0": (["--limit", "0"], ["data.limit"]),
    "no workers": (["--num-workers", "0"], ["cluster.num_workers"]),
    "two mistakes": (["--n", "0", "--top-p", "2"], ["sampling.n", "sampling.top_p"]),
    "min above max": (["--max-tokens", "2", "--sampling.min_tokens", "3"], ["min_tokens", "3"]),
    "lookup turned round": (["--engine.prompt_lookup_min", "9"], ["prompt_lookup_min"]),
    "negative draft length": (
        ["--num-speculative-tokens", "-1"],
        ["engine.num_speculative_tokens"],
    ),
    "config file missing": (["--config", "no/such.yaml"], ["no/such.yaml"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, named = MISTAKES[name]
    assert_refused([*NEEDED, *arguments], named, capsys)


def assert_refused(
    arguments: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one line that holds every name."""
    assert main(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1, captured.err
    for word in named:
        assert word in captured.err


@pytest.mark.parametrize("left_out", ["--model", "--input", "--output"])
def test_what_is_missing_is_named(left_out: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = NEEDED.index(left_out)
    arguments = [*NEEDED[:at], *NEEDED[at + 2 :]]
    assert_refused(arguments, [f"{left_out[2:]} is missing"], capsys)


def test_input_without_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(["--model", "m", "--output", "o", "--input"], ["input is missing"], capsys)


# text of the file -> what the message must name
BAD_FILES: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("modell: m\n", ["modell"]),
    "unknown nested key": ("sampling: {temprature: 1}\n", ["sampling.temprature"]),
    "dotted key": ("sampling.temperature: 1\n", ["sampling.temperature"]),
    "unknown group": ("decoding: {top_k: 1}\n", ["decoding"]),
    "negative temperature": ("sampling: {temperature: -1}\n", ["sampling.temperature", "-1"]),
    "NaN": ("sampling: {temperature: .nan}\n", ["sampling.temperature"]),
    "wrong enum": ("quant: {precision: fp3}\n", ["quant.precision", "fp3"]),
    "a group that is null": ("sampling: null\n", ["sampling"]),
    "a group that is a list": ("sampling: [1]\n", ["sampling"]),
    "empty": ("", ["run.yaml"]),
    "a list": ("- a\n", ["run.yaml"]),
    "not YAML": ("a: [\n", ["run.yaml"]),
    "a tag that runs code": ("model: !!python/object/apply:os.getcwd []\n", ["run.yaml"]),
    "a key that is no name": ("1: 2\n", ["1"]),
    "a nested key that is no name": ("sampling: {1: 2}\n", ["sampling.1"]),
    "not UTF-8": ("model: \udcff\n", ["run.yaml"]),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_mistake_in_the_file_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, named = BAD_FILES[name]
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert_refused([*NEEDED, "--config", str(path)], named, capsys)


def test_the_resolved_config_is_the_same_run_again(tmp_path: Path) -> None:
    flags = []
    others = {key: value for key, value in _OTHER.items() if key != "cluster.workers"}  # Or these.
    for key, value in others.items():
        text = as_text(value)
        flags += [f"--{key}"] if value is True else [f"--{key}", str(text)]
    config = parse_run([*NEEDED, "--input", "é b.jsonl", *flags])
    again = parse_run(["--config", write_yaml(tmp_path, config.to_yaml())])
    assert again == config
    assert again.digest() == config.digest()
    plain = parse_run(NEEDED)
    assert parse_run(["--config", write_yaml(tmp_path, plain.to_yaml())]) == plain
    assert yaml.safe_load(plain.to_yaml())["sampling"]["temperature"] == 0


def test_frozen() -> None:
    config = parse_run(NEEDED)
    for model in (config, config.sampling, config.engine, config.quant, config.data):
        for name in type(model).model_fields:
            with pytest.raises(ValidationError, match="frozen"):
                setattr(model, name, None)


def test_identity_leaves_out_what_changes_only_the_time() -> None:
    config = parse_run(NEEDED)
    timing = {
        *("engine.max_num_seqs", "engine.max_num_batched_tokens", "engine.proposer"),
        *("engine.num_speculative_tokens", "engine.prompt_lookup_max"),
        *("engine.draft_lengths", "engine.suffix_pool_tokens"),
        *("engine.prompt_lookup_min", "cluster.num_workers"),
        *(
            "cluster.num_cpus_per_worker",
            "cluster.shards_per_worker",
            "cluster.weights",
            "output",
            "resume",
            *("max_error_rate", "cluster.max_restarts", "cluster.max_attempts_per_row"),
            "cluster.device",
            "cluster.workers",
        ),
    }
    elsewhere = {"model", "input"}  # Told apart by their content, in the plan.
    assert config.identity().keys() == leaves(config).keys() - timing - elsewhere
    for key, value in _OTHER.items():
        text = as_text(value)
        flags = [f"--{key}"] if value is True else [f"--{key}", str(text)]
        changed = parse_run([*NEEDED, *flags])
        assert (changed.digest() == config.digest()) == (key in timing), key


def test_help_of_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "generate" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    for flag in ("--model", "--input", "--output", "--config", "--max-tokens", "--sampling.top_k"):
        assert flag in shown, flag


@pytest.mark.parametrize("arguments", [[], ["no-such-command"]])
def test_no_such_command(arguments: list[str]) -> None:
    assert main(arguments) == 2


def test_run_config_refuses_unknown_keys_by_itself() -> None:
    with pytest.raises(ValidationError):
        RunConfig.model_validate({"model": "m", "input": ["a"], "output": "o", "extra": 1})
    with pytest.raises(InputError):
        parse_run([*NEEDED, "--extra", "1"])
