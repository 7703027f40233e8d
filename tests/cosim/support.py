"""What the tests of the co-simulation share."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

STUB = Path(__file__).with_name("stub_top.sv")

needs_verilator = pytest.mark.skipif(
    not os.environ.get("CI") and not (shutil.which("verilator") and shutil.which("g++")),
    reason="verilator and g++ are not installed",
)
"""Never skipped where CI runs: there the tools must be installed."""
