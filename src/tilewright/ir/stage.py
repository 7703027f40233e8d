"""A module at one level, with the constants it names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xdsl.dialects.builtin import ModuleOp

    from tilewright.ir.weights import WeightStore


@dataclass
class Stage:
    """A module at one level, with the constants it names."""

    module: ModuleOp
    weights: WeightStore
