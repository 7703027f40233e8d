"""From pictures and array files to model inputs, and the preprocessing a package carries.

One definition serves calibration, `run` on pictures, and the benches, so that a model is calibrated
on exactly what it will see.
"""

from __future__ import annotations

import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from tilewright.diagnostics import TilewrightError, UsageError

if TYPE_CHECKING:
    from PIL.Image import Image

Array = npt.NDArray[Any]

PICTURE_SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm")
ARRAY_SUFFIXES = (".npy", ".npz")
MAX_PIXELS = 1 << 27
"""Of a resized picture, before the crop; a long thin one would take all memory."""


@dataclass(frozen=True)
class Preprocess:
    """From a picture to the model's input: resize, crop, colours, `(x / divide - mean) / std`."""

    size: tuple[int, int] = (224, 224)
    """Height and width of the model's input, pixels."""
    resize: Literal["short", "square", "crop-first", "fit"] = "short"
    """How the picture gets there.

    `short`: the shorter side to `resize_to`, then a centre crop of `size`. `square`: both sides to
    `resize_to`, then the crop. `crop-first`: a centre square of `size / resize_to` of the shorter
    side, then resized to `size`. `fit`: the height to `size`, the width in proportion, zeros
    (after normalising) on the right.
    """
    resize_to: int = 256
    filter: Literal["bilinear", "bicubic", "lanczos"] = "bilinear"
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    """Subtracted after division by `divide`; in the model's order of colours."""
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    divide: float = 255.0
    colours: Literal["rgb", "bgr"] = "rgb"
    layout: Literal["nchw", "nhwc"] = "nchw"

    def apply(self, picture: Image) -> Array:
        """Return the float32 input of one picture, batch axis of 1 included."""
        picture = picture.convert("RGB")
        pixels = np.asarray(self._resized(picture), np.float32)
        if self.colours == "bgr":
            pixels = pixels[..., ::-1]
        values = (pixels / np.float32(self.divide) - np.array(self.mean, np.float32)) / np.array(
            self.std, np.float32
        )
        width = self.size[1]
        if values.shape[1] < width:
            values = np.pad(values, ((0, 0), (0, width - values.shape[1]), (0, 0)))
        if self.layout == "nchw":
            values = values.transpose(2, 0, 1)
        return np.ascontiguousarray(values[None])

    def _resized(self, picture: Image) -> Image:
        from PIL.Image import Resampling

        kind = {
            "bilinear": Resampling.BILINEAR,
            "bicubic": Resampling.BICUBIC,
            "lanczos": Resampling.LANCZOS,
        }[self.filter]
        height, width = self.size
        if self.resize == "fit":
            wide = max(1, min(width, -(-height * picture.width // picture.height)))
            return picture.resize((wide, height), kind)
        if self.resize == "crop-first":
            side = min(picture.size) / self.resize_to
            box = _centre(picture.width, picture.height, side * width, side * height)
            return picture.resize((width, height), kind, box=box)
        if self.resize == "square":
            picture = picture.resize((self.resize_to, self.resize_to), kind)
        else:
            factor = self.resize_to / min(picture.size)
            wide = max(width, round(picture.width * factor))
            high = max(height, round(picture.height * factor))
            if wide * high > MAX_PIXELS:
                raise ValueError(
                    f"{picture.width} x {picture.height} pixels would become {wide} x {high}"
                )
            picture = picture.resize((wide, high), kind)
        left, top = (picture.width - width) // 2, (picture.height - height) // 2
        return picture.crop((left, top, left + width, top + height))

    def to_json(self) -> dict[str, Any]:
        """Return a dictionary of plain JSON values."""
        return {
            key: list(value) if isinstance(value, tuple) else value
            for key, value in asdict(self).items()
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Preprocess:
        """Rebuild from `to_json`.

        Raises:
            TilewrightError: E0702 for an unknown key or a value out of range.
        """
        return _checked(cls(), content)


def _centre(width: float, height: float, w: float, h: float) -> tuple[float, float, float, float]:
    left, top = (width - w) / 2, (height - h) / 2
    return (left, top, left + w, top + h)


_CHOICES: dict[str, tuple[str, ...]] = {
    "resize": ("short", "square", "crop-first", "fit"),
    "filter": ("bilinear", "bicubic", "lanczos"),
    "colours": ("rgb", "bgr"),
    "layout": ("nchw", "nhwc"),
}

PRESETS: dict[str, Preprocess] = {
    "imagenet": Preprocess(),
    "unit": Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
    "signed": Preprocess(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)),
    "caffe": Preprocess(mean=(104.0, 117.0, 123.0), std=(1.0, 1.0, 1.0), divide=1.0, colours="bgr"),
    "raw": Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), divide=1.0),
}
"""Names for `--preprocess`: the usual ones."""


def _checked(base: Preprocess, content: dict[str, Any]) -> Preprocess:
    def wrong(key: str, value: object, legal: str) -> UsageError:
        return UsageError("E0702", f"preprocessing: {key} must be {legal}, not {value!r}")

    values: dict[str, Any] = {}
    known = [item.name for item in fields(Preprocess)]
    for key, value in content.items():
        if key not in known:
            raise UsageError(
                "E0702", f"preprocessing has no option `{key}`", hint=f"options: {', '.join(known)}"
            )
        if key in _CHOICES:
            if value not in _CHOICES[key]:
                raise wrong(key, value, " or ".join(_CHOICES[key]))
            values[key] = value
            continue
        try:
            if key == "size":
                height, width = (int(item) for item in value)
                if not (1 <= height <= 8192 and 1 <= width <= 8192):
                    raise ValueError
                values[key] = (height, width)
            elif key in ("mean", "std"):
                triple = tuple(float(item) for item in value)
                if len(triple) != 3 or not np.all(np.isfinite(triple)):
                    raise ValueError
                if key == "std" and min(abs(item) for item in triple) == 0:
                    raise ValueError
                values[key] = triple
            elif key == "resize_to":
                values[key] = int(value)
                if not 1 <= values[key] <= 8192:
                    raise ValueError
            else:
                values[key] = float(value)
                if not values[key] > 0 or not np.isfinite(values[key]):
                    raise ValueError
        except (TypeError, ValueError) as error:
            legal = {
                "size": "height and width, 1..8192",
                "mean": "three numbers",
                "std": "three numbers other than 0",
                "resize_to": "a whole number, 1..8192",
                "divide": "a number above 0",
            }[key]
            raise wrong(key, value, legal) from error
    return replace(base, **values)


def parse_preprocess(text: str) -> Preprocess:
    """Read `--preprocess`: `PRESET` or `PRESET,key=value,...`; triples and sizes as `a:b:c`, `hxw`.

    Example: `imagenet,resize=crop-first,filter=bicubic,mean=0.498:0.498:0.498`.

    Raises:
        UsageError: unknown preset, option or value.
    """
    head, *options = (part.strip() for part in text.split(","))
    if "=" in head:
        head, options = "imagenet", [head, *options]
    if head not in PRESETS:
        raise UsageError(
            "E0702",
            f"there is no preprocessing called `{head}`",
            hint=f"known: {', '.join(PRESETS)}; options are added as `imagenet,filter=bicubic`",
        )
    content: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.strip().replace("-", "_")
        if not equals:
            raise UsageError("E0702", f"preprocessing: `{option}` must be written key=value")
        if key in ("mean", "std"):
            parts = value.split(":")
            content[key] = parts * 3 if len(parts) == 1 else parts
        elif key == "size":
            parts = value.lower().split("x")
            content[key] = parts * 2 if len(parts) == 1 else parts
        else:
            content[key] = value
    return _checked(PRESETS[head], content)


def fit_to_shape(preprocess: Preprocess, shape: tuple[int, ...]) -> Preprocess:
    """Return `preprocess` with the size and layout of a model input of `shape`.

    Raises:
        TilewrightError: E0301 when the input is not a picture of three channels.
    """
    if len(shape) == 4 and shape[1] == 3:
        size, layout = (shape[2], shape[3]), "nchw"
    elif len(shape) == 4 and shape[3] == 3:
        size, layout = (shape[1], shape[2]), "nhwc"
    else:
        raise TilewrightError(
            "E0301",
            f"pictures cannot be fed to an input of shape {'x'.join(map(str, shape))}",
            hint="give arrays: a folder of .npy files, or one .npz",
        )
    return replace(preprocess, size=size, layout=layout)


def read_picture(path: Path, preprocess: Preprocess) -> Array:
    """Return the model input of one picture file.

    Raises:
        TilewrightError: E0301 when it cannot be decoded.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as picture:
            return preprocess.apply(picture)
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise TilewrightError("E0301", f"picture `{path}` cannot be read", [str(error)]) from error
    except Image.DecompressionBombError as error:
        raise TilewrightError("E0301", f"picture `{path}` is too large", [str(error)]) from error


def list_samples(path: Path) -> list[Path]:
    """Return the sample files below a folder (not recursive), sorted, or the file itself.

    Raises:
        TilewrightError: E0301 when there is nothing of a known kind.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise TilewrightError("E0301", f"there is no file or folder `{path}`")
    found = sorted(
        item
        for item in path.iterdir()
        if item.suffix.lower() in PICTURE_SUFFIXES + ARRAY_SUFFIXES and item.is_file()
    )
    if not found:
        raise TilewrightError(
            "E0301",
            f"folder `{path}` holds no samples",
            [f"known kinds: {' '.join(PICTURE_SUFFIXES + ARRAY_SUFFIXES)}"],
        )
    return found


def load_samples(
    path: Path,
    shapes: dict[str, tuple[int, ...]],
    preprocess: Preprocess | None,
    limit: int | None = None,
    varying: bool = False,
) -> Iterator[dict[str, Array]]:
    """Yield model inputs (by name, batch of the model) from a folder, an .npz, .npy or picture.

    An .npz holds one array per model input, either of the input's shape or with one more leading
    axis of samples (or with that axis in place of a batch of 1). Folders give a sample a file.

    Args:
        path: Folder or file.
        shapes: Shape of every model input.
        preprocess: For pictures; its size is taken from the model.
        limit: At most so many samples.
        varying: Arrays may have other sizes than the model's inputs, with as many dimensions or one
            more, of samples. Pictures always get the model's size.

    Raises:
        TilewrightError: E0301 naming the file that is missing, unreadable, of a wrong shape, or not
            finite.
    """
    count = 0
    for file in list_samples(Path(path)):
        for sample in _samples_of(file, shapes, preprocess, varying):
            if limit is not None and count >= limit:
                return
            count += 1
            yield sample


def _samples_of(
    file: Path,
    shapes: dict[str, tuple[int, ...]],
    preprocess: Preprocess | None,
    varying: bool,
) -> Iterator[dict[str, Array]]:
    suffix = file.suffix.lower()
    if suffix in PICTURE_SUFFIXES:
        if len(shapes) != 1:
            raise TilewrightError(
                "E0301",
                f"the model has {len(shapes)} inputs; pictures feed only one",
                hint="give one .npz with an array for each input",
            )
        name, shape = next(iter(shapes.items()))
        chosen = fit_to_shape(preprocess or PRESETS["imagenet"], shape)
        picture = read_picture(file, chosen)
        yield {name: _fitted(file, name, picture, shape)[0]}
        return
    if suffix not in ARRAY_SUFFIXES:
        raise TilewrightError(
            "E0301",
            f"`{file}` is of no known kind",
            [f"known kinds: {' '.join(PICTURE_SUFFIXES + ARRAY_SUFFIXES)}"],
        )
    arrays = _read_arrays(file, shapes)
    split = {name: _fitted(file, name, arrays[name], shapes[name], varying) for name in shapes}
    counts = {len(items) for items in split.values()}
    if len(counts) != 1:
        raise TilewrightError(
            "E0301",
            f"`{file}` holds different numbers of samples for the inputs",
            [f"{name}: {len(items)}" for name, items in split.items()],
        )
    for index in range(counts.pop()):
        yield {name: items[index] for name, items in split.items()}


_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    NotImplementedError,
    MemoryError,
    SyntaxError,
    tokenize.TokenError,
    zlib.error,
    zipfile.BadZipFile,
)
"""What NumPy and zipfile raise at a broken file: a header that is no Python literal, a shape larger
than memory, an unknown or broken compression."""


def _read_arrays(file: Path, shapes: dict[str, tuple[int, ...]]) -> dict[str, Array]:
    try:
        # Opened here: NumPy leaves the file open when the archive is broken.
        with file.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            if isinstance(loaded, np.ndarray):
                if len(shapes) != 1:
                    raise TilewrightError(
                        "E0301",
                        f"`{file}` holds one array, the model has {len(shapes)} inputs",
                        hint="give an .npz with an array for each input",
                    )
                return {next(iter(shapes)): loaded}
            names = list(loaded.files)
            if len(shapes) == 1 and len(names) == 1:
                return {next(iter(shapes)): loaded[names[0]]}
            missing = [name for name in shapes if name not in names]
            if missing:
                raise TilewrightError(
                    "E0301",
                    f"`{file}` has no array for input `{missing[0]}`",
                    [f"its arrays: {', '.join(names)}"],
                )
            return {name: loaded[name] for name in shapes}
    except _UNREADABLE as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise TilewrightError("E0301", f"array file `{file}` cannot be read", [first]) from error


def _fitted(
    file: Path, name: str, array: Array, shape: tuple[int, ...], varying: bool = False
) -> list[Array]:
    """Return the samples in `array`, each of exactly `shape`, or of as many sizes if `varying`."""
    if not isinstance(array, np.ndarray):  # pyright: ignore[reportUnnecessaryIsInstance]
        # A member of the archive that is no array comes as bytes.
        raise TilewrightError("E0301", f"`{file}`: `{name}` is no array")
    if array.dtype.kind not in "fiub":
        raise TilewrightError("E0301", f"`{file}`: array `{name}` holds {array.dtype}, not numbers")
    if array.dtype.kind == "f" and not np.all(np.isfinite(array)):
        raise TilewrightError("E0301", f"`{file}`: array `{name}` holds values that are not finite")
    if array.shape == shape:
        return [array]
    if array.shape[1:] == shape:
        return list(array)
    if shape and shape[0] == 1 and array.shape[1:] == shape[1:]:
        return list(array[:, None])
    if shape and shape[0] == 1 and array.shape == shape[1:]:
        return [array[None]]
    if varying and array.ndim == len(shape):
        return [array]
    if varying and array.ndim == len(shape) + 1:
        return list(array)
    raise TilewrightError(
        "E0301",
        f"`{file}`: array for input `{name}` has shape {list(array.shape)}",
        [f"the model takes {list(shape)}, or that with a leading axis of samples"],
    )
