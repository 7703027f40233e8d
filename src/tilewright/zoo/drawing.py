"""Inputs for the zoo's models: pages, text lines, textures, sentences, sounds, or the user's own.

All of it is seeded and drawn with the font that Pillow carries, so that every machine gets the same
pictures and nothing is downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.runtime.preprocess import list_samples, read_picture
from tilewright.zoo.fetching import find
from tilewright.zoo.recipes import Recipe
from tilewright.zoo.signals import sentence_tokens, voice_step

if TYPE_CHECKING:
    from collections.abc import Callable

    from PIL.Image import Image

Array = npt.NDArray[Any]

WORDS = tuple(
    word
    for line in (
        "the of and to in a is that for it as was with be by on not he this are or his from at",
        "which but have an had they you were their one all we can her has there been if more",
        "when will would who so no out up into river mountain engine window harvest copper",
        "letter winter market bridge measure garden history paper number surface evening",
        "between under account village carbon signal music station water weight morning picture",
        "change system science reason against",
    )
    for word in line.split()
)


@dataclass(frozen=True)
class ZooInputs:
    """Model inputs and, when known, what they show."""

    name: str
    """Of the model's input."""
    arrays: list[Array]
    """Each of the model's (first) input shape: float32, or int64 tokens."""
    labels: list[int] | None
    """Class of each array, or None."""
    others: list[dict[str, Array]] = field(default_factory=list[dict[str, Array]])
    """The model's further inputs for each array; empty if there are none."""

    def samples(self) -> list[dict[str, Array]]:
        """Return the arrays as model inputs by name."""
        others = self.others or [{} for _ in self.arrays]
        return [{self.name: array, **more} for array, more in zip(self.arrays, others, strict=True)]


def inputs(name: str, count: int, seed: int = 0, pictures: Path | None = None) -> ZooInputs:
    """Return `count` inputs for a zoo model.

    Pages and text lines are drawn, in every orientation in turn, with their labels. Models of
    photographs take them from the folder `pictures`; without it they get textures, which have the
    statistics of photographs but show nothing. Others get sentences of usual words, or steps of
    speech-like sound.

    Raises:
        UsageError: no such model, or pictures for one that takes none.
        TilewrightError: E0301 when the folder has no usable pictures.
    """
    recipe = find(name)
    if recipe.preprocess is None:
        if pictures is not None:
            raise UsageError("E0702", f"model `{name}` takes no pictures")
        made = [_signal(recipe, index, seed) for index in range(count)]
        first = [sample.pop(recipe.input_name) for sample in made]
        return ZooInputs(recipe.input_name, first, None, made)
    if pictures is not None:
        files = [
            file for file in list_samples(pictures) if file.suffix.lower() not in (".npy", ".npz")
        ]
        if not files:
            raise TilewrightError("E0301", f"folder `{pictures}` holds no pictures")
        arrays = [read_picture(file, recipe.preprocess) for file in files[:count]]
        return ZooInputs(recipe.input_name, arrays, None)
    draw: Callable[[int, int], tuple[Image, int | None]]
    if recipe.pictures in ("sheets", "text"):
        # The same, upright only: every other, or every fourth, is.
        draw, every = (page, 4) if recipe.pictures == "sheets" else (text_line, 2)
        drawn = [(draw(every * index, seed)[0], None) for index in range(count)]
    else:
        draw = {"pages": page, "lines": text_line}.get(recipe.pictures, texture)
        drawn = [draw(index, seed) for index in range(count)]
    labels = [label for _, label in drawn if label is not None]
    return ZooInputs(
        recipe.input_name,
        [recipe.preprocess.apply(picture) for picture, _ in drawn],
        labels if len(labels) == count else None,
    )


def _signal(recipe: Recipe, index: int, seed: int) -> dict[str, Array]:
    if recipe.pictures == "sentences":
        return sentence_tokens(_random(seed, index, 4), recipe.input_shape[1])
    return voice_step(_random(seed, index, 5))


def _random(seed: int, index: int, kind: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64([seed, index, kind]))


def _sentence(random: np.random.Generator, words: int) -> str:
    chosen = [WORDS[int(i)] for i in random.integers(0, len(WORDS), words)]
    return " ".join(chosen).capitalize() + "."


def page(index: int, seed: int) -> tuple[Image, int]:
    """Draw a page of text; return it and its class: clockwise turn in quarters, `index mod 4`."""
    from PIL import Image, ImageDraw, ImageFont

    random = _random(seed, index // 4, 1)
    width, height = int(random.integers(620, 800)), int(random.integers(760, 1000))
    paper = int(random.integers(235, 256))
    ink = int(random.integers(0, 50))
    sheet = Image.new("RGB", (width, height), (paper, paper, paper))
    draw = ImageDraw.Draw(sheet)
    size = int(random.integers(20, 31))
    body, title = ImageFont.load_default(size), ImageFont.load_default(2 * size)
    margin = int(random.integers(35, 75))
    y = margin
    draw.text((margin, y), _sentence(random, 2), fill=(ink, ink, ink), font=title)
    y += 3 * size
    left = True
    while y < height - margin - size:
        line = _sentence(random, 14)
        # A paragraph starts indented and ends short: what tells top from bottom, left from right.
        x = margin + (2 * size if left else 0)
        room = width - margin - x
        ends = random.random() < 0.2
        if ends:
            room = int(room * random.uniform(0.3, 0.8))
        while draw.textlength(line, font=body) > room and " " in line:
            line = line.rsplit(" ", 1)[0]
        draw.text((x, y), line, fill=(ink, ink, ink), font=body)
        y += int(size * (2.2 if ends else 1.4))
        left = ends
    quarter = index % 4
    return sheet.rotate(-90 * quarter, expand=True), quarter


def text_line(index: int, seed: int) -> tuple[Image, int]:
    """Draw one line of text; return it and its class: 0 upright, 1 upside down (`index mod 2`)."""
    from PIL import Image, ImageDraw, ImageFont

    random = _random(seed, index // 2, 2)
    size = int(random.integers(28, 44))
    font = ImageFont.load_default(size)
    text = _sentence(random, int(random.integers(2, 4)))
    paper, ink = int(random.integers(220, 256)), int(random.integers(0, 60))
    length = ImageDraw.Draw(Image.new("RGB", (8, 8))).textlength(text, font=font)
    strip = Image.new("RGB", (int(length) + 12, int(size * 1.4)), (paper, paper, paper))
    ImageDraw.Draw(strip).text((6, int(size * 0.08)), text, fill=(ink, ink, ink), font=font)
    return strip.rotate(180 * (index % 2)), index % 2


def texture(index: int, seed: int, side: int = 256) -> tuple[Image, None]:
    """Draw a coloured texture whose spectrum falls as 1/f, as in photographs."""
    from PIL import Image

    random = _random(seed, index, 3)
    rows, columns = np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)[None, :]
    radius = np.maximum(np.hypot(rows, columns), 1.0 / side)
    planes: list[Array] = []
    shared = random.standard_normal((side, side))
    for _ in range(3):
        noise = 0.8 * shared + 0.6 * random.standard_normal((side, side))
        plane = np.fft.irfft2(np.fft.rfft2(noise) / radius, s=(side, side))
        planes.append(plane / plane.std())
    contrast, light = random.uniform(35, 65), random.uniform(90, 150)
    pixels = np.clip(np.stack(planes, -1) * contrast + light, 0, 255).astype(np.uint8)
    return Image.fromarray(pixels), None
