"""Wrong colours, means and ranges are found by running variants; nothing is claimed without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tilewright.diagnostics import TilewrightError
from tilewright.quant.advice import preprocess_step
from tilewright.quant.variants import (
    LEAST,
    PreprocessCheck,
    alike,
    chance_of,
    check_preprocess,
    logits,
    option_text,
    picture_files,
    read_labels,
    variants_of,
)
from tilewright.runtime.preprocess import PRESETS, Preprocess, parse_preprocess

Array = np.ndarray[Any, Any]
SIZE = 16
CLASSES = 12
RIGHT = replace(PRESETS["imagenet"], size=(SIZE, SIZE), resize="square", resize_to=SIZE)


def templates() -> Array:
    """Return pixels 0..255 of every class: blotches of colour, symmetric so that mirrors match."""
    rng = np.random.default_rng(0)
    coarse = rng.uniform(30, 225, (CLASSES, 4, 4, 3))
    half = coarse.repeat(4, 1).repeat(4, 2)
    return (half + half[:, :, ::-1]) / 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two noisy pictures of every class, with labels."""
    from PIL import Image

    rng = np.random.default_rng(1)
    path = tmp_path_factory.mktemp("pictures")
    rows = ["file,label,name"]
    for index in range(2 * CLASSES):
        pixels = templates()[index % CLASSES] + rng.normal(0, 25, (SIZE, SIZE, 3))
        name = f"{index:02}.png"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path / name)
        rows.append(f"{name},{index % CLASSES},thing")
    (path / "labels.csv").write_text("\n".join(rows) + "\n")
    return path


def model(value: Array) -> Array:
    """Score classes by distance to what the right preprocessing makes of the templates."""
    known = (templates() / 255 - np.array(RIGHT.mean)) / np.array(RIGHT.std)
    picture = value[0].transpose(1, 2, 0)
    return -0.012 * ((known - picture) ** 2).sum(axis=(1, 2, 3))[None]


FAULTS: dict[str, tuple[Preprocess, str]] = {
    "swapped colours": (replace(RIGHT, colours="bgr"), "colours rgb"),
    "missing mean": (replace(RIGHT, mean=(0.0, 0.0, 0.0)), "ImageNet mean and deviation"),
    "no mean and no deviation": (
        replace(RIGHT, mean=(0.0,) * 3, std=(1.0,) * 3), "ImageNet mean and deviation",
    ),
    "0..255": (
        replace(RIGHT, mean=(0.0,) * 3, std=(1.0,) * 3, divide=1.0), "ImageNet mean and deviation",
    ),
}  # fmt: skip


@pytest.mark.parametrize("labelled", [False, True])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_seeded_fault_is_pointed_at(folder: Path, fault: str, labelled: bool) -> None:
    wrong, change = FAULTS[fault]
    labels = read_labels(folder / "labels.csv") if labelled else None
    found = check_preprocess(model, picture_files(folder), wrong, labels)
    assert found.verdict == "wrong"
    assert found.best is not None
    assert found.best.variant.changes == (change,)
    assert found.pictures == 2 * CLASSES
    step = preprocess_step(found, "", wrong)
    assert step.verdict == "suspect"
    assert step.names == [change]
    # What it says to write gives the right preprocessing.
    option = step.tries[0].removeprefix("--preprocess ")
    made = replace(parse_preprocess(option), size=RIGHT.size, resize_to=RIGHT.resize_to)
    assert made == RIGHT
    assert "by accident" in found.reason


@pytest.mark.parametrize("labelled", [False, True])
def test_the_right_one_fits(folder: Path, labelled: bool) -> None:
    labels = read_labels(folder / "labels.csv") if labelled else None
    found = check_preprocess(model, picture_files(folder), RIGHT, labels)
    assert found.verdict == "fits"
    assert found.best is None
    assert found.tried[0].variant.changes == ()
    assert preprocess_step(found, "", RIGHT).verdict == "ok"
    if labelled:
        assert found.tried[0].right == 2 * CLASSES


def test_a_sure_model_that_says_the_same_of_everything_tells_nothing(folder: Path) -> None:
    """Confidence alone is no evidence."""
    found = check_preprocess(
        lambda _: np.eye(CLASSES)[:1] * 50, picture_files(folder), replace(RIGHT, colours="bgr")
    )
    assert found.verdict == "unknown"
    assert "the same of all pictures" in found.reason


def test_noise_is_no_evidence(folder: Path) -> None:
    """A model that looks at nothing: some variant is best, but not surely."""
    rng = np.random.default_rng(9)
    for _ in range(5):
        found = check_preprocess(
            lambda _: rng.normal(size=(1, CLASSES)), picture_files(folder), RIGHT
        )
        assert found.verdict != "wrong"


def test_few_pictures_are_refused(folder: Path) -> None:
    found = check_preprocess(model, picture_files(folder)[: LEAST - 1], RIGHT)
    assert found == PreprocessCheck(
        "unknown", f"there are 7 pictures; {LEAST} are needed to tell variants apart", 7, False, []
    )


def test_every_variant_is_tried_once() -> None:
    for preset in PRESETS.values():
        found = variants_of(preset)
        made = [item.preprocess for item in found]
        assert len(set(made)) == len(made)
        assert made[0] == preset
        assert all(item.changes for item in found[1:])
        # Only what the fault can be about differs.
        assert {(item.resize, item.size, item.filter) for item in made} == {
            (preset.resize, preset.size, preset.filter)
        }


def test_chances() -> None:
    rng = np.random.default_rng(0)
    apart = rng.normal(1.0, 0.5, 20)
    assert chance_of(apart.mean(), apart) < 1e-3
    same = rng.normal(0.0, 0.5, 20)
    assert chance_of(abs(same.mean()), same) > 0.05
    assert chance_of(0.0, np.zeros(20)) == 1
    # Four differences of one sign: 2 of 16 sign patterns are as far out.
    assert chance_of(1.0, np.ones(4)) == pytest.approx(2 / 16, abs=0.01)


def test_logits() -> None:
    np.testing.assert_allclose(logits(np.array([[0.25, 0.75]])), np.log([1 / 3, 3]) / 2)
    np.testing.assert_allclose(logits(np.array([[5.0, 8.0, 2.0]])), [0, 3, -3])


def test_the_spread_of_logits_does_not_count() -> None:
    """A network without biases makes k-fold logits of k-fold inputs: neither is better for it."""
    rng = np.random.default_rng(2)
    one = rng.normal(size=(6, 1, 3, 10))
    one -= one.mean(axis=-1, keepdims=True)
    found = alike(np.concatenate([one, 255 * one], axis=1))
    np.testing.assert_allclose(found[:, 0], found[:, 1])
    np.testing.assert_allclose(found.sum(axis=-1), 1)
    assert found[:, 0, 0].max(axis=-1).mean() == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("file,label\na.png,cat\n", "line 2 needs a file and a class index"),
        ("name,class\na.png,1\n", "line 2 needs"),
        ("file,label\n", "are empty"),
        ("file,label\na.png,-1\n", "line 2 needs"),
    ],
)
def test_labels_that_are_wrong(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "labels.csv"
    path.write_text(content)
    with pytest.raises(TilewrightError, match=message) as caught:
        read_labels(path)
    assert caught.value.code == "E0301"


def test_labels_of_no_class_and_files_that_are_no_pictures(folder: Path, tmp_path: Path) -> None:
    files = picture_files(folder)
    with pytest.raises(TilewrightError, match="label 99 is no class"):
        check_preprocess(model, files, RIGHT, {file.name: 99 for file in files})
    with pytest.raises(TilewrightError, match="cannot be read"):
        read_labels(tmp_path / "missing.csv")
    bad = tmp_path / "a.png"
    bad.write_bytes(b"no picture")
    with pytest.raises(TilewrightError, match="cannot be read"):
        check_preprocess(model, [bad] * LEAST, RIGHT)


def test_options_that_no_preset_has() -> None:
    odd = replace(RIGHT, mean=(0.4, 0.5, 0.6), std=(0.3, 0.3, 0.3), filter="bicubic")
    text = option_text(odd, odd)
    made = replace(parse_preprocess(text), size=odd.size)
    assert made == odd
