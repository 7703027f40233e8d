"""Small programs for the tests of packages and the runtime."""

from __future__ import annotations

import numpy as np

from tilewright.codegen.package import PackageContent
from tilewright.codegen.program import (
    HostStep,
    LoadStep,
    Port,
    Program,
    StoreStep,
    TensorInfo,
    TpuStep,
)
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, encode_program


def copy_program() -> Program:
    """A model that quantises `x` (1x2x3x4), copies it through SRAM, and adds 1 on the host."""
    from onnx import TensorProto, helper

    size = 2 * 3 * 4
    code = encode_program(
        [
            Instr(
                "dma_load",
                {"ddr": 0, "ddr_r": 2, "sram": 0, "n0": size, "stream": 1, "signal": 1 << 3},
            ),
            Instr(
                "dma_store",
                {
                    "channel": 1,
                    "ddr": 64,
                    "ddr_r": 2,
                    "sram": 0,
                    "n0": size,
                    "stream": 1,
                    "wait": 1 << 3,
                },
            ),
            Instr("halt", {}),
        ]
    )
    graph = helper.make_graph(
        [helper.make_node("Add", ["copied", "one"], ["y"], "plus")],
        "host",
        [helper.make_tensor_value_info("copied", TensorProto.FLOAT, [1, 2, 3, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2, 3, 4])],
        [helper.make_tensor("one", TensorProto.FLOAT, [], [1.0])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    model.ir_version = 8
    x = TensorInfo("x", (1, 3, 4, 2), 0, scale=0.5, zero_point=0, low=-127, layer="input")
    y = TensorInfo("t", (1, 3, 4, 2), 64, scale=0.5, zero_point=0, low=-127, layer="copy")
    return Program(
        inputs=[Port("x", (1, 2, 3, 4))],
        outputs=[Port("y", (1, 2, 3, 4))],
        constants=np.arange(256, dtype=np.uint8),
        workspace_bytes=128,
        tensors={"x": x, "t": y},
        steps=[
            StoreStep("x", "x", (0, 2, 3, 1)),
            TpuStep("tpu_0", code, ("copy", "copy", ""), ("x",), ("t",)),
            LoadStep("t", "copied", (1, 2, 3, 4), (0, 3, 1, 2)),
            HostStep("host_0", model.SerializeToString(), ("copied",), ("y",), "a test", ("plus",)),
        ],
        sram_peak_bytes=size,
        layer_info=[
            {
                "name": "copy",
                "op": "copy",
                "device": "tpu",
                "macs": 0,
                "array_cycles": 0,
                "min_ddr_bytes": 2 * size,
                "sram_bytes": size,
            },
            {"name": "plus", "op": "add", "device": "host", "reason": "a test"},
        ],
    )


def copy_content(target: str = "tiny8") -> PackageContent:
    """The package of `copy_program`."""
    return PackageContent(
        program=copy_program(),
        target=load_target(target),
        model_name="copy.onnx",
        model_sha3="ab" * 32,
        options={"target": target},
        decisions=[
            {
                "layer": "copy",
                "stage": "fuse",
                "fired": False,
                "reason": "nothing to fuse",
                "details": {},
            }
        ],
        extras={"ir/quant.mlir": b"module {}\n", "weights.safetensors": b"\x02\0\0\0\0\0\0\0{}"},
    )
