"""Files of a run, on local disks or behind any URI that smart-open speaks."""

import glob as local_glob
import os
import re
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import pyarrow as pa
import smart_open
from fsspec.utils import glob_translate
from pyarrow import fs

from pipeline import failpoints
from pipeline.persistence import as_os_error, is_missing, persist

PACKED = (".gz", ".zst")  # Unpacked while being read.


def is_local(uri: str) -> bool:
    """Whether the location is a path of this file system."""
    return urlsplit(uri).scheme in ("", "file")


def is_relative(uri: str) -> bool:
    """Whether the location is a path that depends on where the process runs."""
    return is_local(uri) and not local_path(uri).is_absolute()


def local_path(uri: str) -> Path:
    """The path of a local location."""
    return Path(uri.removeprefix("file://")).expanduser()


def join(folder: str, *names: str) -> str:
    """A location below a folder."""
    return "/".join([folder.rstrip("/"), *names])


def is_packed(uri: str) -> bool:
    """Whether a file is unpacked while being read."""
    return uri.endswith(PACKED)


def is_pattern(uri: str) -> bool:
    """Whether a location has wildcards: `*`, `**`, and on local disks `?` and `[ab]` as well."""
    if not is_local(uri):
        return "*" in uri
    return local_glob.has_magic(uri) and not local_path(uri).exists()


def glob(pattern: str) -> list[str]:
    """The files whose locations match, sorted; raises OSError where that cannot be told."""
    if is_local(pattern):
        found = local_glob.iglob(str(local_path(pattern)), recursive=True)  # noqa: PTH207 - of any root
        return sorted(name for name in found if Path(name).is_file())
    above = pattern.partition("*")[0].rpartition("/")[0]
    matches = re.compile(glob_translate(pattern))
    return [uri for uri in list_files(above) if matches.match(uri)]


def is_folder(uri: str) -> bool:
    """Whether there are files below a location; never where storage knows no folders.

    Raises:
        OSError: the storage does not answer.
    """
    if is_local(uri):
        return local_path(uri).is_dir()
    try:
        files, path = fs.FileSystem.from_uri(uri)
    except pa.ArrowInvalid:  # A web server, for one.
        return False
    with as_os_error():
        return bool(files.get_file_info(path).type == fs.FileType.Directory)


def list_files(folder: str) -> dict[str, int]:
    """All files below a folder, at any depth, with their bytes, sorted; none if there is no folder.

    Those whose names, or whose folders' names, begin with a dot are left out.

    Raises:
        OSError: the storage cannot be listed.
    """
    return persist(lambda: _list_files(folder))


def _list_files(folder: str) -> dict[str, int]:
    if is_local(folder):
        path = local_path(folder)
        found = {str(file): file.stat().st_size for file in path.rglob("*") if file.is_file()}
        below = len(str(path))
    else:
        with as_os_error():
            files, path = fs.FileSystem.from_uri(folder)
            selector = fs.FileSelector(path, recursive=True, allow_not_found=True)
            infos = files.get_file_info(selector)
        scheme = urlsplit(folder).scheme
        found = {f"{scheme}://{info.path}": info.size for info in infos if info.is_file}
        below = len(folder)
    return {uri: found[uri] for uri in sorted(found) if "/." not in uri[below:]}


def stamp(uri: str) -> tuple[int, int] | None:
    """A file's bytes and when it was changed (ns since the epoch); None if it is not there.

    Raises:
        OSError: it cannot be told.
    """
    if is_local(uri):
        path = local_path(uri)
        found = path.stat() if path.is_file() else None
        return None if found is None else (found.st_size, found.st_mtime_ns)
    with as_os_error():
        files, path = fs.FileSystem.from_uri(uri)
        info = files.get_file_info(path)
        return None if info.size is None else (info.size, info.mtime_ns or 0)


def open_read(uri: str) -> IO[bytes]:
    """Open for reading bytes; a .gz or .zst is unpacked on the way."""
    file: IO[bytes] = _open(uri, "rb")
    return file


def read_bytes(uri: str) -> bytes | None:
    """The whole content, or None if there is nothing at the location."""

    def read() -> bytes:
        with as_os_error(), _open(uri, "rb") as file:
            content: bytes = file.read()
            return content

    try:
        return persist(read)
    except OSError as error:
        if is_missing(error):
            return None
        raise


def exists(uri: str) -> bool:
    """Whether there is a readable file."""
    if is_local(uri):
        return local_path(uri).is_file()
    try:
        with as_os_error(), _open(uri, "rb") as file:
            file.read(1)
    except OSError as error:
        if is_missing(error):
            return False
        raise
    return True


def write_atomic(uri: str, content: bytes) -> None:
    """Put a file in place in one step: whole or not at all, to every reader."""

    def write() -> None:
        with open_write(uri) as file:
            file.write(content)

    persist(write)


@contextmanager
def open_write(uri: str) -> Iterator[IO[bytes]]:
    """A file to write, which is in place, whole, once the context ends without an error.

    Locally it is written aside, flushed to disk and renamed; elsewhere it is one PUT, or one upload of
    several pieces. Raises OSError.
    """
    if not is_local(uri):
        with as_os_error(), _open(uri, "wb") as file:
            yield file
        return
    path = local_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with _pack(aside, path.suffix) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        failpoints.reach("aside", path.name)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def create(uri: str, content: bytes) -> bool:
    """Make a local file, unless it is there: False then."""
    path = local_path(uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
    except FileExistsError:
        return False
    return True


def remove(uri: str) -> None:
    """Remove a file, if it is there."""
    if is_local(uri):
        local_path(uri).unlink(missing_ok=True)
        return
    with as_os_error():
        files, path = fs.FileSystem.from_uri(uri)
        if files.get_file_info(path).type != fs.FileType.NotFound:
            files.delete_file(path)


def move(uri: str, to: str) -> None:
    """Put a file elsewhere on the same storage, over what is there."""
    if is_local(uri):
        local_path(to).parent.mkdir(parents=True, exist_ok=True)
        local_path(uri).replace(local_path(to))
        return
    with as_os_error():
        files, path = fs.FileSystem.from_uri(uri)
        files.move(path, fs.FileSystem.from_uri(to)[1])


def remove_empty_folder(uri: str) -> None:
    """Remove a local folder that holds nothing; elsewhere, such a folder is not there."""
    if is_local(uri) and is_folder(uri) and is_empty_folder(uri):
        local_path(uri).rmdir()


def remove_leftovers(folder: str) -> None:
    """Remove what killed processes left of files they were writing aside."""
    if is_local(folder):
        for path in local_path(folder).glob(".*.tmp"):
            path.unlink(missing_ok=True)


def is_writable(uri: str) -> bool:
    """Whether a local folder could be made and written to; a remote one is taken at its word."""
    if not is_local(uri):
        return True
    folder = local_path(uri).absolute()
    while not folder.exists():
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def is_empty_folder(uri: str, but: Sequence[str] = ()) -> bool:
    """Whether a folder holds nothing, `but` for files of these names.

    Raises:
        OSError: the storage cannot be listed.
    """
    if is_local(uri):
        path = local_path(uri)
        return not path.exists() or all(entry.name in but for entry in path.iterdir())
    return all(name.rpartition("/")[2] in but for name in list_files(uri))


def _pack(path: Path, suffix: str) -> Any:
    """Open for writing; packed if the file's final name says so."""
    if suffix not in PACKED:
        return path.open("wb")
    return smart_open.open(str(path), "wb", compression=suffix)


def _open(uri: str, mode: str) -> Any:
    return smart_open.open(str(local_path(uri)) if is_local(uri) else uri, mode)
