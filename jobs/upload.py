"""What Ray uploads of a job's working folder, by Ray's own rules."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import (
    RAY_RUNTIME_ENV_IGNORE_GITIGNORE,
    get_runtime_env_default_excludes,
)
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from pipeline.errors import InputError

_PACKAGES = ("jobs", "pipeline", "workers", "quant")
_NUM_NAMED = 5
_QUIET = logging.getLogger(f"{__name__}.ray")
_QUIET.setLevel(logging.ERROR)


@dataclass(frozen=True)
class Upload:
    """A working folder, and what of it the job will find in its own.

    Attributes:
        folder: the folder, as an absolute path.
        files: bytes of each file that is uploaded, by its path in the folder.
        num_bytes: of the package that Ray sends: a zip, not compressed.
    """

    folder: Path
    files: dict[str, int]
    num_bytes: int

    def name_of(self, path: str | Path) -> str | None:
        """How the job finds a file or a folder, in its own working folder; None if it lies elsewhere."""
        plain = _absolute(self.folder / Path(path).expanduser())
        for candidate, folder in ((plain, self.folder), (plain.resolve(), self.folder.resolve())):
            if candidate.is_relative_to(folder):
                return candidate.relative_to(folder).as_posix()
        return None

    @property
    def has_project(self) -> bool:
        """Whether it brings this project along; if not, the one that the nodes have is used."""
        return any(f"{name}/__init__.py" in self.files for name in _PACKAGES)

    def check_size(self, max_megabytes: float) -> None:
        """Refuse what every node would have to fetch, naming the largest files; raises InputError."""
        if self.num_bytes <= max_megabytes * 1e6:
            return
        largest = sorted(self.files, key=lambda name: -self.files[name])[:_NUM_NAMED]
        named = ", ".join(f"{name} ({self.files[name] / 1e6:.1f} MB)" for name in largest)
        raise InputError(
            f"working folder {self.folder}: {self.num_bytes / 1e6:.1f} MB in {len(self.files)} files "
            f"would be uploaded, more than {max_megabytes:g}; the largest: {named}; name what the job "
            "does not need in a .rayignore file there, give another folder with --working-dir, or "
            "raise --max-upload-mb"
        )

    def check_packages(self) -> None:
        """Refuse packages of somebody else that the job would import for ours; raises InputError."""
        theirs = [
            name
            for name in _PACKAGES
            if f"{name}/__init__.py" in self.files or f"{name}.py" in self.files
        ]
        ours = all(f"{name}/__init__.py" in self.files for name in _PACKAGES)
        if theirs and not (ours and "jobs/__main__.py" in self.files):
            raise InputError(
                f"working folder {self.folder}: the job would import its {theirs[0]!r} in the place of "
                "ours; name it in a .rayignore file there, or give another folder with --working-dir"
            )


def find_upload(folder: str) -> Upload:
    """What Ray would upload of a folder, and how much; raises InputError where that cannot be read."""
    root = _absolute(Path(folder).expanduser())
    if not root.is_dir():
        raise InputError(f"--working-dir {folder}: no such folder")
    files: dict[str, int] = {}
    num_bytes = _zip_bytes()

    def add(path: Path) -> None:
        nonlocal num_bytes
        name = path.relative_to(root).as_posix()
        if path.is_file():
            files[name] = path.stat().st_size
            num_bytes += _zip_bytes(name, files[name])
        elif path.is_dir() and next(path.iterdir(), None) is None:
            num_bytes += _zip_bytes(f"{name}/")

    with_gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    excludes = [_get_excludes(root, get_runtime_env_default_excludes())]
    try:
        _dir_travel(root, excludes, add, include_gitignore=with_gitignore, logger=_QUIET)
    except (OSError, RecursionError) as error:
        raise InputError(f"--working-dir {folder}: cannot be read ({error})") from error
    return Upload(root, files, num_bytes)


def _absolute(path: Path) -> Path:
    """Without `..`, and with the names that links have: Ray uploads what they lead to under those."""
    return Path(os.path.abspath(path))  # noqa: PTH100


def _zip_bytes(name: str | None = None, size: int = 0) -> int:
    """What a file takes in a zip without compression: itself and two headers; the end takes 22 bytes."""
    return 22 if name is None else size + 30 + 46 + 2 * len(name.encode())
