"""Right or wrong, by the last number or by tests that run in a process of their own."""

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import grading
from pipeline.grading import grade, wilson_interval

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"


def row(test: str = "    assert f(1, 2) == 3\n", **columns: Any) -> dict[str, Any]:
    """A row as HumanEval has it."""
    prompt = 'def add(a, b):\n    """The sum."""\n'
    return {"prompt": prompt, "test": f"def check(f):\n{test}", "entry_point": "add"} | columns


def outcome(body: str) -> bool | None:
    """Whether a function of this body returns "yes"."""
    text = "def add():\n" + "".join(f"    {line}\n" for line in body.splitlines())
    return grade(row("    assert f() == 'yes'\n"), text)


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("18", "#### 18", True),
        ("She pays 9 + 9.\n#### 18", "That makes 18 dollars.", True),
        ("#### 18", "That makes 19 dollars.", False),
        ("1234.5", "You pay $1,234.50.", True),
        ("$1,234.50", "1234.5", True),
        ("1,234", "1.234", False),
        ("1234567", "1,234,567", True),
        ("18", "18.00", True),
        ("18", "**18**", True),
        ("18", "\\boxed{18}", True),
        ("18", "18 of 20", False),  # The last number counts,
        ("20", "18 of 20", True),  # whatever came before it.
        ("#### 5\n#### 6", "6", True),
        ("-7", "x = -7", True),
        ("-7", "x = 7", False),
        ("7", "x = -7", False),
        ("0", "It is 0.", True),
        ("0", "It is 0.5", False),
        ("18", "I do not know.", False),
        ("18", "", False),
        (18, "18", True),
        (2.5, "2.50", True),
    ],
)
def test_numbers(answer: object, text: str, right: bool) -> None:
    assert grade({"answer": answer}, text) is right


@pytest.mark.parametrize(
    "columns",
    [
        {},
        {"prompt": "1 + 1?"},
        {"answer": None},
        {"answer": ""},
        {"answer": "blue"},
        {"test": "def check(f):\n    assert False\n"},
        {"entry_point": "add"},
        {"test": None, "entry_point": None},
    ],
)
def test_a_row_that_carries_nothing_to_tell_by(columns: dict[str, Any]) -> None:
    assert grade(columns, "42") is None


def test_half_a_test_leaves_the_answer() -> None:
    assert grade({"entry_point": "add", "test": None, "answer": "3"}, "3") is True


@pytest.mark.parametrize(
    "wrap",
    [
        "```python\n{}```",
        "```py\n{}```\n",
        "```\n{}```",
        "```python  \n{}```",
        "Here it is:\n\n```python\n{}```\n\nIt adds.",
        "```python\n{}",  # Cut off before the fence closes.
        "{}",
        "```python\nprint('usage')\n```\nand\n```python\n{}```",
        "```python\n{}```\n\n```python\nassert add(1, 1) == 3\n```",
    ],
)
def test_code_is_found(wrap: str) -> None:
    assert grade(row(), wrap.format(ADD)) is True
    assert grade(row(), wrap.format(WRONG)) is False


def test_the_first_block_that_defines_the_function_counts() -> None:
    both = "```python\n{}```\nor\n```python\n{}```"
    assert grade(row(), both.format(ADD, WRONG)) is True
    assert grade(row(), both.format(WRONG, ADD)) is False


@pytest.mark.parametrize(
    "text",
    [
        "",
        "I cannot do that.",
        "def add(a, b:\n    return a + b\n",
        "def sub(a, b):\n    return a + b\n",
        "def add(a):\n    return a\n",
        ADD + "\x00",
        "\x00",
        ADD + "\ud800",
        ADD + "raise ValueError('no')\n",
        ADD + "import no_such_module\n",
        f"```python\n{ADD}\x00```",
        "def add(a, b):\n    return add(a, b)\n",
    ],
)
def test_what_does_not_run_is_wrong(text: str) -> None:
    assert grade(row(), text) is False


def test_all_the_tests_must_pass() -> None:
    tests = "    assert f(1, 2) == 3\n    assert f(0, 0) == 1\n"
    assert grade(row(tests), ADD) is False


def test_an_answer_beside_tests_is_not_asked() -> None:
    assert grade(row(answer="3"), "3") is False


def test_letters_of_all_kinds_and_output_of_its_own() -> None:
    assert grade(row(), f"# ünïcödé 文 🙂\nprint('größer')\n{ADD}print('x', end='')\n") is True
    assert grade(row(), f"import sys\nprint('bad', file=sys.stderr)\n{ADD}") is True


@pytest.mark.parametrize(
    "ending",
    [
        "import sys\nsys.exit(0)\n",
        "raise SystemExit\n",
        "exit()\n",
        "import os\nos._exit(0)\n",
    ],
)
def test_leaving_before_the_tests_is_no_pass(ending: str) -> None:
    assert grade(row(), WRONG + ending) is False
    inside = "def add(a, b):\n" + "".join(f"    {line}\n" for line in ending.splitlines())
    assert grade(row(), inside) is False


def test_leaving_behind_the_tests_with_an_error_is_no_pass() -> None:
    leave = "def leave():\n    sys.stdout.flush()\n    os._exit(3)\natexit.register(leave)\n"
    assert grade(row(), f"import atexit, os, sys\n{leave}{ADD}") is False


@pytest.mark.parametrize("body", ["while True:\n    pass", "import time\ntime.sleep(60)"])
def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    monkeypatch.setattr(grading, "_SECONDS", 1)
    started = time.monotonic()
    assert outcome(body + "\nreturn 'yes'") is False
    assert time.monotonic() - started < 9


def test_an_endless_answer_at_its_top(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "_SECONDS", 1)
    assert grade(row(), f"{ADD}while True:\n    pass\n") is False


def attempt(action: str, error: str) -> str:
    """A body that returns "yes" if `action` is refused with `error`."""
    lines = "\n".join(f"    {line}" for line in action.splitlines())
    return f"try:\n{lines}\nexcept {error}:\n    return 'yes'\nreturn 'no'"


@pytest.mark.parametrize(
    "action",
    [
        "import socket\nsocket.socket()",
        "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)",
        "import socket\nsocket.getaddrinfo('localhost', 80)",
        "import subprocess\nsubprocess.run(['true'])",
        "import subprocess\nsubprocess.getoutput('true')",
        "import os\nos.system('true')",
        "import os\nos.popen('true').read()",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', ''])",
        "import os\nif os.fork() == 0:\n    os._exit(0)",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
        "import os\nos.kill(os.getpid(), 0)",
        "import pty\npty.spawn('true')",
        "import ctypes\nctypes.CDLL(None)",
    ],
)
def test_network_processes_and_signals_are_refused(action: str) -> None:
    assert outcome(attempt(action, "RuntimeError")) is True
    assert outcome(f"{action}\nreturn 'yes'") is False


def test_memory_and_files_are_bounded() -> None:
    assert outcome(attempt("bytearray(2 * 2**30)", "MemoryError")) is True
    assert outcome("return 'yes' if len(bytearray(2 * 2**30)) else 'no'") is False
    assert outcome("return 'yes' if len(bytearray(2**27)) else 'no'") is True
    short = "with open('x', 'wb', buffering=0) as file:\n    size = file.write(bytes(2**22))"
    assert outcome(f"{short}\nreturn 'yes' if size <= 2**20 else 'no'") is True


def test_input_is_empty_and_does_not_wait() -> None:
    assert outcome(attempt("input()", "EOFError")) is True


def test_our_environment_and_folder_are_not_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUASAR_SECRET", "s3cret")
    (tmp_path / "ours.py").write_text("", encoding="utf-8")
    (tmp_path / "ours.txt").write_text("", encoding="utf-8")
    assert outcome("import os\nreturn os.environ.get('QUASAR_SECRET', 'yes')") is True
    assert outcome(attempt("import ours", "ImportError")) is True
    assert outcome(attempt("open('ours.txt')", "OSError")) is True
    assert outcome("open('theirs.txt', 'w').close()\nreturn 'yes'") is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.py", "ours.txt"]


TYPED = "def add(a: List[int], b: int) -> Optional[float]:\n    return math.fsum(a) + b\n"
HEADER = "from typing import List, Optional\nimport math\n\n\ndef add(a, b):\n"


@pytest.mark.parametrize(
    "columns",
    [
        {"prompt": HEADER},
        {"prompt": None, "messages": [{"role": "user", "content": f"Complete:\n{HEADER}"}]},
        {
            "prompt": None,
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"```python\n{HEADER}```\n"},
            ],
        },
    ],
)
def test_imports_that_the_prompt_starts_with(columns: dict[str, Any]) -> None:
    tests = "    assert f([1, 2], 3) == 6\n"
    assert grade(row(tests, **columns), f"```python\n{TYPED}```") is True
    assert grade(row(tests), f"```python\n{TYPED}```") is False


def test_only_imports_are_taken_from_the_prompt() -> None:
    prompt = "    import no_such_module\nfrom here on, import everything.\nraise ValueError\n"
    assert grade(row(prompt=prompt), ADD) is True


@pytest.mark.parametrize(
    ("num_right", "count", "low", "high"),
    [
        # z = 1.96: z^2 / 10 = 0.38416, so the middle of 5 of 10 is 1/2, and half the width
        # 1.96 * sqrt(0.025 + 0.009604) / 1.38416 = 0.26341.
        (5, 10, 0.23659, 0.76341),
        # 2 * 0.19208 / 1.38416
        (0, 10, 0.0, 0.27754),
        (10, 10, 0.72246, 1.0),
        (0, 1, 0.0, 0.79346),  # 3.8416 / 4.8416
        (1, 1, 0.20654, 1.0),
    ],
)
def test_wilsons_interval_by_hand(num_right: int, count: int, low: float, high: float) -> None:
    assert wilson_interval(num_right, count) == pytest.approx((low, high), abs=1e-5)


@pytest.mark.parametrize(("num_right", "count"), [(1, 7), (3, 32), (31, 32), (81, 263), (500, 999)])
def test_wilsons_interval_by_its_definition(num_right: int, count: int) -> None:
    """At either end the share observed lies 1.96 standard errors away."""
    share = num_right / count
    low, high = wilson_interval(num_right, count)
    assert 0 < low < share < high < 1
    for end in (low, high):
        error = (end * (1 - end) / count) ** 0.5
        assert abs(share - end) == pytest.approx(1.96 * error, rel=1e-9)


@pytest.mark.parametrize("count", [1, 3, 50])
def test_wilsons_interval_stays_within_0_and_1(count: int) -> None:
    for num_right in range(count + 1):
        low, high = wilson_interval(num_right, count)
        assert 0 <= low <= high <= 1


@pytest.mark.parametrize(
    "text",
    [
        f"```bash\npip install x\n```\nNow:\n```python\n{ADD}```",
        f"```Python\n{ADD}```",
        f"```python3\n{ADD}```\nDone.",
        f"```python\n{ADD}```".replace("\n", "\r\n"),
        "1. Do this:\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n",
        "from __future__ import annotations\n" + ADD,
        f"```python\ndef add_all(x):\n    return sum(x)\n```\n```python\n{ADD}```",
    ],
    ids=range(7),
)
def test_code_is_found_where_models_put_it(text: str) -> None:
    assert grade(row(), text) is True


def test_a_long_test_and_a_prompt_with_prose_and_imports() -> None:
    assert grade(row() | {"test": row()["test"] + "#" * 140_000}, ADD) is True
    prompt = "import the values a and b\nfrom math import *\nfrom __future__ import annotations\n"
    assert grade(row(prompt=prompt), ADD) is True


def test_endless_printing_is_cut_off() -> None:
    assert outcome("while True:\n    print('x' * 100_000)") is False


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ("-5", "it is \N{MINUS SIGN}5"),
        ("0.5", "it is .5"),
        ("18", "3x (10-18)"),
        ("4", "3-4"),
        ("100000", "1e5"),
        ("-7", "x = -7."),
    ],
)
def test_numbers_as_people_write_them(answer: str, text: str) -> None:
    assert grade({"answer": answer}, text) is True
