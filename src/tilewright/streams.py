"""Standard output that is closed, full, or read by nobody any more."""

from __future__ import annotations

import errno
import os
import sys

from tilewright.diagnostics import TilewrightError

_FULL = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT, errno.EFBIG)


def open_missing() -> None:
    """Give a standard stream that the caller has closed (`>&-`) a place to go."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - lives as long as the process
    if sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def is_output_failure(error: OSError) -> bool:
    """Return whether writing standard output failed: such errors name no file."""
    return error.errno in _FULL and error.filename is None


def give_up_output(error: OSError) -> int:
    """Say that standard output failed, unless its reader has gone (`| head`); return 1."""
    # Python would complain again when it flushes at exit.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno != errno.EPIPE:
        reason = error.strerror or str(error)
        print(TilewrightError("E0701", "cannot write standard output", [reason]), file=sys.stderr)
    return 1
