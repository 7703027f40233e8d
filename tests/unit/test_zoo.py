"""Recipes, safe extraction, builders and drawn inputs; nothing here needs a network."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tilewright import zoo
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.zoo import fetching as preparing
from tilewright.zoo.builders import resnet50
from tilewright.zoo.drawing import page, text_line, texture
from tilewright.zoo.recipes import IMAGENET


def test_recipes_are_pinned():
    assert len({recipe.name for recipe in zoo.RECIPES}) == len(zoo.RECIPES)
    for recipe in zoo.RECIPES:
        if recipe.kind == "built":
            assert not recipe.package
            continue
        assert recipe.package.count("==") == 1
        assert len(bytes.fromhex(recipe.sha256)) == 32
        assert not Path(recipe.member).is_absolute()
        assert ".." not in recipe.member


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_installed_package_is_used_and_cached(cache: Path):
    path = zoo.prepare("squeezenet-light")
    assert path.parent == cache / "zoo"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert digest == zoo.find("squeezenet-light").sha256
    # A spoilt cache is noticed and mended.
    path.write_bytes(b"spoilt")
    assert zoo.prepare("squeezenet-light") == path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == digest
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_wrong_sum_is_refused(cache: Path):
    recipe = replace(zoo.find("squeezenet-light"), sha256="0" * 64)
    with pytest.raises(TilewrightError, match="not the expected file") as caught:
        preparing.fetch(recipe)
    assert caught.value.code == "E0601"


def test_unknown_model_names_the_known():
    with pytest.raises(UsageError) as caught:
        zoo.prepare("resnet51")
    assert "pplcnet" in (caught.value.hint or "")


def test_member_missing_or_broken_archive(tmp_path: Path):
    archive = tmp_path / "a.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("a/b.txt", "hello")
    assert preparing.read_member(archive, "a/b.txt") == b"hello"
    with pytest.raises(TilewrightError):
        preparing.read_member(archive, "a/c.txt")
    archive.write_bytes(archive.read_bytes()[:-10])
    with pytest.raises(TilewrightError):
        preparing.read_member(archive, "a/b.txt")


def test_member_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    archive = tmp_path / "a.whl"
    with zipfile.ZipFile(archive, "w") as opened:
        opened.writestr("big", b"x" * 100)
    monkeypatch.setattr(preparing, "MAX_MEMBER_BYTES", 99)
    with pytest.raises(TilewrightError, match="100 bytes"):
        preparing.read_member(archive, "big")


def test_unwritable_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path / "file"))
    with pytest.raises(TilewrightError) as caught:
        zoo.prepare("squeezenet-light")
    assert caught.value.code == "E0701"


def test_resnet50_is_the_same_each_time_and_valid():
    import onnx

    model = resnet50()
    assert hashlib.sha256(model).digest() == hashlib.sha256(resnet50()).digest()
    loaded = onnx.load_from_string(model)
    onnx.checker.check_model(loaded)
    kinds = [node.op_type for node in loaded.graph.node]
    assert (kinds.count("Conv"), kinds.count("Relu"), kinds.count("Add")) == (53, 49, 16)
    assert sum(np.prod(list(t.dims)) for t in loaded.graph.initializer) == 25_530_472


@pytest.mark.parametrize("name", [recipe.name for recipe in zoo.RECIPES])
def test_inputs_have_the_models_shape_and_are_seeded(name: str):
    first, again, other = (zoo.inputs(name, 2, seed=seed) for seed in (3, 3, 4))
    recipe = zoo.find(name)
    for array in first.arrays:
        assert array.shape == recipe.input_shape
        assert array.dtype == (np.int64 if recipe.pictures == "sentences" else np.float32)
        assert array.std() > 0
    for sample in first.samples():
        shapes = {recipe.input_name: recipe.input_shape, **dict(recipe.other_inputs)}
        assert {key: array.shape for key, array in sample.items()} == shapes
    assert all(np.array_equal(a, b) for a, b in zip(first.arrays, again.arrays, strict=True))
    assert not np.array_equal(first.arrays[0], other.arrays[0])


def test_pages_turn_clockwise():
    pages = [page(index, 7) for index in range(4)]
    assert [label for _, label in pages] == [0, 1, 2, 3]
    upright = np.asarray(pages[0][0])
    for picture, label in pages:
        np.testing.assert_array_equal(np.rot90(np.asarray(picture), label), upright)


def test_lines_turn_over():
    (upright, zero), (turned, one) = text_line(0, 1), text_line(1, 1)
    assert (zero, one) == (0, 1)
    np.testing.assert_array_equal(np.asarray(upright)[::-1, ::-1], np.asarray(turned))


def test_textures_are_smooth_and_unlabelled():
    picture, label = texture(0, 0)
    assert label is None
    grey = np.asarray(picture, np.float64).mean(-1)
    neighbours = np.corrcoef(grey[:, 1:].ravel(), grey[:, :-1].ravel())[0, 1]
    assert neighbours > 0.7
    assert zoo.inputs("opennsfw", 2).labels is None


def test_user_pictures(tmp_path: Path):
    texture(0, 0)[0].save(tmp_path / "b.png")
    texture(1, 0)[0].save(tmp_path / "a.png")
    np.save(tmp_path / "c.npy", np.zeros(3))
    given = zoo.inputs("mobilenet-v2", 5, pictures=tmp_path)
    assert len(given.arrays) == 2
    np.testing.assert_array_equal(given.arrays[1], IMAGENET.apply(texture(0, 0)[0]))
    (tmp_path / "a.png").write_bytes(b"not a picture")
    with pytest.raises(TilewrightError, match=r"a\.png") as caught:
        zoo.inputs("mobilenet-v2", 5, pictures=tmp_path)
    assert caught.value.code == "E0301"


def test_words_and_their_tokens_go_together():
    from tilewright.zoo.drawing import WORDS
    from tilewright.zoo.signals import WORD_IDS

    assert len(WORDS) == len(WORD_IDS)
    # Words that occur twice have one token.
    assert len(set(zip(WORDS, WORD_IDS, strict=True))) == len(set(WORDS)) == len(set(WORD_IDS))


def test_sentences_are_padded_and_masked():
    sample = zoo.inputs("minilm", 1, seed=2).samples()[0]
    ids, mask = sample["input_ids"][0], sample["attention_mask"][0]
    length = int(mask.sum())
    assert mask[:length].all()
    assert not ids[length:].any()
    assert (ids[0], ids[length - 1]) == (101, 102)


def test_models_without_pictures_refuse_them(tmp_path: Path):
    with pytest.raises(UsageError, match="takes no pictures"):
        zoo.inputs("silero-vad", 1, pictures=tmp_path)


def test_sheets_and_lines_of_text_stand_upright():
    upright = zoo.find("ppocr-rec").preprocess
    assert upright is not None
    made = zoo.inputs("ppocr-rec", 2, seed=1)
    assert made.labels is None
    np.testing.assert_array_equal(made.arrays[1], upright.apply(text_line(2, 1)[0]))


def test_inputs_of_several_names_are_written(tmp_path: Path):
    from tilewright.cli import main

    path = tmp_path / "x.npz"
    assert main(["zoo", "inputs", "silero-vad", "--count", "2", "-o", str(path)]) == 0
    with np.load(path) as file:
        assert {name: file[name].shape for name in file.files} == {
            "input": (2, 576),
            "state": (4, 1, 128),
        }
