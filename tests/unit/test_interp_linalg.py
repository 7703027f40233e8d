"""The interpreter on its own: each way it executes `linalg.generic`, tensors, memrefs and loops."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xdsl.context import Context
from xdsl.dialects import affine, arith, builtin, func, linalg, memref, scf, tensor
from xdsl.dialects.builtin import ModuleOp
from xdsl.parser import Parser

from tilewright.diagnostics import TilewrightError
from tilewright.interp import run_affine, run_linalg
from tilewright.interp.contract import matmul_exact
from tilewright.interp.machine import UNWRITTEN
from tilewright.ir.weights import WeightStore

DIALECTS = (
    builtin.Builtin,
    func.Func,
    arith.Arith,
    affine.Affine,
    linalg.Linalg,
    memref.MemRef,
    scf.Scf,
    tensor.Tensor,
)


def parse(text: str) -> ModuleOp:
    context = Context()
    for dialect in DIALECTS:
        context.load_dialect(dialect)
    module = Parser(context, text).parse_module()
    module.verify()
    return module


def run(text: str, **inputs: Any) -> np.ndarray:
    """Run the only function; its one result is called `r`."""
    return run_linalg(parse(text), WeightStore(), inputs)["r"]


def refusal(text: str, **inputs: Any) -> str:
    with pytest.raises(TilewrightError) as caught:
        run(text, **inputs)
    assert caught.value.code == "E0501"
    return str(caught.value)


def binary(op: str, kind: str) -> str:
    return f"""
func.func @f(%a: tensor<?x{kind}>, %b: tensor<?x{kind}>, %o: tensor<?x{kind}>) -> tensor<?x{kind}>
    attributes {{arg_names = ["a", "b", "o"], result_names = ["r"]}} {{
  %r = linalg.generic {{indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>,
      affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]}}
      ins(%a, %b : tensor<?x{kind}>, tensor<?x{kind}>) outs(%o : tensor<?x{kind}>) {{
  ^bb0(%x: {kind}, %y: {kind}, %z: {kind}):
    %v = {op} %x, %y : {kind}
    linalg.yield %v : {kind}
  }} -> tensor<?x{kind}>
  func.return %r : tensor<?x{kind}>
}}"""


def wrap(value: int, bits: int) -> int:
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def unsigned(value: int, bits: int) -> int:
    return value % (1 << bits)


MEANINGS: dict[str, Callable[[int, int, int], int]] = {
    "arith.addi": lambda a, b, n: a + b,
    "arith.subi": lambda a, b, n: a - b,
    "arith.muli": lambda a, b, n: a * b,
    "arith.minsi": lambda a, b, n: min(a, b),
    "arith.maxsi": lambda a, b, n: max(a, b),
    "arith.minui": lambda a, b, n: min(unsigned(a, n), unsigned(b, n)),
    "arith.maxui": lambda a, b, n: max(unsigned(a, n), unsigned(b, n)),
    "arith.andi": lambda a, b, n: a & b,
    "arith.ori": lambda a, b, n: a | b,
    "arith.xori": lambda a, b, n: a ^ b,
    "arith.shli": lambda a, b, n: a << (b % n),
    "arith.shrsi": lambda a, b, n: a >> (b % n),
    "arith.shrui": lambda a, b, n: unsigned(a, n) >> (b % n),
    "arith.floordivsi": lambda a, b, n: a // b,
    "arith.ceildivsi": lambda a, b, n: -(-a // b),
    "arith.divsi": lambda a, b, n: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
    "arith.remsi": lambda a, b, n: abs(a) % abs(b) * (1 if a >= 0 else -1),
    "arith.divui": lambda a, b, n: unsigned(a, n) // unsigned(b, n),
    "arith.remui": lambda a, b, n: unsigned(a, n) % unsigned(b, n),
}


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
@pytest.mark.parametrize("op", sorted(MEANINGS))
def test_integer_arithmetic(op: str, bits: int) -> None:
    """All pairs of interesting values, against Python integers."""
    edge = [0, 1, -1, 2, 3, -7, 100, -128, 127]
    edge += [(1 << (bits - 1)) - 1, -(1 << (bits - 1)), (1 << (bits - 2)) + 5]
    pairs = [(wrap(a, bits), wrap(b, bits)) for a, b in product(edge, edge)]
    if "div" in op or "rem" in op:
        low = -(1 << (bits - 1))
        pairs = [(a, b) for a, b in pairs if b != 0 and (a, b) != (low, -1)]
    if "sh" in op:
        pairs = [(a, b % bits) for a, b in pairs]
    kind = np.dtype(f"int{bits}")
    a, b = (np.array(column, kind) for column in zip(*pairs, strict=True))
    got = run(binary(op, f"i{bits}"), a=a, b=b, o=np.zeros_like(a))
    wanted = [wrap(MEANINGS[op](x, y, bits), bits) for x, y in pairs]
    assert got.dtype == kind
    assert got.tolist() == wanted


@pytest.mark.parametrize(
    ("op", "value", "words"),
    [("arith.shli", 32, "shift"), ("arith.shrsi", -1, "shift"), ("arith.divsi", 0, "zero")],
)
def test_undefined_arithmetic_is_refused(op: str, value: int, words: str) -> None:
    a, b = np.ones(3, np.int32), np.array([1, value, 1], np.int32)
    assert words in refusal(binary(op, "i32"), a=a, b=b, o=a)


CONTRACTION = """
func.func @f(%a: tensor<?x?xA>, %b: tensor<?x?xA>, %o: tensor<?x?xB>) -> tensor<?x?xB>
    attributes {arg_names = ["a", "b", "o"], result_names = ["r"]} {
  %r = linalg.generic {indexing_maps = [affine_map<(m, n, k) -> (m, k)>,
      affine_map<(m, n, k) -> (k, n)>, affine_map<(m, n, k) -> (m, n)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : tensor<?x?xA>, tensor<?x?xA>) outs(%o : tensor<?x?xB>) {
  ^bb0(%x: A, %y: A, %z: B):
    %p = arith.extsi %x : A to B
    %q = arith.extsi %y : A to B
    %t = arith.constant 3 : B
    %u = arith.subi %p, %t : B
    %s = arith.muli %q, %u : B
    %v = arith.addi %s, %z : B
    linalg.yield %v : B
  } -> tensor<?x?xB>
  func.return %r : tensor<?x?xB>
}"""


@pytest.mark.parametrize(("narrow", "wide"), [(8, 32), (16, 32), (32, 64), (8, 16)])
@pytest.mark.parametrize("depth", [1, 40, 3000])
def test_contraction_is_exact_and_wraps(narrow: int, wide: int, depth: int) -> None:
    """Values at the ends of the range, so that float32, float64 and int64 sums are all met."""
    rng = np.random.default_rng(depth)
    limits = np.iinfo(f"int{narrow}")
    a = rng.choice([limits.min, limits.max, 5], (4, depth)).astype(f"int{narrow}")
    b = rng.integers(limits.min, limits.max, (depth, 3), dtype=f"int{narrow}", endpoint=True)
    o = rng.integers(-1000, 1000, (4, 3)).astype(f"int{wide}")
    text = CONTRACTION.replace("A", f"i{narrow}").replace("B", f"i{wide}")
    got = run(text, a=a, b=b, o=o)
    exact = o.astype(object) + (a.astype(object) - 3) @ b.astype(object)
    assert got.tolist() == [[wrap(int(v), wide) for v in row] for row in exact]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 2**32), st.sampled_from([6, 12, 23, 30, 31]), st.integers(1, 70))
def test_matmul_exact(seed: int, bits: int, depth: int) -> None:
    rng = np.random.default_rng(seed)
    left = rng.integers(-(2**bits), 2**bits, (2, 3, depth))
    right = rng.integers(-(2 ** (31 - bits // 2)), 2 ** (31 - bits // 2), (2, depth, 4))
    got = matmul_exact(left, right, np.dtype(np.int32))
    exact = left.astype(object) @ right.astype(object)
    assert got.tolist() == np.vectorize(lambda v: wrap(int(v), 32))(exact).tolist()


def reduction(body: str, points: str = "10") -> str:
    return f"""
func.func @f(%a: tensor<4x{points}xi32>, %o: tensor<4xi32>) -> tensor<4xi32>
    attributes {{arg_names = ["a", "o"], result_names = ["r"]}} {{
  %r = linalg.generic {{indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>,
      affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]}}
      ins(%a : tensor<4x{points}xi32>) outs(%o : tensor<4xi32>) {{
  ^bb0(%x: i32, %z: i32):
    {body}
    linalg.yield %v : i32
  }} -> tensor<4xi32>
  func.return %r : tensor<4xi32>
}}"""


@pytest.mark.parametrize("count", [10, 300])
def test_reductions_by_few_and_by_many_points(count: int) -> None:
    rng = np.random.default_rng(count)
    a = rng.integers(-(2**31), 2**31, (4, count)).astype(np.int32)
    o = np.array([1, -2, 3, 2**31 - 1], np.int32)
    text = reduction("%v = arith.addi %x, %z : i32", str(count))
    exact = [wrap(int(z) + sum(map(int, row)), 32) for row, z in zip(a, o, strict=True)]
    assert run(text, a=a, o=o).tolist() == exact
    text = reduction("%v = arith.maxsi %z, %x : i32", str(count))
    assert run(text, a=a, o=o).tolist() == np.maximum(a.max(axis=1), o).tolist()
    # Order matters here, so neither a matrix product nor a ufunc may be used.
    text = reduction("%t = arith.constant 2 : i32\n%u = arith.muli %z, %t : i32\n"
                     "%v = arith.subi %u, %x : i32", str(count))  # fmt: skip
    wanted = [int(z) for z in o]
    for column in range(count):
        wanted = [wrap(2 * z - int(a[row, column]), 32) for row, z in enumerate(wanted)]
    assert run(text, a=a, o=o).tolist() == wanted


def test_a_square_is_not_a_contraction() -> None:
    a = np.arange(40, dtype=np.int32).reshape(4, 10)
    text = reduction("%s = arith.muli %x, %x : i32\n%v = arith.addi %s, %z : i32")
    assert run(text, a=a, o=np.zeros(4, np.int32)).tolist() == (a * a).sum(axis=1).tolist()


def gather(maps: str, loops: str) -> str:
    return f"""
func.func @f(%a: tensor<?x?xi8>, %o: tensor<?x?xi8>) -> tensor<?x?xi8>
    attributes {{arg_names = ["a", "o"], result_names = ["r"]}} {{
  %r = linalg.generic {{indexing_maps = [{maps}, affine_map<{loops} -> {loops}>],
      iterator_types = ["parallel", "parallel"]}}
      ins(%a : tensor<?x?xi8>) outs(%o : tensor<?x?xi8>) {{
  ^bb0(%x: i8, %z: i8):
    linalg.yield %x : i8
  }} -> tensor<?x?xi8>
  func.return %r : tensor<?x?xi8>
}}"""


A = np.arange(48, dtype=np.int8).reshape(6, 8)


@pytest.mark.parametrize(
    ("results", "shape", "index"),
    [
        ("(i, j)", (6, 8), lambda i, j: (i, j)),
        ("(j, i)", (8, 6), lambda i, j: (j, i)),
        ("(2, j)", (4, 8), lambda i, j: (2, j)),
        ("(i + j, j * 2 + 1)", (4, 3), lambda i, j: (i + j, 2 * j + 1)),
        ("(4 - i, i + 3)", (4, 3), lambda i, j: (4 - i, i + 3)),
        ("(i floordiv 2, (i + j) mod 3)", (4, 3), lambda i, j: (i // 2, (i + j) % 3)),
    ],
)
def test_indexing_maps(
    results: str, shape: tuple[int, int], index: Callable[[int, int], tuple[int, int]]
) -> None:
    text = gather(f"affine_map<(i, j) -> {results}>", "(i, j)")
    got = run(text, a=A, o=np.zeros(shape, np.int8))
    assert got.tolist() == [[A[index(i, j)] for j in range(shape[1])] for i in range(shape[0])]


@pytest.mark.parametrize(
    "results", ["(i + 3, j + 0)", "(i + 1, j * 4)", "(i - 1, j + 1)", "(i floordiv 1 + 3, j + 1)"]
)
def test_reading_outside_is_refused(results: str) -> None:
    text = gather(f"affine_map<(i, j) -> {results}>", "(i, j)")
    message = refusal(text, a=A, o=np.zeros((4, 3 if "+ 0" not in results else 8), np.int8))
    assert "axis of" in message


def test_index_and_extract_inside_a_region() -> None:
    text = """
func.func @f(%t: tensor<3x5xi8>, %k: tensor<4xi8>) -> tensor<4x2xi8>
    attributes {arg_names = ["t", "k"], result_names = ["r"]} {
  %e = tensor.empty() : tensor<4x2xi8>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j) -> (i)>, affine_map<(i, j) -> (i, j)>],
      iterator_types = ["parallel", "parallel"]} ins(%k : tensor<4xi8>) outs(%e : tensor<4x2xi8>) {
  ^bb0(%x: i8, %z: i8):
    %j = linalg.index 1 : index
    %p = arith.index_cast %x : i8 to index
    %v = tensor.extract %t[%j, %p] : tensor<3x5xi8>
    linalg.yield %v : i8
  } -> tensor<4x2xi8>
  func.return %r : tensor<4x2xi8>
}"""
    t = np.arange(15, dtype=np.int8).reshape(3, 5)
    k = np.array([4, 0, 2, 2], np.int8)
    assert run(text, t=t, k=k).tolist() == [[t[j, p] for j in range(2)] for p in k]
    assert "index" in refusal(text, t=t, k=np.array([4, 0, 5, 2], np.int8))


def test_large_elementwise_is_cut_into_chunks() -> None:
    """More points than a chunk has, along a first axis of 1."""
    text = """
func.func @f(%a: tensor<1x700x600xi32>) -> tensor<1x700x600xi32>
    attributes {arg_names = ["a"], result_names = ["r"]} {
  %e = tensor.empty() : tensor<1x700x600xi32>
  %r = linalg.generic {indexing_maps = [affine_map<(i, j, k) -> (i, j, k)>,
      affine_map<(i, j, k) -> (i, j, k)>], iterator_types = ["parallel", "parallel", "parallel"]}
      ins(%a : tensor<1x700x600xi32>) outs(%e : tensor<1x700x600xi32>) {
  ^bb0(%x: i32, %z: i32):
    %j = linalg.index 1 : index
    %p = arith.index_cast %j : index to i32
    %v = arith.subi %x, %p : i32
    linalg.yield %v : i32
  } -> tensor<1x700x600xi32>
  func.return %r : tensor<1x700x600xi32>
}"""
    a = np.random.default_rng(0).integers(-99, 99, (1, 700, 600)).astype(np.int32)
    np.testing.assert_array_equal(run(text, a=a), a - np.arange(700)[None, :, None])


def test_a_tensor_with_two_users_is_not_overwritten() -> None:
    text = """
func.func @f(%a: tensor<2xi8>, %b: tensor<1xi8>) -> (tensor<2xi8>, tensor<2xi8>, tensor<2xi8>)
    attributes {arg_names = ["a", "b"], result_names = ["p", "q", "r"]} {
  %c = arith.constant 7 : i8
  %e = tensor.empty() : tensor<2xi8>
  %p = linalg.fill ins(%c : i8) outs(%e : tensor<2xi8>) -> tensor<2xi8>
  %q = tensor.insert_slice %b into %p[0] [1] [1] : tensor<1xi8> into tensor<2xi8>
  %r = tensor.insert_slice %b into %a[1] [1] [1] : tensor<1xi8> into tensor<2xi8>
  func.return %p, %q, %r : tensor<2xi8>, tensor<2xi8>, tensor<2xi8>
}"""
    a, b = np.array([1, 2], np.int8), np.array([9], np.int8)
    got = run_linalg(parse(text), WeightStore(), {"a": a, "b": b})
    assert {name: value.tolist() for name, value in got.items()} == {
        "p": [7, 7],
        "q": [9, 7],
        "r": [1, 9],
    }
    assert a.tolist() == [1, 2]


TILED = """
func.func @f(%x: memref<10x6xi8>, %y: memref<10x6xi32>)
    attributes {arg_names = ["x", "y"], result_names = ["y"]} {
  %c2 = arith.constant 2 : i32
  affine.for %i = 0 to 10 step 4 {
    %n = affine.min affine_map<(d0) -> (4, -d0 + 10)>(%i)
    %s = memref.alloc() : memref<4x6xi8, 1 : i32>
    %sub = memref.subview %x[%i, 0] [%n, 6] [1, 1]
        : memref<10x6xi8> to memref<?x6xi8, strided<[6, 1], offset: ?>>
    %t = memref.subview %s[0, 0] [%n, 6] [1, 1]
        : memref<4x6xi8, 1 : i32> to memref<?x6xi8, strided<[6, 1]>, 1 : i32>
    "memref.copy"(%sub, %t) : (memref<?x6xi8, strided<[6, 1], offset: ?>>,
        memref<?x6xi8, strided<[6, 1]>, 1 : i32>) -> ()
    %a = memref.alloc() : memref<4x6xi32, 1 : i32>
    %o = memref.subview %a[0, 0] [%n, 6] [1, 1]
        : memref<4x6xi32, 1 : i32> to memref<?x6xi32, strided<[6, 1]>, 1 : i32>
    "linalg.fill"(%c2, %o) <{operandSegmentSizes = array<i32: 1, 1>}> ({
    ^bb0(%p: i32, %q: i32):
      linalg.yield %p : i32
    }) : (i32, memref<?x6xi32, strided<[6, 1]>, 1 : i32>) -> ()
    linalg.generic {indexing_maps = [affine_map<(i, j) -> (i, j)>, affine_map<(i, j) -> (i, j)>],
        iterator_types = ["parallel", "parallel"]}
        ins(%t : memref<?x6xi8, strided<[6, 1]>, 1 : i32>)
        outs(%o : memref<?x6xi32, strided<[6, 1]>, 1 : i32>) {
    ^bb0(%p: i8, %q: i32):
      %w = arith.extsi %p : i8 to i32
      %v = arith.muli %w, %q : i32
      linalg.yield %v : i32
    }
    %d = memref.subview %y[%i, 0] [%n, 6] [1, 1]
        : memref<10x6xi32> to memref<?x6xi32, strided<[6, 1], offset: ?>>
    "memref.copy"(%o, %d) : (memref<?x6xi32, strided<[6, 1]>, 1 : i32>,
        memref<?x6xi32, strided<[6, 1], offset: ?>>) -> ()
  }
  func.return
}"""


def test_tiles_with_a_remainder() -> None:
    x = np.random.default_rng(0).integers(-128, 128, (10, 6), dtype=np.int8)
    got = run_affine(parse(TILED), WeightStore(), {"x": x})
    assert set(got) == {"y"}
    np.testing.assert_array_equal(got["y"], x.astype(np.int32) * 2)


def test_a_wrong_tile_bound_is_refused() -> None:
    text = TILED.replace("(4, -d0 + 10)", "(4, -d0 + 11)").replace("memref<4x6", "memref<4x6")
    with pytest.raises(TilewrightError, match="takes 3 from 8 by 1 of 10"):
        run_affine(parse(text), WeightStore(), {"x": np.zeros((10, 6), np.int8)})


def test_memory_nobody_wrote_shows() -> None:
    """The last tile is skipped: its rows of the result are the pattern of unwritten memory."""
    text = TILED.replace("0 to 10 step 4", "0 to 8 step 4")
    got = run_affine(parse(text), WeightStore(), {"x": np.zeros((10, 6), np.int8)})["y"]
    assert not got[:8].any()
    assert (got[8:].view(np.uint8) == UNWRITTEN).all()


def test_loops_carry_values_and_branch() -> None:
    text = """
func.func @f(%a: memref<5xi32>) -> memref<1xi32>
    attributes {arg_names = ["a"], result_names = ["r"]} {
  %zero = arith.constant 0 : index
  %one = arith.constant 1 : index
  %five = arith.constant 5 : index
  %start = arith.constant 100 : i32
  %sum = scf.for %i = %zero to %five step %one iter_args(%acc = %start) -> (i32) {
    %v = memref.load %a[%i] : memref<5xi32>
    %odd = arith.remsi %i, %five : index
    %c = arith.cmpi eq, %odd, %one : index
    %next = scf.if %c -> (i32) {
      scf.yield %acc : i32
    } else {
      %s = arith.addi %acc, %v : i32
      scf.yield %s : i32
    }
    scf.yield %next : i32
  }
  %r = memref.alloc() : memref<1xi32>
  memref.store %sum, %r[%zero] : memref<1xi32>
  func.return %r : memref<1xi32>
}"""
    a = np.array([1, 20, 300, 4000, 50000], np.int32)
    assert run(text, a=a).tolist() == [100 + 1 + 300 + 4000 + 50000]


def test_rank_reducing_slices() -> None:
    text = """
func.func @f(%a: tensor<1x4x1x3xi8>) -> tensor<2x1x3xi8>
    attributes {arg_names = ["a"], result_names = ["r"]} {
  %r = tensor.extract_slice %a[0, 1, 0, 0] [1, 2, 1, 3] [1, 2, 1, 1]
      : tensor<1x4x1x3xi8> to tensor<2x1x3xi8>
  func.return %r : tensor<2x1x3xi8>
}"""
    a = np.arange(12, dtype=np.int8).reshape(1, 4, 1, 3)
    np.testing.assert_array_equal(run(text, a=a), a[0, 1::2])


def test_float_contraction() -> None:
    text = """
func.func @f(%a: tensor<3x4xf16>, %b: tensor<4x2xf16>, %o: tensor<3x2xf32>) -> tensor<3x2xf32>
    attributes {arg_names = ["a", "b", "o"], result_names = ["r"]} {
  %r = linalg.generic {indexing_maps = [affine_map<(m, n, k) -> (m, k)>,
      affine_map<(m, n, k) -> (k, n)>, affine_map<(m, n, k) -> (m, n)>],
      iterator_types = ["parallel", "parallel", "reduction"]}
      ins(%a, %b : tensor<3x4xf16>, tensor<4x2xf16>) outs(%o : tensor<3x2xf32>) {
  ^bb0(%x: f16, %y: f16, %z: f32):
    %p = arith.extf %x : f16 to f32
    %q = arith.extf %y : f16 to f32
    %s = arith.mulf %p, %q : f32
    %v = arith.addf %z, %s : f32
    linalg.yield %v : f32
  } -> tensor<3x2xf32>
  func.return %r : tensor<3x2xf32>
}"""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(3, 4)).astype(np.float16), rng.normal(size=(4, 2)).astype(np.float16)
    o = rng.normal(size=(3, 2)).astype(np.float32)
    exact = o + a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(run(text, a=a, b=b, o=o), exact, rtol=1e-5)


def test_what_is_wrong_is_said() -> None:
    text = binary("arith.addi", "i32")
    ones = np.ones(3, np.int32)
    assert 'no value for the argument "o"' in refusal(text, a=ones, b=ones)
    assert "int64" in refusal(text, a=ones.astype(np.int64), b=ones, o=ones)
    assert "loop 0 is 3" in refusal(text, a=ones, b=np.ones(4, np.int32), o=ones)
    assert "shape" in refusal(text, a=np.ones((3, 1), np.int32), b=ones, o=ones)
    host = """
func.func private @host_0(tensor<2xi8>) -> tensor<2xi8>
func.func @main(%a: tensor<2xi8>) -> tensor<2xi8>
    attributes {arg_names = ["a"], result_names = ["r"]} {
  %r = func.call @host_0(%a) : (tensor<2xi8>) -> tensor<2xi8>
  func.return %r : tensor<2xi8>
}"""
    a = np.zeros(2, np.int8)
    assert "@host_0 runs on the host" in refusal(host, a=a)
    with pytest.raises(TilewrightError, match="a result of @host_0 is float32"):
        run_linalg(
            parse(host), WeightStore(), {"a": a}, host=lambda name, args: [np.zeros(2, np.float32)]
        )


def test_weights_come_from_the_store_and_inputs_win() -> None:
    module = parse(binary("arith.subi", "i32"))
    store = WeightStore()
    store.set("b", np.array([5, 6], np.int32))
    store.set("o", np.zeros(2, np.int32))
    a = np.array([1, 1], np.int32)
    assert run_linalg(module, store, {"a": a})["r"].tolist() == [-4, -5]
    got = run_linalg(module, store, {"a": a, "b": a})["r"]
    assert got.tolist() == [0, 0]
    assert store.get("o").tolist() == [0, 0]


def test_large_windows_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the copied windows of a few hundred bytes changes nothing but the memory."""
    rng = np.random.default_rng(5)
    a = rng.integers(-128, 128, (37, 40), dtype=np.int8)
    b = rng.integers(-128, 128, (40, 9), dtype=np.int8)
    o = np.zeros((37, 9), np.int32)
    text = CONTRACTION.replace("A", "i8").replace("B", "i32")
    calls = list[int]()

    def counted(left: np.ndarray, right: np.ndarray, kind: Any) -> np.ndarray:
        calls.append(left.shape[1])
        return matmul_exact(left, right, kind)

    monkeypatch.setattr("tilewright.interp.generic.matmul_exact", counted)
    monkeypatch.setattr("tilewright.interp.generic.WINDOW_BYTES", 200)
    got = run(text, a=a, b=b, o=o)
    assert len(calls) == 5
    assert sum(calls) == 9  # the second operand is the first factor
    np.testing.assert_array_equal(got, (a.astype(np.int64) - 3) @ b.astype(np.int64))


def test_a_tensor_from_outside_a_loop_is_not_overwritten_in_it() -> None:
    text = """
func.func @f(%a: tensor<2xi8>) -> tensor<2xi8>
    attributes {arg_names = ["a"], result_names = ["r"]} {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %c3 = arith.constant 3 : index
  %v = arith.constant 0 : i8
  %e = tensor.empty() : tensor<2xi8>
  %z = linalg.fill ins(%v : i8) outs(%e : tensor<2xi8>) -> tensor<2xi8>
  %r = scf.for %i = %c0 to %c3 step %c1 iter_args(%acc = %a) -> (tensor<2xi8>) {
    %s = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>],
        iterator_types = ["parallel"]} ins(%acc : tensor<2xi8>) outs(%z : tensor<2xi8>) {
    ^bb0(%x: i8, %y: i8):
      %w = arith.addi %x, %y : i8
      linalg.yield %w : i8
    } -> tensor<2xi8>
    scf.yield %s : tensor<2xi8>
  }
  func.return %r : tensor<2xi8>
}"""
    # Were %z written to, the second turn would add the first one's result again.
    assert run(text, a=np.array([5, -3], np.int8)).tolist() == [5, -3]


def test_one_bit_integers_extend_by_their_sign() -> None:
    text = """
func.func @f(%a: tensor<3xi8>) -> (tensor<3xi32>, tensor<3xi32>)
    attributes {arg_names = ["a"], result_names = ["s", "u"]} {
  %e = tensor.empty() : tensor<3xi32>
  %s, %u = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>,
      affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]}
      ins(%a : tensor<3xi8>) outs(%e, %e : tensor<3xi32>, tensor<3xi32>) {
  ^bb0(%x: i8, %y: i32, %z: i32):
    %b = arith.trunci %x : i8 to i1
    %p = arith.extsi %b : i1 to i32
    %q = arith.extui %b : i1 to i32
    linalg.yield %p, %q : i32, i32
  } -> tensor<3xi32>, tensor<3xi32>
  func.return %s, %u : tensor<3xi32>, tensor<3xi32>
}"""
    got = run_linalg(parse(text), WeightStore(), {"a": np.array([2, 3, -1], np.int8)})
    assert got["s"].tolist() == [0, -1, -1]
    assert got["u"].tolist() == [0, 1, 1]
