"""Where a model comes from: a folder, or the model hub."""

from pathlib import Path

from quant.errors import CheckpointError

_HUB_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.txt"]


def find_checkpoint(model: str) -> Path:
    """Resolve a folder or a hub id to a local folder; raises CheckpointError if there is none."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"{model}: is a file; give the folder of a Hugging Face checkpoint")
    if not is_hub_id(model):
        raise CheckpointError(f"{model}: no such folder")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_PATTERNS))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise CheckpointError(
            f"{model}: no such folder, and not to be had from the model hub ({reason})"
        ) from error


def is_hub_id(model: str) -> bool:
    """Whether a name that is no folder's can be one of the model hub."""
    return model.count("/") <= 1 and not model.startswith((".", "/", "~"))
