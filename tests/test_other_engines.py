"""transformers reads the folders we write, with the library that defines their format."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quant.checkpoint import open_checkpoint
from quant.compressed import write_quantized
from quant.config import QuantConfig
from quant.prepare import calibrate
from quant.quantize import ROUND_TO_NEAREST
from quant.simulate import Head, run_texts
from tests.tiny import make_checkpoint, make_prompts

CONFIG = QuantConfig(max_float_bytes=40_000, head="bf16")
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 8},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A calibrated folder with some linears left in bfloat16."""
    source, made = (tmp_path_factory.mktemp("models") / name for name in ("source", "made"))
    make_checkpoint(source, request.param, std=0.1, **FAMILIES[request.param])
    checkpoint = open_checkpoint(source)
    treatment, _ = calibrate(checkpoint, CONFIG, make_prompts([30, 20, 40]))
    assert 0 < len(treatment.float_groups) < 12
    write_quantized(checkpoint, CONFIG, treatment, made, {})
    return made


def logits_of(folder: Path, prompt: list[int], **settings: Any) -> torch.Tensor:
    """transformers' logits [T, V]."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
        **settings,
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.inference_mode():
        return model(torch.tensor([prompt]), use_cache=False).logits[0].float()


@pytest.fixture
def prompt() -> list[int]:
    return make_prompts([25, 7])[0]


def ours(folder: Path, prompt: list[int]) -> torch.Tensor:
    checkpoint = open_checkpoint(folder)
    as_stored = QuantConfig(precision="float32")  # What is not int8.
    states_TC = run_texts(checkpoint, as_stored, ROUND_TO_NEAREST, [prompt])
    return Head(checkpoint, as_stored)(states_TC)


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`:UserWarning")
def test_the_weights_mean_the_same_to_transformers(
    folder: Path, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With activations left in floating point on both sides nothing is left to differ."""
    monkeypatch.setattr("quant.simulate.round_rows", lambda x_TK, *_: x_TK)
    theirs = logits_of(folder, prompt, quantization_config=CompressedTensorsConfig(dequantize=True))
    torch.testing.assert_close(ours(folder, prompt), theirs, atol=2e-4, rtol=2e-4)


def test_w8a8_in_transformers_is_as_close_as_rounding_allows(
    folder: Path, prompt: list[int]
) -> None:
    """It scales activations by max/127.5 instead of max/127, so codes differ here and there."""
    theirs, mine = logits_of(folder, prompt), ours(folder, prompt)
    error = (mine - theirs).square().mean() / theirs.square().mean()
    assert 0 < error < 1e-3
