"""What the README tells people to type exists."""

import re
import shlex
from pathlib import Path

import pytest

from jobs.__main__ import main
from jobs.cli import parse_bench, parse_quantize, parse_run

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"


def code_lines() -> list[str]:
    """The lines of the README's code blocks, continued lines joined."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]


def commands() -> list[list[str]]:
    """The arguments of every `python -m jobs` in the README, comments and prompts cut off."""
    found = []
    for line in code_lines():
        _, here, after = line.partition("python -m jobs")
        if here and not after.startswith("."):
            found.append(shlex.split(after, comments=True))
    return found


def test_the_two_commands_exist() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    for command in ("make demo", "make test"):
        assert any(line.startswith(command) for line in code_lines()), command
        assert command.split()[1] in targets


def test_every_make_target_in_the_readme_exists() -> None:
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    named = re.findall(r"`?make (\w+)`?", "\n".join(code_lines()))
    assert named
    assert set(named) <= set(targets)


def test_every_command_line_in_the_readme_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # Where no output is.
    found = commands()
    assert any(arguments[:1] == ["generate"] for arguments in found)
    for arguments in found:
        if arguments[-1] in ("--help", "-h"):
            with pytest.raises(SystemExit) if len(arguments) > 1 else _nothing():
                assert main(arguments) == 0
        elif arguments[0] in ("generate", "plan"):
            parse_run(arguments[1:])
        elif arguments[0] == "quantize":
            parse_quantize(arguments[1:])
        elif arguments[0] == "bench":
            parse_bench(arguments[1:])
        elif arguments[0] in ("status", "verify", "retry", "merge", "push"):
            assert main(arguments) == 2
            assert "no run has begun here" in capsys.readouterr().err
        elif arguments[0] == "submit":
            assert main(["submit", "--address", "http://127.0.0.1:1", *arguments[3:]]) == 2
            assert "cannot be reached" in capsys.readouterr().err  # So all else is understood.
        elif arguments[0] == "report":
            assert main(arguments) == 2
            assert "has no parts to report on" in capsys.readouterr().err
        else:
            assert arguments[0] == "demo", arguments
            needed = ["--model", "m", "--input", "i", "--output", "o"]
            parse_run([*needed, *arguments[1:]])


def _nothing() -> "_Nothing":
    return _Nothing()


class _Nothing:
    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("link", ["docs/", "examples/prompts.jsonl", "cluster.yaml"])
def test_files_that_the_readme_names_are_there(link: str) -> None:
    if link in README.read_text(encoding="utf-8"):
        assert (ROOT / link).exists()


def test_relative_links_lead_somewhere() -> None:
    text = README.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        if "://" not in target and not target.startswith("mailto:"):
            assert (ROOT / target).exists(), target
