"""What is read: files, the files of folders and globs, and data sets of the hub, each with its format."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from pipeline import readers, storage
from pipeline.errors import InputError
from pipeline.readers import RawRow

__all__ = [
    "RawRow",
    "Sources",
    "check_source",
    "column_types",
    "find_sources",
    "locate",
    "read_rows",
]

_HUB = "hf://"
_READERS: dict[str, Callable[[str], Iterator[RawRow]]] = {
    ".jsonl": readers.read_jsonl,
    ".ndjson": readers.read_jsonl,
    ".csv": lambda uri: readers.read_csv(uri, ","),
    ".tsv": lambda uri: readers.read_csv(uri, "\t"),
    ".parquet": readers.read_parquet,
    ".txt": readers.read_text,
}
_BY_ROWS = (".parquet", _HUB)
_EXPECTED = f"{', '.join(_READERS)}, each also with {' or '.join(storage.PACKED)} behind it"


@dataclass(frozen=True)
class Sources:
    """What an input names.

    Attributes:
        uris: files and data sets, in the order they are read.
        ignored: files of the named folders whose format is none of ours.
    """

    uris: tuple[str, ...]
    ignored: tuple[str, ...] = ()


def find_sources(given: Sequence[str], planned: Collection[str] = ()) -> Sources:
    """The files that paths, URIs, folders and globs stand for; those of one folder or glob by name.

    What is planned will not be read again: such a file need not be there any more.

    Raises:
        InputError: one does not exist, has an unknown format or is named twice; a folder or glob has no
            file.
    """
    uris: list[str] = []
    ignored: list[str] = []
    for name in given:
        found, others = _expand(name)
        uris += found
        ignored += others
    for uri in uris:
        if uri not in planned:
            check_source(uri)
    if twice := [uri for uri in uris if uris.count(uri) > 1]:
        raise InputError(f"{twice[0]}: is named twice in the input")
    return Sources(tuple(uris), tuple(ignored))


def check_source(uri: str) -> None:
    """Refuse a source that cannot be read, before anything else is started."""
    if uri.startswith(_HUB):
        readers.parse_hub(uri)
        return
    if storage.is_local(uri) and storage.local_path(uri).is_dir():
        raise InputError(f"{uri}: is a folder; name the files in it")
    if _format(uri) not in _READERS:
        raise InputError(f"{uri}: unknown format; expected one of {_EXPECTED}")
    try:
        found = storage.exists(uri)
    except (OSError, ValueError) as error:
        raise InputError(f"{uri}: cannot be opened ({error})") from error
    if not found:
        raise InputError(f"{uri}: no such file")


def source_stamp(uri: str) -> tuple[int, int] | None:
    """How long a source's file is and when it was changed (ns since the epoch); None if nobody tells."""
    try:
        return None if uri.startswith(_HUB) else storage.stamp(uri)
    except (OSError, ValueError):
        return None


def read_rows(uri: str) -> Iterator[RawRow]:
    """Yield the rows of a source in order; raises InputError if the source itself is unreadable."""
    return readers.read_hub(uri) if uri.startswith(_HUB) else _READERS[_format(uri)](uri)


def column_types(uri: str) -> dict[str, pa.DataType]:
    """The types a source declares for its columns; none for text of any kind."""
    if uri.startswith(_HUB):
        return readers.hub_types(uri)
    return readers.parquet_types(uri) if _format(uri) == ".parquet" else {}


def locate(uri: str, row: int) -> str:
    """Where a person finds a row."""
    return f"{uri}: {'row' if _format(uri) in _BY_ROWS else 'line'} {row}"


def _format(uri: str) -> str:
    """How a source is read: `hf://`, or how its name ends, less what it was packed with."""
    if uri.startswith(_HUB):
        return _HUB
    for packed in storage.PACKED:
        uri = uri.removesuffix(packed)
    return f".{uri.rsplit('.', 1)[-1]}"


def _expand(name: str) -> tuple[list[str], list[str]]:
    """What a name stands for, and what lies beside it and is not read."""
    is_file = _format(name) in _READERS and not storage.is_local(name)
    if name.startswith(_HUB) or (is_file and not storage.is_pattern(name)):
        return [name], []
    try:
        if storage.is_pattern(name):
            found = storage.glob(name)
            if not found:
                raise InputError(f"{name}: no file has such a name")
            return found, []
        if not storage.is_folder(name):
            return [name], []
        files = list(storage.list_files(name))
    except (OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name}: cannot be listed ({error})") from error
    ours = [file for file in files if _format(file) in _READERS]
    if not ours:
        raise InputError(f"{name}: no file in this folder has a known format ({_EXPECTED})")
    return ours, [file for file in files if file not in ours]
