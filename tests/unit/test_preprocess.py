"""Preprocessing options and samples read from disk."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.runtime.preprocess import Preprocess, load_samples, parse_preprocess


def _flat(colour: tuple[int, int, int], size: tuple[int, int] = (300, 260)) -> Image.Image:
    return Image.new("RGB", size, colour)


def test_values_order_and_layout():
    plain = Preprocess(mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 0.125), size=(4, 6))
    out = plain.apply(_flat((255, 51, 0)))
    assert out.shape == (1, 3, 4, 6)
    np.testing.assert_allclose(out[0, :, 0, 0], [1.8, 0.0, -2.4], atol=1e-6)
    swapped = Preprocess(colours="bgr", layout="nhwc", divide=1.0, mean=(1, 2, 3), std=(1, 1, 1))
    np.testing.assert_array_equal(swapped.apply(_flat((9, 8, 7)))[0, 0, 0], [6, 6, 6])


@pytest.mark.parametrize("resize", ["short", "square", "crop-first"])
@pytest.mark.parametrize("size", [(300, 260), (260, 700), (40, 30), (1, 500)])
def test_every_picture_fits(resize: str, size: tuple[int, int]):
    chosen = parse_preprocess(f"imagenet,resize={resize},size=32x48,resize-to=64")
    assert chosen.apply(_flat((1, 2, 3), size)).shape == (1, 3, 32, 48)


def test_fit_pads_the_right_with_zeros():
    chosen = parse_preprocess("signed,resize=fit,size=48x192")
    out = chosen.apply(_flat((255, 255, 255), (96, 48)))
    assert (out[..., :96] == 1).all()
    assert (out[..., 96:] == 0).all()


def test_crop_first_takes_the_centre():
    pixels = np.zeros((256, 400, 3), np.uint8)
    pixels[16:-16, 88:-88] = 255  # exactly the centre 224
    out = parse_preprocess("unit,resize=crop-first").apply(Image.fromarray(pixels))
    assert (out == 1).all()


def test_json_round_trip():
    chosen = parse_preprocess("caffe,resize=square,filter=bicubic,std=2:3:4,size=10x20")
    assert Preprocess.from_json(chosen.to_json()) == chosen


@pytest.mark.parametrize(
    "text",
    [
        "imagnet",
        "unit,foo=1",
        "unit,resize=long",
        "unit,std=0",
        "unit,mean=1:2",
        "unit,mean=nan",
        "unit,size=0x3",
        "unit,size=4",
        "unit,divide=-1",
        "unit,bicubic",
        "unit,resize-to=many",
    ],
)
def test_wrong_options_are_refused(text: str):
    if text == "unit,size=4":
        assert parse_preprocess(text).size == (4, 4)
        return
    with pytest.raises(UsageError) as caught:
        parse_preprocess(text)
    assert caught.value.code == "E0702"


SHAPES = {"x": (1, 3, 8, 8)}


def _load(path: Path, shapes: dict[str, tuple[int, ...]] = SHAPES, limit: int | None = None):
    return list(load_samples(path, shapes, None, limit))


def test_folder_of_pictures_and_arrays(tmp_path: Path):
    _flat((10, 20, 30)).save(tmp_path / "a.png")
    np.save(tmp_path / "b.npy", np.arange(192, dtype=np.float32).reshape(3, 8, 8))
    np.savez(tmp_path / "c.npz", x=np.ones((4, 3, 8, 8), np.float32))
    (tmp_path / "labels.csv").write_text("ignored")
    samples = _load(tmp_path)
    assert [sample["x"].shape for sample in samples] == [(1, 3, 8, 8)] * 6
    assert samples[1]["x"][0, 0, 0, 1] == 1
    assert len(_load(tmp_path, limit=3)) == 3


def test_two_inputs_from_one_npz(tmp_path: Path):
    shapes = {"a": (1, 4), "b": (2, 3)}
    np.savez(tmp_path / "s.npz", a=np.zeros((5, 4)), b=np.zeros((5, 2, 3)))
    assert len(_load(tmp_path / "s.npz", shapes)) == 5
    np.savez(tmp_path / "s.npz", a=np.zeros((5, 4)), b=np.zeros((4, 2, 3)))
    with pytest.raises(TilewrightError, match="different numbers"):
        _load(tmp_path / "s.npz", shapes)
    np.savez(tmp_path / "s.npz", a=np.zeros((5, 4)))
    with pytest.raises(TilewrightError, match="no array for input `b`"):
        _load(tmp_path / "s.npz", shapes)


def _spoil(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    "what",
    [
        "missing",
        "empty",
        "picture",
        "npy",
        "npz",
        "nan",
        "shape",
        "pickle",
        "kind",
        "thin",
        "header",
        "endless",
        "member",
    ],
)
def test_unusable_samples_are_named(tmp_path: Path, what: str):
    folder = tmp_path / "data"
    if what != "missing":
        folder.mkdir()
    good = np.zeros((3, 8, 8), np.float32)
    if what == "picture":
        Image.fromarray(np.random.default_rng(0).integers(0, 255, (99, 99, 3), np.uint8)).save(
            folder / "bad.jpg"
        )
        _spoil(folder / "bad.jpg")
    elif what == "npy":
        np.save(folder / "bad.npy", good)
        _spoil(folder / "bad.npy")
    elif what == "npz":
        np.savez(folder / "bad.npz", x=good)
        _spoil(folder / "bad.npz")
    elif what == "nan":
        np.save(folder / "bad.npy", good + np.nan)
    elif what == "shape":
        np.save(folder / "bad.npy", good[:2])
    elif what == "pickle":
        np.save(folder / "bad.npy", np.array([{"a": 1}], object), allow_pickle=True)
    elif what == "kind":
        np.save(folder / "bad.npy", np.array(["text"]))
    elif what == "thin":
        Image.new("RGB", (1, 30000)).save(folder / "bad.png")
    elif what in ("header", "endless"):
        shape = "(1, 3, 8" if what == "header" else f"(1, 3, {1 << 50})"
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
        head = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
        (folder / "bad.npy").write_bytes(head + bytes(64))
    elif what == "member":
        with zipfile.ZipFile(folder / "bad.npz", "w") as archive:
            archive.writestr("x.npy", b"no array")
    with pytest.raises(TilewrightError) as caught:
        _load(folder)
    assert caught.value.code == "E0301"
    assert ("bad." if what not in ("missing", "empty") else "data") in caught.value.message
