"""Calls to storage that fail: for a moment, for good, or because there is nothing."""

import errno
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pipeline import failpoints

T = TypeVar("T")

_PAUSES = (0.2, 1.0)  # Seconds before another try.
_LASTING = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR),
    *(errno.ENOTDIR, errno.ENAMETOOLONG, errno.EEXIST, errno.ENOTEMPTY, errno.EINVAL, errno.ELOOP),
)
_LASTING_SIGNS = (
    "AccessDenied",
    "NoSuchBucket",
    "Forbidden",
    "403",
    "InvalidAccessKey",
    "Unrecognized",
)


def persist(action: Callable[[], T]) -> T:
    """Do it, again and again if need be: storage fails for a moment at times."""
    for pause in (*_PAUSES, None):
        try:
            failpoints.reach("storage")
            return action()
        except OSError as error:
            if pause is None or not _may_pass(error):
                raise
            time.sleep(pause)
    raise AssertionError


def _may_pass(error: OSError) -> bool:
    """Whether a call that failed like this may do better in a moment."""
    if error.errno is not None:
        return not is_missing(error) and error.errno not in _LASTING
    return not is_missing(error) and not any(sign in str(error) for sign in _LASTING_SIGNS)


@contextmanager
def as_os_error() -> Iterator[None]:
    """Every client library has errors of its own; callers know one kind."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def is_missing(error: OSError) -> bool:
    """Whether an error says that there is no such object.

    The system's errors say so by their number: a path may have "404" in it.
    """
    if isinstance(error, FileNotFoundError) or error.errno is not None:
        return isinstance(error, FileNotFoundError)
    text = str(error)
    return any(sign in text for sign in ("NoSuchKey", "404", "Not Found", "does not exist"))
