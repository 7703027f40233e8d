"""The harness must be able to fail: each way a `.mlir` test can go wrong is tried."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lit import LitError, run_file, run_lines

MODULE = """
builtin.module {
  func.func @main(%x: i32) -> i32 {
    func.return %x : i32
  }
}
"""


def write(folder: Path, *head: str, body: str = MODULE) -> Path:
    file = folder / "case.mlir"
    file.write_text("\n".join(f"// {line}" for line in head) + body)
    return file


def test_passes(tmp_path: Path) -> None:
    run_file(
        write(
            tmp_path,
            "RUN: tpu-mlir-opt %s | filecheck %s",
            "CHECK-LABEL: func.func @main",
            "CHECK-SAME: [[X:%[a-z]+]]: i32",
            "CHECK-NEXT: func.return [[X]]",
            "CHECK-NOT: arith",
        )
    )


@pytest.mark.parametrize(
    ("checks", "says"),
    [
        (["CHECK: func.func @other"], "@other"),
        (["CHECK-NOT: func.return", "CHECK: }"], "func.return"),
        (["CHECK: builtin.module", "CHECK-NEXT: func.return"], "func.return"),
        ([], "No check strings"),
    ],
)
def test_checks_fail(tmp_path: Path, checks: list[str], says: str) -> None:
    file = write(tmp_path, "RUN: tpu-mlir-opt %s | filecheck %s", *checks)
    with pytest.raises(LitError, match=says):
        run_file(file)


def test_no_run_line_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(LitError, match="no `// RUN:` line"):
        run_file(write(tmp_path, "CHECK: x"))


def test_tool_error_is_a_failure_even_if_the_text_matches(tmp_path: Path) -> None:
    file = write(
        tmp_path, "RUN: tpu-mlir-opt %s 2>&1 | filecheck %s", "CHECK: error", body="\nfunc.func {"
    )
    with pytest.raises(LitError, match="success expected"):
        run_file(file)


def test_not_expects_failure(tmp_path: Path) -> None:
    head = ("RUN: not tpu-mlir-opt %s 2>&1 | filecheck %s", "CHECK: error[E0501]: {{.*}}:4:")
    run_file(write(tmp_path, *head, body="\n\nfunc.func {"))
    with pytest.raises(LitError, match="failure expected"):
        run_file(write(tmp_path, *head))


def test_unknown_tool(tmp_path: Path) -> None:
    with pytest.raises(LitError, match="unknown tool `sed`"):
        run_file(write(tmp_path, "RUN: tpu-mlir-opt %s | sed s/a/b/"))


def test_scratch_files_and_several_lines(tmp_path: Path) -> None:
    run_file(
        write(
            tmp_path,
            "RUN: tpu-mlir-opt %s -o %t.mlir",
            "RUN: tpu-mlir-opt %t.mlir \\",
            "RUN:   --mlir-print-op-generic | filecheck %s",
            'CHECK: "builtin.module"',
        )
    )


def test_run_lines_join_only_after_a_backslash() -> None:
    assert run_lines("// RUN: a \\\n// RUN: b\n// RUN: c\n") == ["a b", "c"]
