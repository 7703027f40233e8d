"""Quantise a model with another tool and run it: in an environment of that tool, not tilewright's.

    python peer.py FOLDER METHOD

FOLDER holds `model.onnx`, `calibration.npz` and `evaluation.npz` (keys `INDEX/INPUT`), and
`task.json`: `weight_bits`; `shapes` of inputs; `carry`, inputs that take an output of the run
before where they have no array of their own. `METHOD.onnx` and `METHOD.npz` (keys `INDEX/OUTPUT`)
are written there; one JSON line tells CPU seconds and peak memory of quantising.

Every result is a float model with quantise and dequantise nodes, run with graph optimisations off,
so that nothing but the tool's own choice of codes and scales counts.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.version_converter
import onnxruntime

Feed = dict[str, Any]


def feeds(path: Path) -> list[Feed]:
    """Return the inputs of a file, in their order."""
    found: dict[int, Feed] = {}
    with np.load(path) as file:
        for key in file.files:
            index, _, name = key.partition("/")
            found.setdefault(int(index), {})[name] = file[key]
    return [found[index] for index in sorted(found)]


def run(model: Path, inputs: list[Feed], carry: dict[str, str]) -> Feed:
    """Return the outputs of a model, keyed `INDEX/OUTPUT`."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(model), options, ["CPUExecutionProvider"])
    outputs = [item.name for item in session.get_outputs()]
    results: Feed = {}
    for index, feed in enumerate(inputs):
        before = {name: results[f"{index - 1}/{source}"] for name, source in carry.items() if index}
        for name, array in zip(outputs, session.run(outputs, {**before, **feed}), strict=True):
            results[f"{index}/{name}"] = array
    return results


def prepared(folder: Path, shapes: dict[str, list[int]]) -> Path:
    """Return the model with fixed shapes, constants folded and batch norms in the layers.

    Scales by channel need opset 13.
    """
    from onnxruntime.quantization.shape_inference import quant_pre_process

    model = onnx.load(folder / "model.onnx")
    for value in model.graph.input:
        if value.name in shapes:
            dims = value.type.tensor_type.shape
            del dims.dim[:]
            for size in shapes[value.name]:
                dims.dim.add().dim_value = size
    if next(item.version for item in model.opset_import if not item.domain) < 13:
        model = onnx.version_converter.convert_version(model, 17)
    onnx.save(model, folder / "fixed.onnx")
    path = folder / "prepared.onnx"
    quant_pre_process(str(folder / "fixed.onnx"), str(path), skip_symbolic_shape=True)
    return path


class Reader:
    """Calibration data in slices, so that histograms need not hold all pictures' activations."""

    def __init__(self, samples: list[Feed]) -> None:
        self.samples = samples
        self.next = iter(samples)

    def __len__(self) -> int:
        return len(self.samples)

    def set_range(self, start_index: int, end_index: int) -> None:
        """Go on with these samples."""
        self.next = iter(self.samples[start_index:end_index])

    def get_next(self) -> Feed | None:
        """Return the next sample, or None after the last."""
        return next(self.next, None)


def onnxruntime_static(
    source: Path, target: Path, method: str, samples: list[Feed], task: dict[str, Any]
) -> None:
    """Static quantisation of onnxruntime: asymmetric activations, weights by channel, QDQ."""
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    calibration = {
        "ort-minmax": CalibrationMethod.MinMax,
        "ort-percentile": CalibrationMethod.Percentile,
        "ort-entropy": CalibrationMethod.Entropy,
    }[method]
    stride = next(n for n in range(min(10, len(samples)), 0, -1) if len(samples) % n == 0)
    extra: dict[str, Any] = {"CalibStridedMinMax": stride}
    quantize_static(
        str(source),
        str(target),
        Reader(samples),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8 if task["weight_bits"] == 8 else QuantType.QInt4,
        calibrate_method=calibration,
        extra_options=extra,
    )


def nncf_static(
    source: Path, target: Path, method: str, samples: list[Feed], task: dict[str, Any]
) -> None:
    """Post-training quantisation of NNCF: fast or full bias correction, SmoothQuant or not."""
    import nncf

    options: dict[str, Any] = {
        "subset_size": len(samples),
        "fast_bias_correction": "full" not in method,
    }
    if "mixed" in method:
        # Activations that are negative somewhere get a zero point; the default has none.
        options["preset"] = nncf.QuantizationPreset.MIXED
    if "transformer" in method:
        options["model_type"] = nncf.ModelType.TRANSFORMER
    model = nncf.quantize(onnx.load(source), nncf.Dataset(samples, lambda item: item), **options)
    onnx.save(model, target)


def nncf_weights(
    source: Path, target: Path, method: str, samples: list[Feed], task: dict[str, Any]
) -> None:
    """Compression of the weights of products to 4 bits by NNCF; activations stay float."""
    import nncf

    del method, samples, task
    model = nncf.compress_weights(
        onnx.load(source),
        mode=nncf.CompressWeightsMode.INT4_SYM,
        group_size=-1,
        all_layers=True,
    )
    onnx.save(model, target)


def peak_mb() -> float:
    """Return the largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(arguments: list[str]) -> int:
    """Quantise, run, write."""
    folder, method = Path(arguments[0]), arguments[1]
    logging.disable(logging.WARNING)
    task = json.loads((folder / "task.json").read_text("utf-8"))
    samples = feeds(folder / "calibration.npz")
    target = folder / f"{method}.onnx"
    start = time.process_time()
    source = prepared(folder, task["shapes"])
    if method.startswith("ort-"):
        onnxruntime_static(source, target, method, samples, task)
    elif method == "nncf-weights":
        nncf_weights(source, target, method, samples, task)
    else:
        nncf_static(source, target, method, samples, task)
    seconds, peak = time.process_time() - start, peak_mb()
    found = run(target, feeds(folder / "evaluation.npz"), task["carry"])
    np.savez(folder / f"{method}.npz", **found)
    print(json.dumps({"method": method, "seconds": seconds, "peak_mb": peak}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
