"""Where CI runs, tests that need an optional tool must not be skipped for want of it."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest

from tilewright.interp.stock import find_tool


@pytest.mark.skipif(not os.environ.get("CI"), reason="a developer's machine may lack them")
def test_continuous_integration_has_every_optional_tool() -> None:
    missing = [name for name in ("mlir-opt", "mlir-runner") if find_tool(name) is None]
    missing += [name for name in ("verilator", "g++", "ccache") if shutil.which(name) is None]
    missing += [name for name in ("torch",) if importlib.util.find_spec(name) is None]
    assert not missing
