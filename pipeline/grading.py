"""Right or wrong: answers against the number, or the tests, that a prompt's row carries.

Rows with an `answer` are right if the last number of the text is that number. Rows with a `test` and an
`entry_point` (as HumanEval has them) are right if the text's Python passes `check(entry_point)` in a
process of its own: no network, no further processes, ten seconds, one gigabyte. That guards against
accidents of a model; it is no sandbox against malice.
"""

import ast
import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

# A minus behind a digit or a letter is a subtraction.
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?")
_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE
)
_FUTURE = re.compile(r"^from __future__ import .*$", re.MULTILINE)
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
    program = [
        *_imports(columns),
        _find_code(text.replace("\r\n", "\n"), entry_point),
        columns["test"],
        f"check({entry_point})",
        # An answer that ends the process before the tests have run has not passed them.
        "print('passed')",
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, printed = folder / "answer.py", folder / "printed.txt"
        text = "\n".join(program)
        first = [*_FUTURE.findall(text), _FUTURE.sub("", text)]  # Where Python wants them.
        source.write_text("\n".join(first), encoding="utf-8", errors="replace")
        prelude = (
            _PRELUDE.format(seconds=_SECONDS) + f"import runpy\nrunpy.run_path({str(source)!r})"
        )
        try:
            with printed.open("wb") as output:  # A file, as its size is limited.
                result = subprocess.run(
                    [sys.executable, "-I", "-c", prelude],
                    cwd=folder,
                    env={},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.DEVNULL,
                    timeout=_SECONDS,
                    check=False,
                )
        except subprocess.TimeoutExpired:
            return False
        return result.returncode == 0 and printed.read_bytes().endswith(b"passed\n")


def _find_code(text: str, entry_point: str) -> str:
    for match in _FENCE.finditer(text):
        code = textwrap.dedent(match[2])
        language = match[1].lower()
        if language in ("", "py", "python", "python3") and _defines(code, entry_point):
            return code
    return text


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^\s*(async\s+)?def\s+{re.escape(name)}\b", code, re.MULTILINE) is not None


def wilson_interval(num_right: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share (Wilson's score interval)."""
    z, share = 1.96, num_right / count
    centre = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * ((share * (1 - share) + z * z / (4 * count)) / count) ** 0.5 / (1 + z * z / count)
    return max(0.0, centre - half), min(1.0, centre + half)


def _last_number(text: str) -> float | None:
    numbers = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return float(numbers[-1].replace(",", "")) if numbers else None


def _imports(columns: dict[str, Any]) -> list[str]:
    """The imports that the prompt's own code starts with: answers leave them out."""
    messages = columns.get("messages") or [{"content": columns.get("prompt") or ""}]
    lines = [line for m in messages for line in str(m.get("content")).splitlines()]
    return [line for line in lines if _is_import(line)]


def _is_import(line: str) -> bool:
    if not line.startswith(("import ", "from ")):
        return False
    try:
        return isinstance(ast.parse(line).body[0], ast.Import | ast.ImportFrom)
    except SyntaxError:
        return False  # Prose.
