"""`python -m jobs quantize`: the folder it writes, what it says, and every mistake in one line."""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs.__main__ import main
from jobs.cli import parse_quantize
from pipeline.admission import load_tokenizer
from pipeline.config import QuantizeConfig
from pipeline.errors import InputError
from tests.conftest import ROOT, run_jobs
from tests.tiny import edit_config, load_model, num_threads, prefill, reference_logits
from workers.model import TargetModel

LINEARS = {
    f"model.layers.{layer}.{name}"
    for layer in range(3)
    for name in (
        *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
        *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    )
}
MAX_TOKENS = 8
EIGHT_TEXTS = ("--num-calibration-samples", 8, "--quant.max_calibration_tokens", 48)
Report = dict[str, Any]


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_json(path: Path) -> Report:
    content: Report = json.loads(path.read_text(encoding="utf-8"))
    return content


def printed(result: CompletedProcess[str]) -> dict[str, str]:
    """The report's lines by their labels."""
    pairs = (re.match(r" *(\S.*?)  (\S.*)$", line) for line in result.stdout.splitlines())
    return {pair[1]: pair[2] for pair in pairs if pair}


def run_here(
    *arguments: object, cwd: Path | None = None, **environment: str
) -> CompletedProcess[str]:
    """`python -m jobs ...` in this process, which has what takes seconds to import."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd or ROOT)
        for name, value in environment.items():
            patch.setenv(name, value)
        code = main([*map(str, arguments)])
    return CompletedProcess([], code, out.getvalue(), err.getvalue())


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


Quantized = tuple[Path, CompletedProcess[str]]


@pytest.fixture(scope="module")
def quantized(
    tiny_checkpoint: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Quantized]:
    """The tiny model by a recipe on 8 texts, and what the command said; each made once."""
    made: dict[str, Quantized] = {}
    folder = tmp_path_factory.mktemp("quantized")

    def make(recipe: str) -> Quantized:
        if recipe not in made:
            given = ("--recipe", recipe, *EIGHT_TEXTS)
            output = folder / "below" / recipe  # Folders on the way are made.
            flags = ("--model", tiny_checkpoint, "--output", output, *given)
            made[recipe] = output, run_here("quantize", *flags, QUASAR_CACHE=str(cache))
        return made[recipe]

    return make


@pytest.mark.parametrize("recipe", ["rtn", "smoothquant", "m2"])
def test_the_folder(
    quantized: Callable[[str], Quantized], recipe: str, tiny_checkpoint: Path
) -> None:
    output, result = quantized(recipe)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    names = {path.name for path in tiny_checkpoint.iterdir()}
    assert {path.name for path in output.iterdir()} == {*names, "quasar.json"}
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (output / name).read_bytes() == (tiny_checkpoint / name).read_bytes()
    assert {path.name for path in output.parent.iterdir()} <= {"rtn", "smoothquant", "m2"}
    source = load_file(tiny_checkpoint / "model.safetensors")
    tensors = load_file(output / "model.safetensors")
    scales = {f"{linear}.weight_scale" for linear in LINEARS}
    assert tensors.keys() == {*source, *scales}
    for linear in LINEARS:
        assert tensors[f"{linear}.weight"].dtype == torch.int8
        assert tensors[f"{linear}.weight_scale"].shape == (len(source[f"{linear}.weight"]), 1)
    for name in ("lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"):
        assert torch.equal(tensors[name], source[name])
    config = read_json(output / "config.json")
    scheme = config.pop("quantization_config")
    assert config == read_json(tiny_checkpoint / "config.json")
    assert scheme["quant_method"] == "compressed-tensors"
    assert scheme["ignore"] == ["lm_head"]


def test_round_to_nearest_by_loops(
    quantized: Callable[[str], Quantized], tiny_checkpoint: Path
) -> None:
    source = load_file(tiny_checkpoint / "model.safetensors")
    tensors = load_file(quantized("rtn")[0] / "model.safetensors")
    for linear in ("model.layers.0.self_attn.k_proj", "model.layers.2.mlp.down_proj"):
        weight, codes = source[f"{linear}.weight"], tensors[f"{linear}.weight"]
        scales = tensors[f"{linear}.weight_scale"][:, 0].tolist()
        for row, code, scale in zip(weight.tolist(), codes.tolist(), scales, strict=True):
            assert scale == pytest.approx(max(map(abs, row)) / 127, rel=1e-6)
            assert max(map(abs, code)) == 127
            for x, c in zip(row, code, strict=True):
                assert abs(x / scale - c) < 0.5001
    gains = {name for name in source if name.endswith("norm.weight")}
    assert len(gains) == 7
    assert all(torch.equal(tensors[name], source[name]) for name in gains)


@pytest.mark.parametrize("recipe", ["rtn", "smoothquant", "m2"])
def test_what_is_printed(quantized: Callable[[str], Quantized], recipe: str) -> None:
    output, result = quantized(recipe)
    report = read_json(output / "quasar.json")
    lines = printed(result)
    assert list(lines) == ["recipe", "int8", "in bf16", "fidelity", "digest", "time", "output"]
    assert lines["recipe"] == recipe == report["recipe"]["recipe"]
    assert lines["int8"].startswith("100.0%")
    assert lines["in bf16"].startswith("none of the linears")
    assert lines["digest"] == report["digest"]
    assert lines["output"] == str(output)
    assert re.fullmatch(r"\d+ s", lines["time"])
    measured = report["fidelity_on_calibration_texts"]
    if recipe == "rtn":
        assert measured is None
        assert lines["fidelity"] == "not measured (no calibration)"
        assert "calibrating" not in result.stderr
        return
    agreement = (
        f"{measured['top1_agreement']:.2%} ± {measured['top1_agreement_standard_error']:.2%}"
    )
    assert f"{agreement} of first choices" in lines["fidelity"]
    assert f"mean KL {measured['mean_kl']:.5f}" in lines["fidelity"]
    assert f"({measured['num_tokens']} tokens" in lines["fidelity"]
    assert 0.9 < measured["top1_agreement"] < 1
    assert 0 < measured["mean_kl"] < 0.01
    # The first eight of the shipped texts all have 48 bytes or more.
    assert report["calibration"] == {"num_texts": 8, "num_tokens": 384}
    assert "calibrating on 384 tokens of 8 texts" in result.stderr.splitlines()


def test_recipes_differ(quantized: Callable[[str], Quantized]) -> None:
    folders = [quantized(recipe)[0] for recipe in ("rtn", "smoothquant", "m2")]
    assert len({read_json(folder / "quasar.json")["digest"] for folder in folders}) == 3
    assert len({(folder / "model.safetensors").read_bytes() for folder in folders}) == 3


@pytest.mark.parametrize("recipe", ["rtn", "smoothquant", "m2"])
def test_the_model_is_still_the_same(
    quantized: Callable[[str], Quantized], recipe: str, tiny_checkpoint: Path
) -> None:
    """Against transformers: close to the original, though not equal to it."""
    prompt = load_tokenizer(tiny_checkpoint)(
        "Smoothing is folded into norms and weights, and no output moves."
    )["input_ids"]
    with num_threads(1):
        expected = reference_logits(tiny_checkpoint, [prompt])[0].log_softmax(-1)
        got = prefill(load_model(quantized(recipe)[0]), prompt).float().log_softmax(-1)
    kl_T = (expected.exp() * (expected - got)).sum(-1)
    assert 1e-6 < kl_T.mean() < 2e-3


def test_calibrated_weights_stay_in_the_cache(
    quantized: Callable[[str], Quantized], cache: Path
) -> None:
    for recipe in ("rtn", "smoothquant", "m2"):
        quantized(recipe)
    folders = sorted((cache / "weights").iterdir())
    digests = [
        read_json(quantized(r)[0] / "quasar.json")["digest"][:32] for r in ("smoothquant", "m2")
    ]
    assert sorted(folder.name for folder in folders) == sorted(digests)  # No rest of a partial one.
    output = quantized("m2")[0]
    for path in (cache / "weights" / digests[1]).iterdir():
        assert path.read_bytes() == (output / path.name).read_bytes()


def test_the_cache_is_used(
    quantized: Callable[[str], Quantized], tiny_checkpoint: Path, cache: Path, tmp_path: Path
) -> None:
    """A second run takes what the first one made: here, made recognizable."""
    mine = tmp_path / "cache"
    shutil.copytree(cache, mine)
    digest = read_json(quantized("m2")[0] / "quasar.json")["digest"]
    path = mine / "weights" / digest[:32] / "quasar.json"
    path.write_text(json.dumps(read_json(path) | {"mark": 1}), encoding="utf-8")
    output = tmp_path / "out"
    output.mkdir()  # An empty folder will do.
    flags = ("--model", tiny_checkpoint, "--output", output, *EIGHT_TEXTS)
    result = run_here("quantize", *flags, QUASAR_CACHE=str(mine))
    assert result.returncode == 0, result.stderr
    assert read_json(output / "quasar.json")["mark"] == 1
    assert printed(result)["digest"] == digest


def test_a_cache_that_cannot_be_written(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file", encoding="utf-8")
    texts = write_rows(tmp_path / "texts.jsonl", [{"prompt": "some text"}, {"prompt": "more"}])
    flags = ("--model", tiny_checkpoint, "--output", "out", "--recipe", "smoothquant")
    given = ("--calibration", texts, "--num-calibration-samples", 2)
    environment = {"QUASAR_CACHE": str(tmp_path / "cache"), "TMPDIR": str(tmp_path)}
    result = run_jobs("quantize", *flags, *given, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    assert "so the weights are not kept" in result.stderr
    assert printed(result)["output"] == str(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"cache", "texts.jsonl", "out"}
    assert read_json(tmp_path / "out" / "quasar.json")["calibration"]["num_texts"] == 2


def greedy(model: TargetModel, prompt: list[int], max_tokens: int) -> list[int]:
    """The answer, the whole text computed anew for every token of it."""
    text = list(prompt)
    while len(text) < len(prompt) + max_tokens:
        text.append(int(prefill(model, text)[-1].argmax()))
        if text[-1] == 256:  # EOS
            break
    return text[len(prompt) :]


@pytest.mark.ray
def test_generate_runs_the_folder(quantized: Callable[[str], Quantized], tmp_path: Path) -> None:
    model = quantized("m2")[0]
    prompts = ["one two three", "four"]
    write_rows(tmp_path / "in.jsonl", [{"prompt": prompt} for prompt in prompts])
    flags = ("--model", model, "--input", "in.jsonl", "--output", "out", "--max-tokens", 12)
    environment = {"QUASAR_CACHE": str(tmp_path / "cache")}
    result = run_jobs("generate", *flags, cwd=tmp_path, **environment)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    assert "m2" in printed(result)["weights"]
    parts = sorted((tmp_path / "out" / "data").glob("*.parquet"))
    rows = [row for part in parts for row in pq.read_table(part).to_pylist()]
    with num_threads(1):
        loaded = load_model(model)
        tokens = [load_tokenizer(model)(prompt)["input_ids"] for prompt in prompts]
        expected = [greedy(loaded, prompt, 12) for prompt in tokens]
    assert [row["error"] for row in rows] == [None, None]
    assert [row["generated_tokens"] for row in rows] == expected


Edit = Callable[[Path], None]


def with_nan(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = math.nan
    save_file(tensors, path, metadata={"format": "pt"})


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def of_unknown_family(folder: Path) -> None:
    edit_config(folder, model_type="mamba")


def in_eight_bits(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, path, metadata={"format": "pt"})


def without_heads(folder: Path) -> None:
    edit_config(folder, num_attention_heads=0)


def of_wordy_width(folder: Path) -> None:
    edit_config(folder, hidden_size="big")


def without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_refusal(
    folder: Path, flags: Sequence[object], words: Sequence[str], *, may_say: Sequence[str] = ()
) -> None:
    """Exit code 2, one line that holds `words`, and the folder as it was; the cache is in it."""
    before, had_output = files_below(folder), (folder / "out").exists()
    environment = {"QUASAR_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    result = run_here("quantize", *flags, cwd=folder, **environment)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[-1].startswith("error: ")
    assert all(line.startswith(("error: ", *may_say)) for line in lines), result.stderr
    assert sum(line.startswith("error: ") for line in lines) == 1
    for word in words:
        assert word in lines[-1]
    assert files_below(folder) == before
    assert (folder / "out").exists() == had_output
    assert list(folder.rglob("*.partial")) == []


@pytest.mark.parametrize(
    ("recipe", "edit", "words"),
    [
        ("rtn", with_nan, ["model.layers.1.mlp.up_proj.weight", "NaN"]),
        ("smoothquant", with_nan, ["model.layers.1.mlp.up_proj.weight", "NaN"]),
        ("rtn", truncated, ["model.safetensors", "damaged"]),
        ("m2", of_unknown_family, ["mamba", "llama"]),
        ("rtn", in_eight_bits, ["model.layers.1.mlp.up_proj.weight", "float8", "not supported"]),
        ("m2", without_heads, ["config.json", "zero"]),
        ("m2", of_wordy_width, ["config.json", "hidden_size"]),
        ("m2", without_tokenizer, ["tokenizer"]),
    ],
)
def test_models_that_cannot_be_used(
    tiny_checkpoint: Path, recipe: str, edit: Edit, words: list[str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_checkpoint, model)
    edit(model)
    texts = write_rows(tmp_path / "texts.jsonl", [{"prompt": "some text"}, {"prompt": "more"}])
    flags = ("--model", model, "--output", "out", "--recipe", recipe, "--calibration", texts)
    given = ("--num-calibration-samples", 2)
    check_refusal(
        tmp_path, [*flags, *given], [str(model), *words], may_say=("calibrating on ", "layer 1")
    )


@pytest.mark.parametrize("model", ["/no/such/model", "./none", "no-such/model", "file.txt"])
def test_models_that_are_not_there(model: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("", encoding="utf-8")
    check_refusal(tmp_path, ["--model", model, "--output", "out"], [model])


def test_a_model_that_is_quantized_already(
    quantized: Callable[[str], Quantized], tmp_path: Path
) -> None:
    model = quantized("rtn")[0]
    words = [str(model), "already quantized"]
    check_refusal(tmp_path, ["--model", model, "--output", "out"], words)


def test_an_output_that_is_taken(tiny_checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious.txt").write_text("data", encoding="utf-8")
    (tmp_path / "file").write_text("data", encoding="utf-8")
    flags = ("--model", tiny_checkpoint, "--recipe", "rtn", "--output")
    check_refusal(tmp_path, [*flags, "out"], ["output out", "not empty"])
    check_refusal(tmp_path, [*flags, "file"], ["output file", "a file"])
    check_refusal(tmp_path, [*flags, "s3://bucket/w8a8"], ["s3://bucket/w8a8", "this machine"])


def test_what_a_killed_process_left_is_removed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    left, at_work = tmp_path / ".out.12345678.partial", tmp_path / ".out.87654321.partial"
    for folder in (left, at_work):
        folder.mkdir()
        (folder / "model-00001.safetensors").write_bytes(b"x")
    long_ago = time.time() - 7200
    os.utime(left, (long_ago, long_ago))
    flags = ("--model", tiny_checkpoint, "--recipe", "rtn", "--output", "out")
    assert run_here("quantize", *flags, cwd=tmp_path).returncode == 0
    assert not left.exists()
    assert at_work.exists()


def test_prompts_too_long_to_measure_on_are_refused_first(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_rows(tmp_path / "held.jsonl", [{"prompt": "short"}, {"prompt": "long " * 400}])
    flags = ["--model", tiny_checkpoint, "--output", "out", "--recipe", "rtn"]
    words = ["held.jsonl: line 2", "tokens"]
    check_refusal(
        tmp_path, [*flags, "--evaluate", "held.jsonl"], words, may_say=("[transformers] Token",)
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--calibration", "empty.jsonl"], ["empty.jsonl", "0 calibration texts"]),
        (
            ["--calibration", "texts.jsonl", "--num-calibration-samples", 3],
            ["texts.jsonl", "2 calibration texts", "3 are asked for"],
        ),
        (["--num-calibration-samples", 129], ["calibration.jsonl", "128", "129"]),
        (["--calibration", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--calibration", "none.jsonl", "--recipe", "rtn"], ["none.jsonl", "no such file"]),
        (["--calibration", "bad.jsonl"], ["bad.jsonl: line 2", "bad JSON"]),
        (["--evaluate", "texts.jsonl", "none.jsonl"], ["none.jsonl", "no such file"]),
        (["--evaluate", "texts.docx"], ["texts.docx", "format"]),
    ],
)
def test_files_that_cannot_be_used(
    tiny_checkpoint: Path, flags: list[object], words: list[str], tmp_path: Path
) -> None:
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a b"}\n{"prompt": "a', encoding="utf-8")
    write_rows(tmp_path / "texts.jsonl", [{"prompt": "some text"}, {"prompt": "more"}])
    model = ["--model", tiny_checkpoint, "--output", "out"]
    # Texts longer than the tiny model reads are announced by transformers.
    check_refusal(tmp_path, [*model, *flags], words, may_say=("[transformers] Token indices",))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--no-such-flag", "1"], ["no-such-flag"]),
        (["--temperature", "1"], ["temperature"]),
        (["--quant.recipy", "m2"], ["recipy"]),
        (["--alpha", "1.5"], ["quant.alpha", "1.5"]),
        (["--alpha", "-0.1"], ["quant.alpha", "-0.1"]),
        (["--recipe", "gptq"], ["quant.recipe", "gptq"]),
        (["--recipe", "rtn", "--alpha", "0.5"], ["quant", "alpha", "rtn"]),
        (["--target-agreement", "0"], ["quant.target_agreement"]),
        (["--max-float-bytes", "-1"], ["quant.max_float_bytes"]),
        (["--num-calibration-samples", "0"], ["quant.num_calibration_samples"]),
        (["--num-evaluation-samples", "0"], ["num_evaluation_samples"]),
        (["--max-tokens", "1"], ["max_tokens"]),
        (["--quant.precision", "bf16"], ["quant", "w8a8"]),
        (["--config", "none.yaml"], ["none.yaml", "no such file"]),
    ],
)
def test_flags_that_are_wrong(
    flags: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["quantize", "--model", "m", "--output", "out", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert all(word in line for word in words), line
    assert list(tmp_path.iterdir()) == []


def test_flags_that_are_wrong_as_a_user_types_them(tiny_checkpoint: Path, tmp_path: Path) -> None:
    model = ["--model", tiny_checkpoint, "--output", "out"]
    check_refusal(tmp_path, [*model, "--alpha", 2], ["quant.alpha", "2"])
    check_refusal(tmp_path, [*model, "--alpah", 0.5], ["alpah"])
    check_refusal(tmp_path, model[:2], ["output"])


def group_of(linear: str) -> str:
    name = linear.rpartition(".")[2].removesuffix("_proj")
    return {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "gate_up", "up": "gate_up"}.get(name, name)


def test_linears_that_stay_in_bf16(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """20480 bytes: by their sizes o takes 8192, down 12288, qkv 16384 and gate_up 24576."""
    output = tmp_path / "out"
    flags = ("--model", tiny_checkpoint, "--output", output, "--recipe", "rtn")
    given = ("--num-calibration-samples", 4, "--max-float-bytes", 20480)
    result = run_here("quantize", *flags, *given, QUASAR_CACHE=str(tmp_path / "cache"))
    assert result.returncode == 0, result.stderr
    report, lines = read_json(output / "quasar.json"), printed(result)
    sizes = {"qkv": 8192, "o": 4096, "gate_up": 12288, "down": 6144}
    chosen, left = set(), 20480
    ranked = sorted(
        report["relative_errors"], key=lambda e: e["stream"] / sizes[e["linears"]], reverse=True
    )
    for error in ranked:
        if 2 * sizes[error["linears"]] <= left:
            left -= 2 * sizes[error["linears"]]
            chosen.add((error["layer"], error["linears"]))
    assert chosen
    kept = {name for name in LINEARS if (int(name.split(".")[2]), group_of(name)) in chosen}
    assert set(report["float_linears"]) == kept
    assert len(report["float_linears"]) == len(kept)
    assert lines["in bf16"] == ", ".join(report["float_linears"])
    share = 1 - sum(sizes[group] for _, group in chosen) / (3 * sum(sizes.values()))
    assert report["int8_share_of_linears"] == pytest.approx(share)
    assert lines["int8"].startswith(f"{share:.1%}")
    scheme = read_json(output / "config.json")["quantization_config"]
    assert set(scheme["ignore"]) == {"lm_head", *kept}
    source = load_file(tiny_checkpoint / "model.safetensors")
    tensors = load_file(output / "model.safetensors")
    for linear in LINEARS:
        tensor = tensors[f"{linear}.weight"]
        assert tensor.dtype == (torch.bfloat16 if linear in kept else torch.int8)
        assert (f"{linear}.weight_scale" in tensors) == (linear not in kept)
        if linear in kept:
            assert torch.equal(tensor, source[f"{linear}.weight"].bfloat16())


Evaluated = tuple[Path, CompletedProcess[str], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def evaluated(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Evaluated:
    """A conversion measured on two files; the rows of them that count."""
    folder = tmp_path_factory.mktemp("evaluated")
    with num_threads(1):
        model = load_model(tiny_checkpoint, precision="bf16")
        tokenizer = load_tokenizer(tiny_checkpoint)
        found: dict[str, str] = {}
        for i in range(200):
            prompt = f"What is {i} + {i * i}?"
            text = tokenizer.decode(greedy(model, tokenizer(prompt)["input_ids"], MAX_TOKENS))
            if numbers := re.findall(r"\d+", text):
                found[prompt] = numbers[-1]
            if len(found) == 2:
                break
    assert len(found) == 2, "no answer of the tiny model holds a number; take other prompts"
    right = [{"prompt": prompt, "answer": f"#### {n}"} for prompt, n in found.items()]
    first = [*right, {"prompt": "One?", "answer": "123456789"}, {"prompt": "Not measured."}]
    second = [
        {"messages": [{"role": "user", "content": "hi"}], "task": "chat"},
        {"prompt": "Two?", "answer": "987654321", "task": "sums"},
    ]
    files = write_rows(folder / "a.jsonl", first), write_rows(folder / "b.jsonl", second)
    flags = ("--model", tiny_checkpoint, "--output", folder / "out", "--recipe", "rtn")
    given = ("--max-tokens", MAX_TOKENS, "--num-evaluation-samples", 3)
    environment = {"QUASAR_CACHE": str(folder / "cache"), "COLUMNS": "120"}
    result = run_here("quantize", *flags, *given, "--evaluate", *files, **environment)
    return folder / "out", result, [*first[:3], *second]


def tokens_of(row: dict[str, Any], tokenizer: Any) -> list[int]:
    """A token a byte, and the chat template's specials where there are roles."""
    chat = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    tokens: list[int] = tokenizer(row.get("prompt") or chat)["input_ids"]
    return tokens


def naive_fidelity(
    reference: list[torch.Tensor], got: list[torch.Tensor], following: list[list[int]]
) -> dict[str, float]:
    ref_TV = torch.cat(reference).double().log_softmax(-1)
    got_TV = torch.cat(got).double().log_softmax(-1)
    next_T = torch.tensor([token for tokens in following for token in tokens])
    rows = torch.arange(len(next_T))
    kl_T = (ref_TV.exp() * (ref_TV - got_TV)).sum(-1)
    agrees_T = ref_TV.argmax(-1) == got_TV.argmax(-1)
    nll = [float(-logits_TV[rows, next_T].mean()) for logits_TV in (ref_TV, got_TV)]
    return {
        "num_tokens": len(next_T),
        "num_flips": int((~agrees_T).sum()),
        "top1_agreement": float(agrees_T.double().mean()),
        "mean_kl": float(kl_T.mean()),
        "perplexity_ratio": math.exp(nll[1] - nll[0]),
    }


def test_evaluation_against_transformers(evaluated: Evaluated, tiny_checkpoint: Path) -> None:
    """The same numbers, from greedy answers without an engine and logits without our float32."""
    output, result, rows = evaluated
    assert result.returncode == 0, result.stderr
    report = read_json(output / "fidelity.json")
    assert list(report["fidelity"]) == ["bf16", "w8a8"]
    tokenizer = load_tokenizer(tiny_checkpoint)
    prompts = [tokens_of(row, tokenizer) for row in rows]
    with num_threads(1):
        models = {
            "bf16": load_model(tiny_checkpoint, precision="bf16"),
            "w8a8": load_model(output),
        }
        answers = [greedy(models["bf16"], prompt, MAX_TOKENS) for prompt in prompts]
        texts = [[*p, *a] for p, a in zip(prompts, answers, strict=True)]
        cuts = [slice(len(prompt) - 1, -1) for prompt in prompts]
        reference = reference_logits(tiny_checkpoint, texts)
        reference = [logits[cut] for logits, cut in zip(reference, cuts, strict=True)]
        for name, model in models.items():
            got = [prefill(model, t)[cut].float() for t, cut in zip(texts, cuts, strict=True)]
            expected = naive_fidelity(reference, got, answers)
            measured = report["fidelity"][name]
            assert measured["num_tokens"] == expected["num_tokens"] <= 5 * MAX_TOKENS
            assert measured["num_flips"] == expected["num_flips"]
            assert measured["top1_agreement"] == pytest.approx(expected["top1_agreement"])
            assert measured["mean_kl"] == pytest.approx(expected["mean_kl"], rel=0.02, abs=2e-7)
            ratio = expected["perplexity_ratio"]
            assert measured["perplexity_ratio"] == pytest.approx(ratio, abs=1e-5)
    kls = [report["fidelity"][name]["mean_kl"] for name in ("bf16", "w8a8")]
    assert 0 < kls[0] < kls[1]


def test_evaluation_grades_each_models_own_answers(
    evaluated: Evaluated, tiny_checkpoint: Path
) -> None:
    output, _, rows = evaluated
    graded = read_json(output / "fidelity.json")["exact_match"]
    assert graded.keys() == {"a.jsonl", "sums"}  # The chat carries nothing to tell by.
    tokenizer = load_tokenizer(tiny_checkpoint)
    with num_threads(1):
        for name, model in (
            ("bf16", load_model(tiny_checkpoint, precision="bf16")),
            ("w8a8", load_model(output)),
        ):
            num_right = 0
            for row in rows[:3]:
                text = tokenizer.decode(greedy(model, tokens_of(row, tokenizer), MAX_TOKENS))
                numbers = re.findall(r"\d+", text)
                num_right += numbers[-1:] == re.findall(r"\d+", row["answer"])
            assert graded["a.jsonl"][name]["num_right"] == num_right
            assert graded["a.jsonl"][name]["num_graded"] == 3
            assert graded["sums"][name]["num_right"] == 0
            # Wilson: none of one is from 0 to 3.8416 / 4.8416.
            interval = graded["sums"][name]["confidence_interval"]
            assert interval == pytest.approx([0, 0.79346], abs=1e-5)
    assert graded["a.jsonl"]["bf16"]["num_right"] == 2


def test_evaluation_is_shown(evaluated: Evaluated) -> None:
    output, result, _ = evaluated
    report = read_json(output / "fidelity.json")
    assert [Path(uri).name for uri in report["texts"]] == ["a.jsonl", "b.jsonl"]
    assert "measuring on 5 prompts, 8 tokens each" in result.stderr.splitlines()
    cells = [re.split(r"\s*[│┃]\s*", line) for line in result.stdout.splitlines()]
    table = {row[1]: row[2:4] for row in cells if len(row) == 5}
    assert table[""] == ["bf16", "w8a8"]
    measured = [report["fidelity"][name] for name in ("bf16", "w8a8")]
    assert table["tokens"] == [str(m["num_tokens"]) for m in measured]
    assert table["mean KL"] == [f"{m['mean_kl']:.5f}" for m in measured]
    assert table["perplexity ratio"] == [f"{m['perplexity_ratio']:.4f}" for m in measured]
    agreements = [cell.split(" ± ")[0] for cell in table["top-1 agreement"]]
    assert agreements == [f"{m['top1_agreement']:.2%}" for m in measured]
    assert table["a.jsonl right (95 % interval)"][0].startswith("2 of 3 (")
    assert table["sums right (95 % interval)"] == ["0 of 1 (0% to 79%)"] * 2
    assert str(output / "fidelity.json") in result.stdout.replace("\n", "")
    assert printed(result)["recipe"] == "rtn"


NEEDED = ("--model", "m", "--output", "out")


def test_parse_defaults() -> None:
    config = parse_quantize(NEEDED)
    assert config == QuantizeConfig(model="m", output="out")
    assert (config.evaluate, config.num_evaluation_samples, config.max_tokens) == ((), 32, 64)
    quant = config.quant
    assert (quant.precision, quant.recipe, quant.alpha, quant.calibration) == (
        *("w8a8", "m2", None, None),
    )
    assert (quant.target_agreement, quant.max_float_bytes) == (None, None)


@pytest.mark.parametrize(
    ("flag", "given", "key", "value"),
    [
        ("recipe", "smoothquant", "quant.recipe", "smoothquant"),
        ("alpha", "0.625", "quant.alpha", 0.625),
        ("calibration", "s3://b/c,d.jsonl.gz", "quant.calibration", "s3://b/c,d.jsonl.gz"),
        ("num-calibration-samples", "9", "quant.num_calibration_samples", 9),
        ("target-agreement", "0.75", "quant.target_agreement", 0.75),
        ("max-float-bytes", "1000000", "quant.max_float_bytes", 1000000),
        ("num-evaluation-samples", "7", "num_evaluation_samples", 7),
        ("max-tokens", "11", "max_tokens", 11),
        ("quant.max_calibration_tokens", "33", "quant.max_calibration_tokens", 33),
    ],
)
def test_parse_a_flag_in_both_spellings(flag: str, given: str, key: str, value: Any) -> None:
    config = parse_quantize([*NEEDED, f"--{flag}", given])
    assert config == parse_quantize([*NEEDED, f"--{key}", given])
    assert config == parse_quantize([*NEEDED, f"--{flag}={given}"])
    expected = QuantizeConfig(model="m", output="out").model_dump()
    target = expected["quant"] if key.startswith("quant.") else expected
    assert target[key.removeprefix("quant.")] != value
    target[key.removeprefix("quant.")] = value
    assert config.model_dump() == expected


@pytest.mark.parametrize(
    "given",
    [
        ["--evaluate", "a,1.jsonl", "b.jsonl", "[c].parquet"],
        ["--evaluate=a,1.jsonl", "b.jsonl", "[c].parquet"],
        ["--evaluate", "a,1.jsonl", "--evaluate", "b.jsonl", "[c].parquet"],
        ["--evaluate", "a,1.jsonl", "b.jsonl", "--alpha", "0.5", "--evaluate=[c].parquet"],
    ],
)
def test_parse_several_files_to_evaluate_on(given: list[str]) -> None:
    for arguments in ([*NEEDED, *given], [*given, *NEEDED]):
        assert parse_quantize(arguments).evaluate == ("a,1.jsonl", "b.jsonl", "[c].parquet")


def test_parse_a_file(tmp_path: Path) -> None:
    path = tmp_path / "quantize.yaml"
    path.write_text(
        "model: m\noutput: out\nevaluate: one.jsonl\nmax_tokens: 5\n"
        "quant:\n  recipe: smoothquant\n  alpha: 0.5\n",
        encoding="utf-8",
    )
    config = parse_quantize(["--config", str(path)])
    assert (config.model, config.evaluate, config.max_tokens) == ("m", ("one.jsonl",), 5)
    assert (config.quant.recipe, config.quant.alpha) == ("smoothquant", 0.5)
    # Flags win, key by key.
    given = ["--alpha", "0.25", "--evaluate", "a.jsonl", "b.jsonl", "--max-tokens", "6"]
    config = parse_quantize(["--config", str(path), *given])
    assert (config.evaluate, config.max_tokens) == (("a.jsonl", "b.jsonl"), 6)
    assert (config.quant.recipe, config.quant.alpha) == ("smoothquant", 0.25)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("quant:\n  recipy: m2\n", "unknown key quant.recipy"),
        ("input: a.jsonl\n", "unknown key input"),
        ("quant:\n  alpha: 3\n", "quant.alpha"),
        ("- a\n", "expected a mapping"),
    ],
)
def test_parse_a_file_with_a_mistake(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "quantize.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=re.escape(words)):
        parse_quantize([*NEEDED, "--config", str(path)])


@pytest.mark.parametrize(
    "flags",
    [
        ["--sampling.temperature", "1"],
        ["--input", "a.jsonl"],
        ["--cluster.num_workers", "2"],
        ["--precision", "w8a8"],
        ["--eval", "a.jsonl"],
    ],
)
def test_parse_knows_no_flags_of_generate(flags: list[str]) -> None:
    with pytest.raises(InputError, match=flags[0].removeprefix("--")):
        parse_quantize([*NEEDED, *flags])
