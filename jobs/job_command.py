"""The command that a job runs: one of ours, checked here as the job would check it there."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.cli import parse_quantize, parse_run
from jobs.merge import parse_merge
from jobs.retry import parse_retry
from jobs.upload import Upload
from jobs.verify import parse_verify
from pipeline import storage
from pipeline.errors import InputError
from pipeline.sources import find_sources
from quant.hub import is_hub_id

_COMMANDS = ("generate", "plan", "retry", "verify", "merge", "quantize")
_REMEDY = "give an absolute path that every node can read, or a URI"


@dataclass(frozen=True)
class JobCommand:
    """A command and its options, as the job gets them, and the output it works on."""

    name: str
    arguments: tuple[str, ...]
    output: str


def check_command(given: Sequence[str], upload: Upload) -> JobCommand:
    """The command line of a job, found sensible as far as that can be told from here.

    The job runs in its copy of the working folder, so it is in that folder that it is looked at.

    Raises:
        InputError: it is no command for a job, its configuration is wrong, or it names what the job
            will not find or what would be deleted with it.
        SystemExit: what it was given is no command line of it, or asks for help.
    """
    name = given[0] if given else ""
    if name not in _COMMANDS:
        raise InputError(
            f"{repr(name) if name else 'no command'}: cannot be submitted; behind `--` goes one of "
            f"{', '.join(_COMMANDS)}, with its options"
        )
    with contextlib.chdir(upload.folder):
        if name in ("generate", "plan"):
            arguments = _with_uploaded_config(given[1:], upload)
            output = _check_run(arguments, upload)
        elif name == "quantize":
            arguments = _with_uploaded_config(given[1:], upload)
            output = _check_quantize(arguments, upload)
        else:
            arguments = list(given[1:])
            output = _check_rest(name, arguments)
    return JobCommand(name, tuple(arguments), output)


def _check_run(arguments: Sequence[str], upload: Upload) -> str:
    config = parse_run(arguments)
    _check_model(config.model, upload)
    _check_sources("input", config.input, upload)
    if config.quant.calibration:
        _check_sources("calibration", [config.quant.calibration], upload)
    _check_kept("output", config.output)
    return config.output


def _check_quantize(arguments: Sequence[str], upload: Upload) -> str:
    config = parse_quantize(arguments)
    _check_model(config.model, upload)
    _check_sources("evaluate", config.evaluate, upload)
    if config.quant.calibration:
        _check_sources("calibration", [config.quant.calibration], upload)
    if not storage.is_local(config.output):
        raise InputError(f"output {config.output}: must be a folder of the head")
    _check_kept("output", config.output)
    return config.output


def _check_rest(name: str, arguments: Sequence[str]) -> str:
    parse = {"retry": parse_retry, "verify": parse_verify, "merge": parse_merge}[name]
    options = parse(arguments)
    _check_kept("output", options.output)
    if name == "merge":
        _check_kept("--into", options.into)
    return str(options.output)


def _with_uploaded_config(arguments: Sequence[str], upload: Upload) -> list[str]:
    """The arguments with a `--config` that the job finds."""
    found: list[str] = []
    for argument in arguments:
        flag, equals, value = argument.partition("=")
        if found[-1:] == ["--config"]:
            found.append(_uploaded(argument, upload))
        elif flag == "--config" and equals:
            found.append(f"--config={_uploaded(value, upload)}")
        else:
            found.append(argument)
    return found


def _uploaded(config: str, upload: Upload) -> str:
    if not storage.is_local(config):
        return config
    path = storage.local_path(config)
    if not path.is_file():
        raise InputError(
            f"--config {config}: no such file (of {upload.folder}, where it is relative)"
        )
    name = upload.name_of(path)
    if name is None:
        raise InputError(
            f"--config {config}: is not in the working folder {upload.folder}, so that the job would "
            "not find it; move it there, or give a URI"
        )
    if name not in upload.files:
        raise InputError(
            f"--config {config}: is not uploaded, as an ignore file of {upload.folder} names it; move "
            "it, or give a URI"
        )
    return name


def _check_kept(what: str, output: str) -> None:
    """Refuse an output that is deleted with the job's folder."""
    if storage.is_relative(output):
        raise InputError(
            f"{what} {output}: is relative, and a Ray job's folder is deleted with the job; "
            "give an absolute path or a URI"
        )


def _check_model(model: str, upload: Upload) -> None:
    """Refuse a model that is neither on the nodes, nor of the hub, nor uploaded."""
    if not storage.is_relative(model) and storage.is_local(model):
        return
    if Path(model).is_dir():
        files = [path for path in Path(model).rglob("*") if path.is_file()]
        left = [path for path in files if upload.name_of(path) not in upload.files]
        if left or not files:
            what = f"{left[0]} is not uploaded" if left else "nothing of it is uploaded"
            raise InputError(
                f"model {model}: {what} with the working folder {upload.folder}; {_MODEL}"
            )
    elif not is_hub_id(model):
        raise InputError(
            f"model {model}: no such folder in {upload.folder}, and no hub id; {_MODEL}"
        )


_MODEL = "give the absolute path of a folder that the head can read, or a hub id"


def _check_sources(what: str, names: Sequence[str], upload: Upload) -> None:
    """Refuse relative files that do not come along; others are the cluster's, and not seen from here."""
    for name in names:
        if not storage.is_relative(name):
            continue
        try:
            files = find_sources([name]).uris
        except InputError as error:
            raise InputError(f"{what} {error} (in {upload.folder}); {_REMEDY}") from error
        for file in files:
            if upload.name_of(file) not in upload.files:
                raise InputError(
                    f"{what} {file}: is not uploaded, as it lies outside the working folder "
                    f"{upload.folder} or an ignore file names it; {_REMEDY}"
                )
