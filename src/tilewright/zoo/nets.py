"""Networks whose packages hold only PyTorch weights, written with the weights' own key names.

Needs the torch extra. Weights are loaded strictly: a key too many or too few is an error.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from tilewright.diagnostics import TilewrightError

EFFICIENTNET_LITE0 = (
    # expansion, output channels, kernel, stride of the first, repeats
    (1, 16, 3, 1, 1),
    (6, 24, 3, 2, 2),
    (6, 40, 5, 2, 2),
    (6, 80, 3, 2, 3),
    (6, 112, 5, 1, 3),
    (6, 192, 5, 2, 4),
    (6, 320, 3, 1, 1),
)
MOBILENET_V2 = (
    # expansion, output channels, repeats, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _torch() -> Any:
    try:
        torch = import_module("torch")
    except ImportError as error:
        raise TilewrightError(
            "E0703",
            "this model's weights are a PyTorch file, and torch is not installed",
            hint="pip install 'tilewright[torch]' (torch's CPU build is enough)",
        ) from error
    return torch


def efficientnet_lite0() -> Any:
    """Return EfficientNet-Lite0 (no squeeze-excite, ReLU6 throughout) without weights."""
    nn = _torch().nn
    epsilon = 1e-3  # TensorFlow's, where the weights were trained

    def norm(channels: int) -> Any:
        return nn.BatchNorm2d(channels, eps=epsilon)

    def same(c_in: int, c_out: int, kernel: int, stride: int, groups: int = 1) -> Any:
        # TensorFlow's SAME padding for even sizes: at stride 2 the odd pixel is after, not before.
        before, after = (kernel - stride) // 2, (kernel - stride + 1) // 2
        even = before == after
        conv = nn.Conv2d(
            c_in, c_out, kernel, stride, before if even else 0, groups=groups, bias=False
        )
        return conv, nn.Identity() if even else nn.ZeroPad2d((before, after, before, after))

    class Block(nn.Module):
        """Inverted residual: expand, depthwise, project."""

        def __init__(self, c_in: int, c_out: int, expand: int, kernel: int, stride: int) -> None:
            super().__init__()
            middle = c_in * expand
            self.expands = expand != 1
            if self.expands:
                self._expand_conv = nn.Conv2d(c_in, middle, 1, bias=False)
                self._bn0 = norm(middle)
            self._depthwise_conv, self.pad = same(middle, middle, kernel, stride, middle)
            self._bn1 = norm(middle)
            self._project_conv = nn.Conv2d(middle, c_out, 1, bias=False)
            self._bn2 = norm(c_out)
            self.relu = nn.ReLU6()
            self.residual = stride == 1 and c_in == c_out

        def forward(self, x: Any) -> Any:
            y = self.relu(self._bn0(self._expand_conv(x))) if self.expands else x
            y = self.relu(self._bn1(self._depthwise_conv(self.pad(y))))
            y = self._bn2(self._project_conv(y))
            return x + y if self.residual else y

    class Net(nn.Module):
        """Stem, blocks, head, classifier."""

        def __init__(self) -> None:
            super().__init__()
            self._conv_stem, self.pad = same(3, 32, 3, 2)
            self._bn0 = norm(32)
            blocks: list[Any] = []
            channels = 32
            for expand, c_out, kernel, stride, repeats in EFFICIENTNET_LITE0:
                for index in range(repeats):
                    blocks.append(Block(channels, c_out, expand, kernel, 1 if index else stride))
                    channels = c_out
            self._blocks = nn.ModuleList(blocks)
            self._conv_head = nn.Conv2d(channels, 1280, 1, bias=False)
            self._bn1 = norm(1280)
            self._fc = nn.Linear(1280, 1000)
            self.relu = nn.ReLU6()

        def forward(self, x: Any) -> Any:
            x = self.relu(self._bn0(self._conv_stem(self.pad(x))))
            for block in self._blocks:
                x = block(x)
            x = self.relu(self._bn1(self._conv_head(x)))
            return self._fc(x.mean((2, 3)))

    return Net()


def mobilenet_v2() -> Any:
    """Return MobileNetV2 (width 1.0) without weights."""
    nn = _torch().nn

    def unit(c_in: int, c_out: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> Any:
        return nn.Sequential(
            nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU6(),
        )

    class Block(nn.Module):
        """Inverted residual: expand, depthwise, project."""

        def __init__(self, c_in: int, c_out: int, expand: int, stride: int) -> None:
            super().__init__()
            middle = c_in * expand
            steps: list[Any] = [unit(c_in, middle)] if expand != 1 else []
            steps += [
                unit(middle, middle, 3, stride, middle),
                nn.Conv2d(middle, c_out, 1, bias=False),
                nn.BatchNorm2d(c_out),
            ]
            self.conv = nn.Sequential(*steps)
            self.residual = stride == 1 and c_in == c_out

        def forward(self, x: Any) -> Any:
            return x + self.conv(x) if self.residual else self.conv(x)

    class Net(nn.Module):
        """Features and classifier."""

        def __init__(self) -> None:
            super().__init__()
            features: list[Any] = [unit(3, 32, 3, 2)]
            channels = 32
            for expand, c_out, repeats, stride in MOBILENET_V2:
                for index in range(repeats):
                    features.append(Block(channels, c_out, expand, 1 if index else stride))
                    channels = c_out
            features.append(unit(channels, 1280))
            self.features = nn.Sequential(*features)
            self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, 1000))

        def forward(self, x: Any) -> Any:
            return self.classifier(self.features(x).mean((2, 3)))

    return Net()


def minilm() -> Any:
    """Return all-MiniLM-L6-v2's encoder without weights; see `text_nets`."""
    from tilewright.zoo import text_nets

    return text_nets.minilm(_torch())


NETS: dict[str, Callable[[], Any]] = {
    "efficientnet-lite0": efficientnet_lite0,
    "mobilenet-v2": mobilenet_v2,
    "minilm": minilm,
}

OPSETS = {"minilm": 20}
"""Where another than 17 is needed: Gelu is one operator from 20 on."""


def _state(torch: Any, weights: Path) -> Any:
    """Return the tensors of a PyTorch or safetensors file by key."""
    with weights.open("rb") as file:
        zipped = file.read(2) in (b"PK", b"\x80\x02")
    if zipped:
        return torch.load(weights, map_location="cpu", weights_only=True)
    from safetensors.numpy import load_file

    return {key: torch.from_numpy(array) for key, array in load_file(weights).items()}


def export(
    name: str, weights: Path, inputs: Mapping[str, tuple[int, ...]], output: str = "logits"
) -> bytes:
    """Return the ONNX file of a net with its weights.

    The TorchScript exporter is used: it needs no further package, and names nodes by their module
    path, which is what reports then cite.

    Args:
        name: of the net.
        weights: a PyTorch or safetensors file.
        inputs: shapes by name, in the order of the net's arguments; `minilm` takes integers.
        output: name of the result.

    Raises:
        TilewrightError: E0703 without torch; E0101 when the weights do not fit the net.
    """
    from safetensors import SafetensorError

    torch = _torch()
    net = NETS[name]()
    kind = torch.int64 if name == "minilm" else torch.float32
    try:
        net.load_state_dict(_state(torch, weights), strict=True)
    except (RuntimeError, OSError, EOFError, SafetensorError) as error:
        raise TilewrightError(
            "E0101", f"the weights of `{name}` cannot be read", str(error).splitlines()[:4]
        ) from error
    net.eval()
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # torch announces that this exporter will go away.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            net,
            tuple(torch.ones(shape, dtype=kind) for shape in inputs.values()),
            buffer,
            input_names=list(inputs),
            output_names=[output],
            opset_version=OPSETS.get(name, 17),
            dynamo=False,
        )
    return buffer.getvalue()
