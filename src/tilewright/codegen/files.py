"""Writing files so that they are whole or not there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tilewright.diagnostics import TilewrightError


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


def check_writable(path: Path) -> None:
    """Find out now whether `atomic_output(path)` will work later.

    Raises:
        TilewrightError: E0701.
    """
    path = Path(path)
    if path.is_dir():
        raise TilewrightError("E0701", f"cannot write `{path}`", ["it is a folder"])
    _refuse_special(path)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    except OSError as error:
        raise _unwritable(path, error) from error
    os.close(handle)
    Path(name).unlink()


def _refuse_special(path: Path) -> None:
    """Refuse devices and pipes: root may rename over `/dev/null`, which breaks the machine."""
    if path.exists() and not path.is_file():
        raise TilewrightError("E0701", f"cannot write `{path}`", ["it is not an ordinary file"])


def _unwritable(path: Path, error: OSError) -> TilewrightError:
    return TilewrightError("E0701", f"cannot write `{path}`", [error.strerror or str(error)])
