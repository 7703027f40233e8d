"""Writing files so that they are whole or not there."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tilewright.diagnostics import TilewrightError, UsageError


@contextmanager
def atomic_output(path: Path) -> Generator[Path]:
    """Give a scratch file in the folder of `path`, and rename it to `path` if the block succeeds.

    When the block fails or is interrupted, nothing is left.

    Raises:
        TilewrightError: E0701 when the folder or file cannot be written.
    """
    path = Path(path)
    _refuse_special(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
        os.close(handle)
    except OSError as error:
        raise _unwritable(path, error) from error
    scratch = Path(name)
    try:
        yield scratch
        # mkstemp makes private files; give what a plain open() would.
        mask = os.umask(0)
        os.umask(mask)
        scratch.chmod(0o666 & ~mask)
        scratch.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from error
    finally:
        scratch.unlink(missing_ok=True)


def check_writable(path: Path, *read: Path | str | None) -> None:
    """Find out now whether `atomic_output(path)` will work later.

    Args:
        path: the file to write.
        read: files that are read, which must not be replaced.

    Raises:
        TilewrightError: E0701.
        UsageError: E0702, `path` is one of the files read.
    """
    path = Path(path)
    if _state(path) == "folder":
        raise TilewrightError("E0701", f"cannot write `{path}`", ["it is a folder"])
    _refuse_special(path)
    for other in read:
        if other is not None and _same(path, Path(other)):
            raise UsageError("E0702", f"`{path}` is read and would be overwritten")
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(handle)
    Path(name).unlink()


def _state(path: Path) -> str:
    """Return `folder`, `file`, `special` or, when there is nothing, an empty string.

    Raises:
        TilewrightError: E0701, no file can have that name.
    """
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        raise _unwritable(path, error) from error
    except ValueError as error:  # a zero byte
        raise TilewrightError("E0701", f"cannot write {str(path)!r}", [str(error)]) from error
    return "folder" if stat.S_ISDIR(mode) else "file" if stat.S_ISREG(mode) else "special"


def _same(path: Path, other: Path) -> bool:
    try:
        return path.resolve() == other.resolve() or path.samefile(other)
    except (OSError, ValueError, RuntimeError):
        return False


def _refuse_special(path: Path) -> None:
    """Refuse devices and pipes: root may rename over `/dev/null`, which breaks the machine."""
    if _state(path) == "special":
        raise TilewrightError("E0701", f"cannot write `{path}`", ["it is not an ordinary file"])


def _unwritable(path: Path, error: OSError) -> TilewrightError:
    return TilewrightError("E0701", f"cannot write `{path}`", [error.strerror or str(error)])
