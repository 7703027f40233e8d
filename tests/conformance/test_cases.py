"""Faults that users of other compilers met, as small models with known results (`tests/cases`).

`note.txt` in each folder says what is checked, where it was reported and how the expected values
were made.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tilewright.diagnostics import TilewrightError
from tilewright.frontends.onnx import import_onnx
from tilewright.ir.context import CompileContext
from tilewright.runtime.float_executor import TopSession
from tilewright.transforms.convert_onnx_to_top import ConvertOnnxToTopPass

CASES = Path(__file__).parents[1] / "cases"
FOLDERS = sorted(
    path
    for path in CASES.iterdir()
    if (path / "model.onnx").exists()
    # Models with codes: test_cases_quantised.py.
    and not path.name.startswith(("quant-", "codegen-odd-k-both"))
)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_case(folder: Path) -> None:
    ctx = CompileContext()
    if (folder / "expect_error.txt").exists():
        with pytest.raises(TilewrightError) as caught:
            import_onnx(folder / "model.onnx", None, ctx)
        text = str(caught.value)
        assert all(word in text for word in ("FooBar", "acme.custom", "head/foo_7"))
        return
    module = import_onnx(folder / "model.onnx", None, ctx)
    module.verify()
    ConvertOnnxToTopPass().apply(ctx, module)
    module.verify()
    session = TopSession(module, ctx.weights, optimise=False)
    inputs = dict(np.load(folder / "inputs.npz"))
    wanted = dict(np.load(folder / "outputs.npz"))
    assert set(session.inputs) == set(inputs)
    found = session.run(inputs)
    assert set(found) == set(wanted)
    limit = re.search(r"max abs diff <= (\S+)", (folder / "note.txt").read_text(encoding="utf-8"))
    assert limit is not None
    for name, array in wanted.items():
        assert found[name].shape == array.shape, name
        assert found[name].dtype == array.dtype, name
        np.testing.assert_allclose(found[name], array, rtol=0, atol=float(limit[1]), err_msg=name)


def test_frozen_default_is_reported() -> None:
    ctx = CompileContext()
    import_onnx(CASES / "runtime-external-weights" / "model.onnx", None, ctx)
    frozen = [d for d in ctx.decisions if d.layer == "scale"]
    assert len(frozen) == 1
    assert "default value" in frozen[0].reason
