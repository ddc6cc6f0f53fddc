"""Right or wrong: answers against the number, or the tests, that a prompt's row carries.

Rows with an `answer` are right if the last number of the text is that number. Rows with a `test` and an
`entry_point` (as HumanEval has them) are right if the text's Python passes `check(entry_point)` in a
process of its own: no network, no further processes, ten seconds, one gigabyte. That guards against
accidents of a model; it is no sandbox against malice.
"""

import re
import subprocess
import sys
import tempfile
from typing import Any

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_SECONDS = 10
_PRELUDE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CPU, ({seconds}, {seconds}))
resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
def _refuse(event, arguments):
    if event.split(".")[0] in ("socket", "subprocess", "pty", "ctypes") or event in (
        "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill",
    ):
        raise RuntimeError(event + " is not allowed here")
sys.addaudithook(_refuse)
"""


def grade(columns: dict[str, Any], text: str) -> bool | None:
    """Whether an answer is right; None if the row carries nothing to tell by."""
    if isinstance(columns.get("test"), str) and isinstance(columns.get("entry_point"), str):
        return passes_tests(columns, text)
    wanted = _last_number(str(columns.get("answer", "")))
    return None if wanted is None else _last_number(text) == wanted


def passes_tests(columns: dict[str, Any], text: str) -> bool:
    """Whether the first fenced block of Python that defines the entry point (or the text) passes."""
    entry_point = columns["entry_point"]
    blocks = [block for block in _FENCE.findall(text) if f"def {entry_point}" in block]
    program = [
        _PRELUDE.format(seconds=_SECONDS),
        *_imports(columns),
        blocks[0] if blocks else text,
        columns["test"],
        f"check({entry_point})",
        # An answer that ends the process before the tests have run has not passed them.
        "print('passed')",
    ]
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = subprocess.run(
                [sys.executable, "-I", "-c", "\n".join(program)],
                cwd=folder,
                env={},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_SECONDS,
                check=False,
            )
        except (subprocess.TimeoutExpired, ValueError):  # ValueError: a NUL in the text.
            return False
    return result.returncode == 0 and result.stdout.endswith(b"passed\n")


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson's score interval)."""
    z, share = 1.96, num_right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5 / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def _imports(columns: dict[str, Any]) -> list[str]:
    """The imports that the prompt's own code starts with: answers leave them out."""
    messages = columns.get("messages") or [{"content": columns.get("prompt") or ""}]
    lines = [line for m in messages for line in str(m.get("content")).splitlines()]
    return [line for line in lines if re.match(r"(from\s+[\w.]+\s+)?import\s+\w", line)]
