"""Where things made once are kept on this machine."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """$QUASAR_CACHE, else ~/.cache/quasar-batch; not created."""
    return Path(os.environ.get("QUASAR_CACHE") or Path.home() / ".cache" / "quasar-batch")
