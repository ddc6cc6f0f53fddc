"""Pieces in files of the node: for weights that its object store cannot hold.

Written by the first worker that needs them, one piece at a time, and mapped by all of the node: the pages
are shared between processes, as those of the object store are. The files are named by the weights'
digest and stay in the cache, so that the next run finds them.
"""

import fcntl
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from quant.cache import cache_folder
from quant.convert import Piece


def node_copy(digest: str, pieces: Iterable[Piece]) -> list[Piece]:
    """Read-only views of the pieces in this node's files; `pieces` is consumed only to write them.

    Raises:
        OSError: the files cannot be written.
    """
    folder = cache_folder() / "pieces" / digest[:32]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # Released with the file, even if the process is killed.
        if not folder.exists():
            _write(folder, pieces)
    numbered = sorted(folder.iterdir())
    return [
        {path.stem: np.load(path, mmap_mode="r") for path in piece.iterdir()} for piece in numbered
    ]


def _write(folder: Path, pieces: Iterable[Piece]) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)  # Of a worker that was killed.
    try:
        for number, piece in enumerate(pieces):
            target = partial / f"{number:05d}"
            target.mkdir(parents=True)
            for name, array in piece.items():
                np.save(target / f"{name}.npy", array)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
