"""Modules and weights on disk: round trip, refusals, atomic writing."""

from __future__ import annotations

import contextlib
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
from xdsl.dialects.builtin import StringAttr

from tilewright.diagnostics import TilewrightError
from tilewright.ir.io import (
    WEIGHTS_ATTRIBUTE,
    new_context,
    parse_text,
    print_module,
    read_module,
    write_atomically,
    write_module,
)
from tilewright.ir.weights import MissingWeightError, WeightStore
from tilewright.spec.hardware import load_target

TEXT = """builtin.module {
  func.func @main(%x: tensor<2x3xf32>) -> tensor<2x3xf32> attributes {arg_names = ["x"]} {
    %w = top.weight {name = "w"} : tensor<2x3xf32>
    %y = top.add %x, %w {name = "add"} : (tensor<2x3xf32>, tensor<2x3xf32>) -> tensor<2x3xf32>
    func.return %y : tensor<2x3xf32>
  }
}
"""


def write_pair(folder: Path, shape: tuple[int, ...] = (2, 3)) -> Path:
    context = new_context()
    context.weights.set("w", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    module = parse_text(TEXT, context)
    write_module(module, context, folder / "m.mlir")
    return folder / "m.mlir"


def test_round_trip(tmp_path: Path) -> None:
    path = write_pair(tmp_path)
    module, context = read_module(path)
    assert np.array_equal(context.weights.get("w"), np.arange(6, dtype=np.float32).reshape(2, 3))
    again = tmp_path / "sub" / "n.mlir"
    again.parent.mkdir()
    write_module(module, context, again)
    assert read_module(again)[1].weights.digest() == context.weights.digest()
    assert sorted(p.name for p in again.parent.iterdir()) == ["n.mlir", "n.weights.safetensors"]


def test_same_content_same_bytes(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = write_pair(tmp_path / "a"), write_pair(tmp_path / "b")
    for name in ("m.mlir", "m.weights.safetensors"):
        assert (first.parent / name).read_bytes() == (second.parent / name).read_bytes()


def test_module_without_weights_has_no_weights_file(tmp_path: Path) -> None:
    context = new_context()
    module = parse_text("builtin.module {}", context)
    write_module(module, context, tmp_path / "m.mlir")
    assert [p.name for p in tmp_path.iterdir()] == ["m.mlir"]
    assert WEIGHTS_ATTRIBUTE not in (tmp_path / "m.mlir").read_text()


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../w.safetensors", "a/../../w", "", "C:\\\\w", "a\\\\..\\\\w"]
)
def test_weights_name_may_not_escape(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    WeightStore().save(tmp_path / "w.safetensors")
    text = f'builtin.module attributes {{{WEIGHTS_ATTRIBUTE} = "{name}"}} {{}}'
    (folder / "m.mlir").write_text(text)
    with pytest.raises(TilewrightError, match="is refused") as caught:
        read_module(folder / "m.mlir")
    assert caught.value.code == "E0501"


def test_weights_link_may_not_escape(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write_pair(folder)
    (folder / "m.weights.safetensors").rename(tmp_path / "w.safetensors")
    (folder / "m.weights.safetensors").symlink_to(tmp_path / "w.safetensors")
    with pytest.raises(TilewrightError, match="is refused"):
        read_module(folder / "m.mlir")


def test_weights_missing_truncated_or_of_another_shape(tmp_path: Path) -> None:
    path = write_pair(tmp_path)
    weights = tmp_path / "m.weights.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TilewrightError, match="not a weights file"):
        read_module(path)
    weights.unlink()
    with pytest.raises(TilewrightError, match="cannot read the weights") as caught:
        read_module(path)
    assert caught.value.code == "E0701"
    write_pair(tmp_path, (3, 2))
    with pytest.raises(TilewrightError, match="weights do not fit") as caught:
        read_module(path)
    assert caught.value.details == ["'w' has shape [3, 2], the module says [2, 3]"]


def test_missing_weight_is_a_user_error() -> None:
    with pytest.raises(MissingWeightError) as caught:
        WeightStore().get("w")
    assert isinstance(caught.value, TilewrightError)
    assert isinstance(caught.value, KeyError)


def test_size_limit_and_binary(tmp_path: Path) -> None:
    path = write_pair(tmp_path)
    with pytest.raises(TilewrightError, match="too long"):
        read_module(path, max_bytes=100)
    path.write_bytes(b"\x08\xff\xfe")
    with pytest.raises(TilewrightError, match="not MLIR text"):
        read_module(path)


def test_failed_write_leaves_the_old_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_pair(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    module, context = read_module(path)
    context.weights.set("w", np.zeros((2, 3), np.float32))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(WeightStore, "save", full)
    with pytest.raises(TilewrightError, match="cannot write") as caught:
        write_module(module, context, path)
    assert caught.value.code == "E0701"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_devices_are_written_to_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomically(pipe, b"text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    link = tmp_path / "link"
    (tmp_path / "real").write_bytes(b"")
    link.symlink_to(tmp_path / "real")
    write_atomically(link, b"through")
    assert link.is_symlink()
    assert (tmp_path / "real").read_bytes() == b"through"


def test_target_travels_with_the_module(tmp_path: Path) -> None:
    text = """builtin.module {
  func.func @main(%x: tensor<4xi8>) -> tensor<4xi8> {
    %e = tensor.empty() : tensor<4xi8>
    func.return %x : tensor<4xi8>
  }
}
"""
    edge, tiny = load_target("edge16"), load_target("tiny8")
    context = new_context(target=edge)
    write_module(parse_text(text, context), context, tmp_path / "m.mlir")
    assert 'tilewright.target = "edge16"' in (tmp_path / "m.mlir").read_text()
    loaded = read_module(tmp_path / "m.mlir")[1].target
    assert loaded is not None
    assert loaded.digest() == edge.digest()
    with pytest.raises(TilewrightError, match="was made for target `edge16`"):
        read_module(tmp_path / "m.mlir", tiny)
    own = edge.model_copy(update={"sram_size": 2 * edge.sram_size})
    with pytest.raises(TilewrightError, match="sram_size: 262144, not 524288"):
        read_module(tmp_path / "m.mlir", own)
    context = new_context(target=own)
    write_module(parse_text(text, context), context, tmp_path / "n.mlir")
    loaded = read_module(tmp_path / "n.mlir")[1].target
    assert loaded is not None
    assert loaded.digest() == own.digest()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("builtin.module {\n  func.func @f(", ":2:16: "),
        ("builtin.module {\n  nosuch.op\n}", "nosuch.op"),
        ('"nosuch.op"() : () -> ()', "nosuch.op"),
        ("builtin.module {} }", ":1:19"),
        ("!x = tensor<-1xf32>", ""),
    ],
)
def test_bad_text_names_the_place(text: str, says: str) -> None:
    with pytest.raises(TilewrightError) as caught:
        parse_text(text, new_context(), "m.mlir")
    assert caught.value.code == "E0501"
    assert says in caught.value.message
    assert caught.value.message.startswith("m.mlir")


def test_deep_nesting_is_refused() -> None:
    text = "builtin.module {" * 5000 + "}" * 5000
    with pytest.raises(TilewrightError, match="too deeply"):
        parse_text(text, new_context(), "m.mlir")


def test_endless_attributes_are_refused() -> None:
    text = f"builtin.module attributes {{a = dense<1.0> : tensor<{1 << 52}xf32>}} {{}}"
    with pytest.raises(TilewrightError, match="too large"):
        parse_text(text, new_context(), "m.mlir")


def test_damaged_text_never_escapes_as_another_exception() -> None:
    """Whatever is cut out, doubled or swapped: a TilewrightError or a module."""
    generator = random.Random(7)
    generic = print_module(parse_text(TEXT, new_context()), generic=True)
    kept = 0
    for trial in range(400):
        source = (TEXT, generic)[trial % 2]
        start = generator.randrange(len(source))
        end = min(len(source), start + generator.randrange(1, 12))
        junk = generator.choice(["", source[start:end] * 2, '"', "-9", "<", "tensor<", "0x1p", "é"])
        with contextlib.suppress(TilewrightError):
            parse_text(source[:start] + junk + source[end:], new_context(), "m.mlir")
            kept += 1
    assert 0 < kept < 40


def test_unclosed_string_is_refused_at_once() -> None:
    """xDSL's own lexer needs time exponential in the length of the line."""
    text = 'builtin.module attributes {a = "' + "x" * 10_000 + "\n} {}"
    start = time.perf_counter()
    with pytest.raises(TilewrightError, match="string literal"):
        parse_text(text, new_context(), "m.mlir")
    assert time.perf_counter() - start < 5


def test_strings_keep_their_escapes() -> None:
    text = 'builtin.module attributes {a = "\\"q\\" \\\\ \\n \\t \\41 é"} {\n}\n'
    module = parse_text(text, new_context())
    assert module.attributes["a"] == StringAttr('"q" \\ \n \t A é')
    assert parse_text(print_module(module), new_context()).attributes == module.attributes
