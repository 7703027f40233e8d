"""Real models to try the compiler on: `prepare(name)` gives ONNX, `inputs(name, n)` inputs."""

from __future__ import annotations

from tilewright.zoo.drawing import ZooInputs, inputs
from tilewright.zoo.fetching import cache_folder, cached_path, find, prepare
from tilewright.zoo.recipes import RECIPES, Recipe

__all__ = [
    "RECIPES",
    "Recipe",
    "ZooInputs",
    "cache_folder",
    "cached_path",
    "find",
    "inputs",
    "prepare",
]
