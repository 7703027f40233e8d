"""Is the preprocessing the one the model was trained with? Variants of it, run on real pictures.

Every picture goes through each variant three times: as it is, mirrored, and cropped a little. With
`q` the mean class probabilities of the three and `m` the mean of `q` over all pictures, a picture
scores

    sum over classes of q * ln(q / m)      nats, 0 .. ln(number of pictures)

It is high when the model is sure, says the same of all three, and says other things of other
pictures. How sure it seems must not count by itself: a network with few biases makes k-fold logits
of k-fold inputs, and values of 0..255 can make one very sure of the same class for everything. So
the logits of every variant are brought to the same spread, one for all at which the surest variant
gives its best class a probability of `SUREST`.

Two variants are compared picture by picture; how sure the difference is comes from flipping its
signs at random. With labels a picture scores `ln(max(q[label], FLOOR))` instead.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError
from tilewright.runtime.preprocess import PICTURE_SUFFIXES, PRESETS, Preprocess, list_samples

if TYPE_CHECKING:
    from PIL.Image import Image

Array = npt.NDArray[Any]
Verdict = Literal["fits", "wrong", "unknown"]

PICTURES = 32
"""At most so many pictures are run, spread over the folder."""
LEAST = 8
"""Fewer pictures say nothing about a dozen variants."""
SURE = 0.05
"""Chance, over all variants tried, of so large a difference if there were none."""
SAME = 0.02
"""Nats below which two variants count as equally good."""
FLOOR = 1e-3
"""Least probability of the right class that counts, so that one picture cannot decide."""
FLIPS = 20_000
SUREST = 0.5
"""Mean probability of the best class that logits are scaled to; there a difference shows best."""
CROP = 0.88
"""Share of width and height that the cropped copy keeps."""


@dataclass(frozen=True)
class Variant:
    """One way to make inputs of pictures."""

    preprocess: Preprocess
    changes: tuple[str, ...]
    """What is other than declared, in words; none for the declared preprocessing."""

    @property
    def name(self) -> str:
        """The changes in one line."""
        return ", ".join(self.changes) or "as declared"


@dataclass(frozen=True)
class Tried:
    """How a variant did."""

    variant: Variant
    score: float
    """Mean over pictures, nats."""
    right: int | None
    """Pictures whose best class is the label; None without labels."""
    confidence: float
    """Mean probability of the best class at the common spread of logits, 0..1."""
    chance: float
    """Against the declared one: the chance of such a difference if there were none, 0..1."""


@dataclass(frozen=True)
class PreprocessCheck:
    """Which variant fits the model best, and how sure that is."""

    verdict: Verdict
    reason: str
    pictures: int
    labelled: bool
    tried: list[Tried]
    """Best first."""
    best: Tried | None = None
    """The variant to use instead; None unless the verdict is `wrong`."""


def variants_of(declared: Preprocess) -> list[Variant]:
    """Return the declared preprocessing and what users confuse it with, each once."""
    unit, signed, imagenet, caffe, raw = (
        PRESETS[name] for name in ("unit", "signed", "imagenet", "caffe", "raw")
    )
    other = "bgr" if declared.colours == "rgb" else "rgb"
    found = [Variant(declared, ())]
    found.append(Variant(replace(declared, colours=other), (f"colours {other}",)))
    for words, preset in (
        ("values 0..1 (no mean, no deviation)", unit),
        ("values -1..1", signed),
        ("ImageNet mean and deviation", imagenet),
        ("values 0..255 (not divided, no mean)", raw),
        ("0..255 minus the mean of each colour", caffe),
    ):
        for colours in (declared.colours, other):
            # Means are in the model's order of colours.
            same = preset.colours == colours
            made = replace(
                declared,
                colours=colours,
                mean=preset.mean if same else preset.mean[::-1],
                std=preset.std if same else preset.std[::-1],
                divide=preset.divide,
            )
            changes = () if colours == declared.colours else (f"colours {other}",)
            if all(item.preprocess != made for item in found):
                found.append(Variant(made, (words, *changes)))
    return found


def read_labels(path: Path) -> dict[str, int]:
    """Read a CSV file with columns `file` and `label` (a class index); others are ignored.

    Raises:
        TilewrightError: E0301, it cannot be read, or a row is wrong.
    """
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise TilewrightError("E0301", f"labels `{path}` cannot be read", [str(error)]) from error
    found: dict[str, int] = {}
    for number, row in enumerate(rows, 2):
        name, label = row.get("file"), row.get("label")
        if not name or label is None or not label.strip().isdecimal():
            raise TilewrightError(
                "E0301",
                f"labels `{path}`: line {number} needs a file and a class index",
                [f"it has {dict(row)}"],
                "the first line names the columns: file,label",
            )
        found[name] = int(label)
    if not found:
        raise TilewrightError("E0301", f"labels `{path}` are empty")
    return found


def picture_files(folder: Path, labels: Mapping[str, int] | None = None) -> list[Path]:
    """Return the pictures of a folder, those with a label if there are labels."""
    files = [file for file in list_samples(folder) if file.suffix.lower() in PICTURE_SUFFIXES]
    return files if labels is None else [file for file in files if file.name in labels]


def logits(output: Array) -> Array:
    """Return the class scores of one output less their mean; logarithms if it is a distribution."""
    values = output.astype(np.float64).reshape(-1)
    if values.size and values.min() >= 0 and abs(values.sum() - 1) < 1e-3:
        values = np.log(np.maximum(values, 1e-12))
    return values - values.mean()


def alike(scores: Array) -> Array:
    """Return class probabilities of `[picture, variant, copy, class]` logits of mean 0.

    Every variant's logits are brought to one spread, at which the surest variant's best class has
    a mean probability of `SUREST`.
    """
    spread = np.sqrt(np.mean(scores**2, axis=(0, 2, 3)))
    same = scores / np.where(spread > 0, spread, 1.0)[None, :, None, None]
    low, high = 1e-3, 1e3
    for _ in range(40):
        factor = math.sqrt(low * high)
        best = _softmax(factor * same[:, :, 0]).max(axis=-1).mean(axis=0)
        low, high = (factor, high) if best.max() < SUREST else (low, factor)
    return _softmax(math.sqrt(low * high) * same)


def _softmax(values: Array) -> Array:
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def check_preprocess(
    run: Callable[[Array], Array],
    files: Sequence[Path],
    declared: Preprocess,
    labels: Mapping[str, int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> PreprocessCheck:
    """Run variants of `declared` on pictures and judge which fits the model.

    Args:
        run: gives the float model's class scores for one input.
        files: pictures.
        declared: how they are prepared now; its size and layout are the model's.
        labels: class index by file name.
        progress: called with the number of pictures done.

    Raises:
        TilewrightError: E0301, a picture cannot be read.
    """
    labelled = labels is not None
    if labels is not None:
        files = [file for file in files if file.name in labels]
    if len(files) < LEAST:
        return PreprocessCheck(
            "unknown",
            f"there are {len(files)} pictures; {LEAST} are needed to tell variants apart",
            len(files),
            labelled,
            [],
        )
    picks = np.linspace(0, len(files) - 1, min(PICTURES, len(files))).round().astype(int)
    files = [files[index] for index in picks]
    variants = variants_of(declared)
    answers = alike(np.array(list(_answers(run, files, variants, progress))))
    mean = answers.mean(axis=2)
    right: list[int] | None = None
    if labels is None:
        scores = np.stack([_scores(mean[:, v]) for v in range(len(variants))])
    else:
        wanted = np.array([labels[file.name] for file in files])
        _check_labels(wanted, mean.shape[-1])
        said = np.take_along_axis(mean, wanted[:, None, None], axis=2)[..., 0]
        scores = np.log(np.maximum(said, FLOOR)).T
        # The picture as it is gives the class that is right or not.
        best = answers[:, :, 0].argmax(axis=-1)
        right = [int((best[:, v] == wanted).sum()) for v in range(len(variants))]
    tried = [
        Tried(
            variant,
            float(scores[v].mean()),
            None if right is None else right[v],
            float(answers[:, v, 0].max(axis=-1).mean()),
            1.0
            if not v
            else chance_of(np.abs(scores[v].mean() - scores[0].mean()), scores[v] - scores[0]),
        )
        for v, variant in enumerate(variants)
    ]
    return _judge(tried, len(files), labelled)


def _check_labels(wanted: Array, classes: int) -> None:
    if wanted.max() >= classes:
        raise TilewrightError(
            "E0301",
            f"label {int(wanted.max())} is no class of the model",
            [f"it has {classes} classes, counted from 0"],
        )


def _answers(
    run: Callable[[Array], Array],
    files: Sequence[Path],
    variants: Sequence[Variant],
    progress: Callable[[int], None] | None,
) -> Any:
    from PIL import Image, ImageOps

    for done, file in enumerate(files, 1):
        try:
            with Image.open(file) as opened:
                picture = opened.convert("RGB")
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise TilewrightError(
                "E0301", f"picture `{file}` cannot be read", [str(error)]
            ) from error
        copies = (picture, ImageOps.mirror(picture), _cropped(picture))
        yield [
            [logits(run(variant.preprocess.apply(copy))) for copy in copies] for variant in variants
        ]
        if progress is not None:
            progress(done)


def _cropped(picture: Image) -> Image:
    width, height = (max(1, round(side * CROP)) for side in picture.size)
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def _scores(q: Array) -> Array:
    """Return every picture's score (module docstring); `q` is [pictures, classes]."""
    tiny = 1e-300
    return (q * (np.log(q + tiny) - np.log(q.mean(axis=0) + tiny))).sum(axis=1)


def chance_of(seen: float, differences: Array, seed: int = 0) -> float:
    """Return the chance that random signs of paired differences have a mean of `seen` or more."""
    if not np.any(differences):
        return 1.0
    random = np.random.default_rng(seed)
    signs = random.integers(0, 2, (FLIPS, differences.size)) * 2.0 - 1.0
    means = np.abs(signs @ differences) / differences.size
    # The signs that were seen are one of the possibilities.
    return float((1 + np.count_nonzero(means >= seen - 1e-12)) / (FLIPS + 1))


def _judge(tried: list[Tried], pictures: int, labelled: bool) -> PreprocessCheck:
    declared = tried[0]
    ranked = sorted(tried, key=lambda item: -item.score)
    others = len(tried) - 1
    top = ranked[0]

    def figures(item: Tried) -> str:
        words = f"{item.score:.2f} nats"
        return words if item.right is None else f"{item.right} of {pictures} right, {words}"

    if not labelled and top.score < SAME:
        reason = (
            "the model says the same of all pictures, whatever is done to them: give pictures of "
            "several classes, or labels"
        )
        return PreprocessCheck("unknown", reason, pictures, labelled, ranked)
    # As good as the best: then what changes least is meant.
    good = [item for item in ranked if item.score >= top.score - SAME]
    best = min(good, key=lambda item: (len(item.variant.changes), -item.score))
    if best is declared:
        doubtful = [
            item.variant.name
            for item in ranked
            if item is not declared and item.chance * others >= SURE
        ]
        reason = f"the declared preprocessing fits best of {len(tried)}: {figures(declared)}"
        if doubtful:
            reason += f"; not told apart from: {'; '.join(doubtful)}"
        return PreprocessCheck("fits", reason, pictures, labelled, ranked)
    chance = min(1.0, best.chance * others)
    if chance < SURE and best.score - declared.score >= SAME:
        reason = (
            f"`{best.variant.name}` fits better than the declared preprocessing: {figures(best)} "
            f"against {figures(declared)} (chance of that by accident {chance_text(chance)})"
        )
        return PreprocessCheck("wrong", reason, pictures, labelled, ranked, best)
    reason = (
        f"{pictures} pictures do not tell: `{best.variant.name}` has {figures(best)}, the declared "
        f"preprocessing {figures(declared)}; such a difference is accident with a chance of "
        f"{chance_text(chance)}"
    )
    return PreprocessCheck("unknown", reason, pictures, labelled, ranked)


def chance_text(chance: float) -> str:
    """Return a chance in words: `below 0.1 %`, `12 %`."""
    if chance < 0.001:
        return "below 0.1 %"
    return f"{100 * chance:.2g} %" if math.isfinite(chance) else "unknown"


def option_text(declared: Preprocess, wanted: Preprocess) -> str:
    """Return what to write behind `--preprocess` to get `wanted`."""
    for name, preset in PRESETS.items():
        keys = ("mean", "std", "divide", "colours")
        if all(getattr(preset, key) == getattr(wanted, key) for key in keys):
            parts = [name]
            break
    else:
        parts = [
            "raw",
            "mean=" + ":".join(f"{value:g}" for value in wanted.mean),
            "std=" + ":".join(f"{value:g}" for value in wanted.std),
            f"divide={wanted.divide:g}",
            f"colours={wanted.colours}",
        ]
    base = PRESETS[parts[0]]
    for key in ("resize", "resize_to", "filter"):
        if getattr(wanted, key) != getattr(base, key):
            parts.append(f"{key.replace('_', '-')}={getattr(declared, key)}")
    return ",".join(parts)
