"""Tiny random checkpoints and a byte tokenizer, made with Hugging Face's own libraries.

The weights are drawn wide so that logits are peaked and every bias and gain matters: such a model
tells a wrong rotation or a forgotten bias from a right one.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numba
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from quant.checkpoint import open_checkpoint
from quant.config import QuantConfig
from quant.convert import Piece, convert
from workers.backend import Backend, StepBatch
from workers.model import TargetModel, build_backend

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
VOCAB_SIZE = 300
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_DEFAULTS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """Run kernels on `count` threads, or all there are if fewer.

    Tiny passes on a busy machine spend their time waiting for threads at barriers, so most tests
    want one.
    """
    before = torch.get_num_threads(), numba.get_num_threads()
    torch.set_num_threads(min(count, before[0]))
    numba.set_num_threads(min(count, numba.config.NUMBA_NUM_THREADS))
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        numba.set_num_threads(before[1])


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    std: float = 0.3,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random float32 checkpoint of `family` to `folder`.

    Args:
        folder: created if it does not exist.
        family: a key of FAMILIES.
        seed: of the weights.
        std: spread of the matrices; biases and gains have their own.
        max_shard_size: as transformers understands it; small values write several files.
        overrides: config fields, by transformers' names.
    """
    config_class, model_class = FAMILIES[family]
    model = model_class(config_class(**(_DEFAULTS | overrides)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:  # Norm gains: about a tenth of them negative.
                sign = (torch.rand(parameter.shape, generator=generator) > 0.1).float() * 2 - 1
                parameter.copy_(sign * (1 + 0.3 * noise))
            else:
                parameter.copy_(std * noise)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def edit_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json in place; a field that is None is removed."""
    path = folder / "config.json"
    raw = json.loads(path.read_text(encoding="utf-8")) | fields
    kept = {key: value for key, value in raw.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")


def tiny_tokenizer(folder: Path) -> Path:
    """Write a byte-level tokenizer with a chat template: ids 0-255 are bytes, 256-258 specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 256,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def make_prompts(lengths: Sequence[int], vocab_size: int = VOCAB_SIZE) -> list[list[int]]:
    """Random token ids, one prompt per length."""
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(vocab_size, (n,), generator=generator).tolist() for n in lengths]


def reference_logits(folder: Path, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """transformers' logits [tokens, V] of every prompt on its own, without a cache, in float32."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return [model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]


def convert_all(folder: Path, **recipe: Any) -> list[Piece]:
    """Every converted piece of a checkpoint."""
    return list(convert(open_checkpoint(folder), QuantConfig(**recipe)))


def load_model(folder: Path, backend: Backend | None = None, **recipe: Any) -> TargetModel:
    """The target model of a checkpoint, as a worker builds it."""
    architecture = open_checkpoint(folder).architecture
    backend = backend or build_backend(QuantConfig(**recipe).precision)
    return TargetModel(architecture, convert_all(folder, **recipe), backend, max_len=256)


def riffle(lengths: Sequence[int], seed: int) -> list[int]:
    """Row numbers, row i as often as lengths[i], shuffled: the order in which tokens are fed."""
    order = torch.tensor([row for row, length in enumerate(lengths) for _ in range(length)])
    generator = torch.Generator().manual_seed(seed)
    return order[torch.randperm(len(order), generator=generator)].tolist()


def run_passes(
    model: TargetModel, prompts: Sequence[list[int]], order: Sequence[int], chunk: int
) -> list[torch.Tensor]:
    """Feed the tokens of all prompts in `order`, `chunk` tokens a pass; logits of every token.

    Prompt i lives in cache row 2 * i + 1 of a cache that starts as NaN, so that reading a foreign
    row or a position not yet written shows.
    """
    longest = max(len(prompt) for prompt in prompts)
    cache = model.new_cache(2 * len(prompts) + 1, longest + 3)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    num_fed = [0] * len(prompts)
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, len(order), chunk):
        rows = order[start : start + chunk]
        positions = []
        for row in rows:
            positions.append(num_fed[row])
            num_fed[row] += 1
        batch = StepBatch(
            token_ids=torch.tensor([prompts[r][p] for r, p in zip(rows, positions, strict=True)]),
            rows=torch.tensor([2 * row + 1 for row in rows]),
            positions=torch.tensor(positions),
            logit_indices=torch.arange(len(rows)),
        )
        with torch.inference_mode():
            for row, logits_V in zip(rows, model.forward(batch, cache), strict=True):
                logits[row].append(logits_V)
    assert num_fed == [len(prompt) for prompt in prompts]
    return [torch.stack(row_logits) for row_logits in logits]


def prefill(model: TargetModel, prompt: list[int]) -> torch.Tensor:
    """Logits of every token of one prompt, fed in one pass."""
    return run_passes(model, [prompt], [0] * len(prompt), len(prompt))[0]
