"""How kernels are compiled: once a machine, again whenever any of their sources changes.

numba's own cache watches only the file a function stands in, so a kernel would outlive a change to the
tiles it is built from. Here the cache's folder is named by the content of all of them.
"""

import hashlib
from functools import partial
from pathlib import Path

import numba

from quant import int8
from quant.cache import cache_folder

_NAMES = ("attention.py", "jit.py", "kernels.py", "matmul.py", "tiles.py", "vnni.py")
_SOURCES = [*(Path(__file__).with_name(name) for name in _NAMES), Path(int8.__file__)]


def _digest() -> str:
    content = b"".join(source.read_bytes() for source in _SOURCES)
    return hashlib.sha256(content).hexdigest()[:16]


numba.config.CACHE_DIR = str(  # type: ignore[attr-defined]
    cache_folder() / "kernels" / _digest()
)

# numpy's errors: a check for zero before every division would keep its loop from being vectorized.
kernel = partial(numba.njit, nogil=True, cache=True, error_model="numpy")
parallel_kernel = partial(kernel, parallel=True)
inlined = partial(numba.njit, inline="always")
