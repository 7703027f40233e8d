"""Collects `.mlir` files of tests/dialects and tests/transforms (docs/guides/developing.md)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.lit import LitError, run_file

HERE = Path(__file__).parent

# The same examples on every machine, and no verdict by the clock of a busy one. `make nightly`
# draws new ones (--hypothesis-profile=nightly).
settings.register_profile("default", derandomize=True, deadline=None)
settings.register_profile("nightly", max_examples=500, deadline=None, print_blob=True)
settings.load_profile("default")


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Collect `.mlir` files in the two folders."""
    inside = any(file_path.is_relative_to(HERE / name) for name in ("dialects", "transforms"))
    if file_path.suffix == ".mlir" and inside:
        return MlirFile.from_parent(parent, path=file_path)
    return None


class MlirFile(pytest.File):
    """One `.mlir` file: one test."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the test."""
        yield MlirItem.from_parent(self, name="run")


class MlirItem(pytest.Item):
    """Runs the RUN lines of a file."""

    def runtest(self) -> None:
        """Run; raises `LitError`."""
        run_file(self.path)

    def repr_failure(
        self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None
    ) -> str:
        """Show what the tools said instead of a traceback of the harness."""
        if isinstance(excinfo.value, LitError):
            return str(excinfo.value)
        return str(excinfo.getrepr(style="short"))

    def reportinfo(self) -> tuple[Path, int, str]:
        """Name the test after its file."""
        return self.path, 0, str(self.path.relative_to(HERE))
