"""Calibrated once, kept in the cache, and named by what it is made of."""

import errno
import json
import logging
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from quant import compressed, prepare
from quant.checkpoint import Checkpoint, open_checkpoint
from quant.compressed import read_report, write_quantized
from quant.config import QuantConfig
from quant.convert import convert
from quant.errors import CheckpointError
from quant.prepare import prepared, quantize_checkpoint, recipe_digest, report_of
from quant.quantize import ROUND_TO_NEAREST
from tests.tiny import (
    edit_config,
    load_model,
    make_checkpoint,
    make_prompts,
    num_threads,
    prefill,
    reference_logits,
)

TEXTS = make_prompts([20, 12, 9])
# Calibrated, and quick: nothing is searched but how good it is.
SMOOTHQUANT = QuantConfig(recipe="smoothquant", alpha=0.5)
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    with num_threads(1):
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", "llama", std=0.15, num_hidden_layers=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUASAR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[QuantConfig]:
    """The recipe of every calibration, in order."""
    seen: list[QuantConfig] = []
    calibrate = prepare.calibrate

    def counting(checkpoint: Checkpoint, config: QuantConfig, texts: Any) -> Any:
        seen.append(config)
        return calibrate(checkpoint, config, texts)

    monkeypatch.setattr(prepare, "calibrate", counting)
    return seen


def make(folder: Path, config: QuantConfig = SMOOTHQUANT) -> Path:
    """The folder of the prepared checkpoint, which may be gone already."""
    checkpoint = open_checkpoint(folder)
    with prepared(checkpoint, config, TEXTS, recipe_digest(checkpoint, config, TEXTS)) as made:
        return made.folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- The name of a quantized checkpoint ---


def digest(folder: Path, texts: Any = TEXTS, **recipe: Any) -> str:
    return recipe_digest(open_checkpoint(folder), QuantConfig(**recipe), texts)


def test_digest_changes_with_the_recipe(folder: Path) -> None:
    recipes: list[dict[str, Any]] = [
        {},
        {"recipe": "smoothquant"},
        {"recipe": "rtn"},
        {"alpha": 0.5},
        {"alpha": 0.0},
        {"recipe": "smoothquant", "alpha": 0.5},
        {"target_agreement": 0.9},
        {"target_agreement": 1.0},
        {"max_float_bytes": 0},
        {"max_float_bytes": 1000},
    ]
    digests = [digest(folder, **recipe) for recipe in recipes]
    assert len(set(digests)) == len(recipes)
    assert all(len(name) == 64 for name in digests)
    assert digest(folder, recipe="m2", alpha=None) == digests[0]


@pytest.mark.parametrize(
    "recipe",
    [
        {"precision": "bf16"},
        {"calibration": "some/prompts.jsonl"},
    ],
    ids=str,
)
def test_digest_is_of_what_is_made_only(folder: Path, recipe: dict[str, Any]) -> None:
    assert digest(folder, **recipe) == digest(folder)


def test_digest_changes_with_the_texts(folder: Path) -> None:
    variants: list[Any] = [
        [],
        [[]],
        [[1, 2, 3]],
        [[1, 2], [3]],
        [[1], [2, 3]],
        [[3], [1, 2]],
        [[1, 2], [4]],
        [[1, 2], [3], [3]],
    ]
    assert len({digest(folder, texts) for texts in variants}) == len(variants)
    assert digest(folder, [(1, 2), (3,)]) == digest(folder, [[1, 2], [3]])


def test_digest_changes_with_the_source(folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "elsewhere")
    digests = {digest(folder), digest(copy)}
    assert len(digests) == 1
    tensors = load_file(copy / "model.safetensors")
    tensors["model.norm.weight"][3] += 1
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    digests.add(digest(copy))
    edit_config(copy, rms_norm_eps=1e-3)
    digests.add(digest(copy))
    assert len(digests) == 3


def test_digest_changes_with_the_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(folder)
    monkeypatch.setattr(prepare, "CODE_VERSION", prepare.CODE_VERSION + 1)
    assert digest(folder) != before


# --- Made once ---


def test_made_once_and_then_found(
    folder: Path, cache: Path, calibrations: list[QuantConfig]
) -> None:
    first = make(folder)
    name = digest(folder, recipe="smoothquant", alpha=0.5)
    assert first == cache / name[:32]
    assert calibrations == [SMOOTHQUANT]
    made = contents(first)
    assert make(folder) == first
    assert len(calibrations) == 1
    assert contents(first) == made
    assert names(cache) == [name[:32]]
    # Where the texts lay changes nothing of it; another recipe is another folder.
    assert make(folder, SMOOTHQUANT.model_copy(update={"calibration": "a.jsonl"})) == first
    assert len(calibrations) == 1
    other = make(folder, QuantConfig(recipe="smoothquant", alpha=0.6))
    assert len(calibrations) == 2
    assert names(cache) == sorted([first.name, other.name])
    assert contents(other)["model.safetensors"] != made["model.safetensors"]


def test_what_is_prepared_answers_nearly_as_the_original(folder: Path) -> None:
    (prompt,) = make_prompts([30])
    (expected,) = reference_logits(folder, [prompt])
    for config in (SMOOTHQUANT, QuantConfig()):
        made = make(folder, config)
        assert len(open_checkpoint(made).quantized) == 14
        error = (prefill(load_model(made), prompt) - expected).norm() / expected.norm()
        assert error < 0.1


def test_the_same_bytes_in_two_caches(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name in ("one", "two"):
        monkeypatch.setenv("QUASAR_CACHE", str(tmp_path / name))
        made.append(make(folder))
    assert made[0] != made[1]
    assert contents(made[0]) == contents(made[1])


@pytest.mark.parametrize(
    "config",
    [
        QuantConfig(recipe="rtn"),
        QuantConfig(precision="bf16"),
        QuantConfig(precision="float32", target_agreement=0.9),
    ],
    ids=lambda config: f"{config.recipe}-{config.precision}",
)
def test_what_needs_no_calibration_comes_as_it_is(
    folder: Path, cache: Path, calibrations: list[QuantConfig], config: QuantConfig
) -> None:
    checkpoint = open_checkpoint(folder)
    with prepared(checkpoint, config, [], "0" * 64) as made:
        assert made is checkpoint
    assert not cache.parent.exists()
    assert calibrations == []


def test_a_quantized_checkpoint_comes_as_it_is(
    folder: Path, cache: Path, calibrations: list[QuantConfig]
) -> None:
    target = folder.parent / "quantized"
    rtn = QuantConfig(recipe="rtn")
    write_quantized(open_checkpoint(folder), rtn, ROUND_TO_NEAREST, target, {})
    checkpoint = open_checkpoint(target)
    with prepared(checkpoint, QuantConfig(), TEXTS, "0" * 64) as made:
        assert made is checkpoint
    assert not cache.parent.exists()
    assert calibrations == []


def test_rounding_to_nearest_with_linears_in_float_is_calibrated(
    folder: Path, calibrations: list[QuantConfig]
) -> None:
    # A layer's o_proj takes 64 * 64 weights of two bytes, and every other group more.
    config = QuantConfig(recipe="rtn", max_float_bytes=2 * 64 * 64)
    made = make(folder, config)
    assert calibrations == [config]
    kept = {f"model.layers.{index}.self_attn.o_proj" for index in range(2)}
    in_float = {
        name.removesuffix(".weight")
        for name, tensor in load_file(made / "model.safetensors").items()
        if name.endswith("_proj.weight") and tensor.is_floating_point()
    }
    assert len(in_float) == 1
    assert in_float < kept


# --- A cache that cannot be written, and others at work ---


def test_a_cache_that_cannot_be_written(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    blocked, temporary = tmp_path / "blocked", tmp_path / "temporary"
    blocked.write_text("a file, so that no folder can be made below it", encoding="utf-8")
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    expected = list(convert(open_checkpoint(make(folder)), SMOOTHQUANT))
    monkeypatch.setenv("QUASAR_CACHE", str(blocked / "cache"))
    checkpoint = open_checkpoint(folder)
    name = recipe_digest(checkpoint, SMOOTHQUANT, TEXTS)
    with (
        caplog.at_level(logging.WARNING, logger="quant.prepare"),
        prepared(checkpoint, SMOOTHQUANT, TEXTS, name) as made,
    ):
        assert temporary in made.folder.parents
        assert report_of(made, SMOOTHQUANT)["digest"] == name
        for piece, wanted in zip(convert(made, SMOOTHQUANT), expected, strict=True):
            assert piece.keys() == wanted.keys()
            assert all(piece[key].tobytes() == wanted[key].tobytes() for key in piece)
    assert "cannot be written to, so the weights are not kept" in caplog.text
    assert str(blocked) in caplog.text
    assert names(temporary) == []
    assert blocked.is_file()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "quasar.json"])
def test_a_damaged_cache_is_made_again(
    name: str,
    folder: Path,
    cache: Path,
    calibrations: list[QuantConfig],
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = make(folder)
    before = contents(made)
    path = made / name
    path.write_bytes(path.read_bytes()[:100])
    assert contents(make(folder)) == before
    assert len(calibrations) == 2
    assert "damaged" in caplog.text


def test_the_temporary_copy_goes_even_after_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("", encoding="utf-8")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setenv("QUASAR_CACHE", str(tmp_path / "blocked"))
    checkpoint = open_checkpoint(folder)

    def fail() -> None:
        with prepared(checkpoint, SMOOTHQUANT, TEXTS, "0" * 64):
            assert len(names(tmp_path / "temporary")) == 1
            raise RuntimeError("of the caller")

    with pytest.raises(RuntimeError, match="of the caller"):
        fail()
    assert names(tmp_path / "temporary") == []


def test_a_full_cache(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(tensors: Any, path: Path, metadata: Any) -> None:
        save_file(tensors, path, metadata)
        if cache in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(compressed, "save_file", save)
    checkpoint = open_checkpoint(folder)
    with (
        pytest.raises(CheckpointError, match=r"weights cannot be written .*No space left"),
        prepared(checkpoint, SMOOTHQUANT, TEXTS, "0" * 64),
    ):
        pass
    assert names(cache) == []
    assert names(tmp_path / "temporary") == []


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_unusable_source_leaves_no_folder(folder: Path, cache: Path, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"lm_head\.weight holds NaN or infinity"):
            make(folder)
    assert not cache.exists() or names(cache) == []


def test_two_that_make_the_same_folder_at_once(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calibrate, barrier = prepare.calibrate, threading.Barrier(2, timeout=60)

    def together(checkpoint: Checkpoint, config: QuantConfig, texts: Any) -> Any:
        barrier.wait()  # Neither goes on before both have found nothing in the cache.
        return calibrate(checkpoint, config, texts)

    monkeypatch.setattr(prepare, "calibrate", together)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(make, [folder, folder])
    assert first == second
    assert names(cache) == [first.name]
    assert len(open_checkpoint(first).quantized) == 14
    assert barrier.n_waiting == 0


def test_a_folder_that_appears_meanwhile_is_used(
    folder: Path, cache: Path, calibrations: list[QuantConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make(folder)
    kept = contents(made)
    aside = made.rename(cache.parent / "aside")

    def late(*arguments: Any) -> None:
        aside.rename(made)  # Another process is done first.
        write_quantized(*arguments)

    monkeypatch.setattr("quant.prepare.write_quantized", late)
    assert make(folder) == made
    assert len(calibrations) == 2
    assert contents(made) == kept
    assert names(cache) == [made.name]


# --- How weights were made ---


def test_report_of_a_calibrated_checkpoint(folder: Path) -> None:
    config = QuantConfig(
        recipe="smoothquant",
        alpha=0.5,
        calibration="x.jsonl",
        num_calibration_samples=5,
        max_calibration_tokens=20,
        max_float_bytes=2 * 64 * 64,
        head="bf16",
    )
    made = open_checkpoint(make(folder, config))
    report = report_of(made, config)
    assert report == read_report(made.folder)
    assert report["digest"] == digest(folder, **config.model_dump())
    assert report["code_version"] == prepare.CODE_VERSION
    assert report["recipe"] == {
        "recipe": "smoothquant",
        "alpha": 0.5,
        "num_calibration_samples": 5,
        "max_calibration_tokens": 20,
        "target_agreement": None,
        "max_float_bytes": 8192,
        "head": "bf16",
        "down_activations": "int8",
        "embeddings": "bf16",
    }
    assert report["calibration"] == {"num_texts": 3, "num_tokens": 20 + 12 + 9}
    (in_float,) = report["float_linears"]
    assert in_float in {f"model.layers.{index}.self_attn.o_proj" for index in range(2)}
    # Of a layer: q, k, v 128 x 64, o 64 x 64, gate and up 192 x 64, down 64 x 96.
    total = 2 * 64 * (128 + 64 + 192 + 96)
    assert report["int8_share_of_linears"] == pytest.approx(1 - 64 * 64 / total)
    groups = [(e["layer"], e["linears"]) for e in report["relative_errors"]]
    assert groups == [(i, g) for i in range(2) for g in ("qkv", "o", "gate_up", "down")]
    assert all(0 < e["stream"] < e["output"] < 0.05 for e in report["relative_errors"])
    fidelity = report["fidelity_on_calibration_texts"]
    assert 0.5 < fidelity["top1_agreement"] <= 1
    assert fidelity["num_tokens"] == 19  # Of the one that the scales were not fitted to.


def test_report_of_rounding_to_nearest(folder: Path) -> None:
    config = QuantConfig(recipe="rtn", head="bf16")
    report = report_of(open_checkpoint(folder), config)
    assert json.loads(json.dumps(report)) == report
    assert report["recipe"]["recipe"] == "rtn"
    assert report["int8_share_of_linears"] == 1
    assert report["calibration"] == {"num_texts": 0, "num_tokens": 0}
    assert report["float_linears"] == report["relative_errors"] == []
    assert report["fidelity_on_calibration_texts"] is None
    assert "digest" not in report
    # And what is written says the same, and its name.
    target = folder.parent / "rtn"
    quantize_checkpoint(open_checkpoint(folder), config, [], "the name", target)
    assert report_of(open_checkpoint(target), config) == report | {"digest": "the name"}


@pytest.mark.parametrize("precision", ["bf16", "float32", "float64"])
def test_floating_point_has_nothing_to_report(folder: Path, precision: Any) -> None:
    assert report_of(open_checkpoint(folder), QuantConfig(precision=precision)) == {}


def test_nothing_is_known_of_what_others_quantized(folder: Path) -> None:
    target = folder.parent / "foreign"
    rtn = QuantConfig(recipe="rtn")
    write_quantized(open_checkpoint(folder), rtn, ROUND_TO_NEAREST, target, {"digest": "ours"})
    assert report_of(open_checkpoint(target), QuantConfig()) == {"digest": "ours"}
    (target / "quasar.json").unlink()
    assert report_of(open_checkpoint(target), QuantConfig()) == {}


def test_all_left_in_floating_point_stays_so(folder: Path) -> None:
    """Such a folder is a quantized checkpoint, though nothing in it is int8."""
    config = QuantConfig(recipe="rtn", max_float_bytes=10**9)
    made = open_checkpoint(make(folder, config))
    assert made.quantized == frozenset()
    assert report_of(made, config)["int8_share_of_linears"] == 0
    for piece in list(convert(made, config))[1:]:
        assert {key for key in piece if key.endswith(".scale")} == set()


def test_an_empty_folder_in_the_cache_is_filled(folder: Path, cache: Path) -> None:
    name = digest(folder, recipe="smoothquant", alpha=0.5)
    (cache / name[:32]).mkdir(parents=True)
    assert (make(folder) / "config.json").is_file()


def test_a_foreign_folder_is_not_taken_for_the_result(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine.txt").write_text("kept", encoding="utf-8")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(OSError, match="not empty"):
        quantize_checkpoint(checkpoint, QuantConfig(recipe="rtn"), [], "0" * 64, target)
    assert names(target) == ["mine.txt"]


def test_texts_that_say_nothing_are_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="no calibration text has more than one token"):
        prepare.calibrate(open_checkpoint(folder), QuantConfig(), [[1], [2]])
