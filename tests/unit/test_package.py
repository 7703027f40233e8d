"""Packages: round trip, same bytes, and everything a hostile file may try."""

from __future__ import annotations

import io
import json
import random
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.package_samples import copy_content, copy_program
from tilewright.codegen.check_program import check_program
from tilewright.codegen.files import atomic_output, check_writable
from tilewright.codegen.manifest import decode_layers, encode_layers, step_entry
from tilewright.codegen.package import package_bytes, sha3, write_package
from tilewright.codegen.program import LoadStep, Program, StoreStep, TpuStep
from tilewright.diagnostics import TilewrightError
from tilewright.runtime.loader import read_package
from tilewright.spec.hardware import load_target


@pytest.fixture
def package(tmp_path: Path) -> Path:
    path = tmp_path / "copy.tpupkg"
    write_package(path, copy_content())
    return path


def test_round_trip(package: Path):
    wrote, read = copy_content(), read_package(package)
    np.testing.assert_array_equal(read.program.constants, wrote.program.constants)
    assert read.program.steps == wrote.program.steps
    assert read.program.tensors == wrote.program.tensors
    assert read.program.inputs == wrote.program.inputs
    assert read.program.layer_info == wrote.program.layer_info
    assert (read.target, read.decisions, read.extras) == (
        wrote.target,
        wrote.decisions,
        wrote.extras,
    )
    assert len(read.digest) == 64
    assert package_bytes(replace(read, digest="")) == package.read_bytes()


def test_same_bytes_and_readable(package: Path):
    assert package_bytes(copy_content()) == package_bytes(copy_content())
    with zipfile.ZipFile(package) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert names[0] == "manifest.json"
        assert names[1:] == sorted(names[1:])
        manifest = json.loads(archive.read("manifest.json"))
    assert manifest["target"]["name"] == "tiny8"
    assert set(manifest["members"]) == set(names[1:])


def test_wrong_target_is_named(package: Path):
    assert read_package(package, load_target("tiny8")).target.name == "tiny8"
    with pytest.raises(TilewrightError, match="made for target `tiny8`, not for `edge16`"):
        read_package(package, load_target("edge16"))


def _refused(path: Path, match: str | None = None) -> TilewrightError:
    with pytest.raises(TilewrightError, match=match) as caught:
        read_package(path)
    assert caught.value.code == "E0601"
    return caught.value


def test_missing_file(tmp_path: Path):
    with pytest.raises(TilewrightError) as caught:
        read_package(tmp_path / "no.tpupkg")
    assert caught.value.code == "E0701"


def test_cut_off_anywhere(package: Path):
    data = package.read_bytes()
    for length in [0, 1, 30, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1]:
        package.write_bytes(data[:length])
        _refused(package)


def test_any_changed_byte_is_noticed_or_harmless(package: Path):
    """A flipped byte is refused, or lies in zip bookkeeping and changes nothing that is read."""
    data = package.read_bytes()
    whole = read_package(package)
    chooser = random.Random(0)
    refused, codes = 0, set[str]()
    for position in chooser.sample(range(len(data)), 300):
        changed = bytearray(data)
        changed[position] ^= 1 << chooser.randrange(8)
        package.write_bytes(changed)
        try:
            read = read_package(package)
        except TilewrightError as error:
            codes.add(error.code)
            refused += 1
        else:
            assert read.program.steps == whole.program.steps
            assert read.digest == whole.digest
    assert refused > 200
    assert codes <= {"E0601", "E0201", "E0702"}


Members = dict[str, bytes]


def _rebuild(path: Path, change: Callable[[Members, dict[str, Any]], None], fix: bool = True):
    """Rewrite a package after changing members or manifest; sums are made right if `fix`."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(members.pop("manifest.json"))
    change(members, manifest)
    if fix:
        for name, entry in manifest["members"].items():
            if name in members:
                entry.update(size=len(members[name]), sha3_256=sha3(members[name]))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("manifest.json", json.dumps(manifest))
        for name, data in members.items():
            archive.writestr(name, data)


def test_rebuilding_alone_is_harmless(package: Path):
    _rebuild(package, lambda members, manifest: None)
    read_package(package)


@pytest.mark.parametrize(
    "name", ["target.yaml", "constants.bin", "program_0.bin", "host/host_0.onnx", "decisions.json"]
)
def test_missing_member(package: Path, name: str):
    def drop(members: Members, manifest: dict[str, Any]) -> None:
        del members[name]

    assert any(name in line for line in _after(package, drop).details)


def _after(
    package: Path, change: Callable[[Members, dict[str, Any]], None], fix: bool = True
) -> TilewrightError:
    _rebuild(package, change, fix)
    return _refused(package)


def test_checksum(package: Path):
    def change(members: Members, manifest: dict[str, Any]) -> None:
        members["constants.bin"] = b"\1" + members["constants.bin"][1:]

    assert "does not match its checksum" in _after(package, change, fix=False).details[0]


def test_unlisted_member(package: Path):
    def change(members: Members, manifest: dict[str, Any]) -> None:
        members["ir/more.mlir"] = b""

    assert "`ir/more.mlir` is not listed" in _after(package, change).details[0]


@pytest.mark.parametrize(
    "name", ["../evil", "/etc/passwd", "a/../../b", "a//b", "C:\\x", ".hidden", "a\\..\\b", "a/"]
)
def test_path_escapes(package: Path, name: str):
    with zipfile.ZipFile(package, "a") as archive:
        archive.writestr(zipfile.ZipInfo(name), b"x")
    assert "has a member called" in _refused(package).message


def test_duplicate_members(package: Path):
    with (
        zipfile.ZipFile(package, "a") as archive,
        pytest.warns(UserWarning, match="Duplicate name"),
    ):
        archive.writestr("constants.bin", b"x")
    assert "two members" in _refused(package).message


def test_compressed_members(package: Path):
    with zipfile.ZipFile(package, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ir/bomb.mlir", b"\0" * 10_000_000)
    assert package.stat().st_size < 1_000_000
    _refused(package, "more content than it has bytes")
    with zipfile.ZipFile(package, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("manifest.json", b"{}    ")
    _refused(package)


def test_overlapping_members_are_a_bomb(package: Path):
    """Many directory entries that share one body claim more than the file has."""
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as archive:
        archive.writestr("a", b"x" * 1000)
        first = archive.infolist()[0]
        for index in range(50):
            twin = zipfile.ZipInfo(f"b{index}")
            for key in ("header_offset", "file_size", "compress_size", "CRC"):
                setattr(twin, key, getattr(first, key))
            archive.filelist.append(twin)
            archive.NameToInfo[twin.filename] = twin
    package.write_bytes(body.getvalue())
    _refused(package, "more content")


def test_too_many_members(package: Path):
    with zipfile.ZipFile(package, "w") as archive:
        for index in range(4097):
            archive.writestr(f"m{index}", b"")
    _refused(package, "4097 members")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 2),
        ("format", "zip"),
        ("extra", 1),
        ("steps", [{"kind": "python", "code": "1"}]),
        ("inputs", "x"),
        ("tensors", [[1] * 5]),
        ("memory", {"constants_bytes": -1, "workspace_bytes": 0, "sram_peak_bytes": 0}),
        ("preprocess", {"size": [0, 0]}),
        ("target", {"name": "edge16", "digest": "0" * 64}),
    ],
)
def test_malformed_manifest(package: Path, key: str, value: object):
    def change(members: Members, manifest: dict[str, Any]) -> None:
        manifest[key] = value

    _rebuild(package, change)
    with pytest.raises(TilewrightError):
        read_package(package)


def test_manifest_that_is_no_json(package: Path):
    for text in (b"", b"\xff\xfe", b"[" * 100_000, b"null"):
        with zipfile.ZipFile(package, "w") as archive:
            archive.writestr("manifest.json", text)
        _refused(package)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m["tensors"][0].update(offset=1),
        lambda m: m["tensors"][0].update(offset=1 << 40),
        lambda m: m["tensors"][0].update(shape=[1, 3, 4, 1000]),
        lambda m: m["tensors"][0].update(shape=[1, -3, 4, 2]),
        lambda m: m["tensors"][0].update(scale=0.0),
        lambda m: m["tensors"][0].update(scale=None),
        lambda m: m["tensors"][0].update(zero_point=300),
        lambda m: m["tensors"][0].update(dtype="float32"),
        lambda m: m["tensors"].append(m["tensors"][0]),
        lambda m: m["steps"].reverse(),
        lambda m: m["steps"].pop(0),
        lambda m: m["steps"].pop(2),
        lambda m: m["steps"][0].update(perm=[0, 1, 1, 2]),
        lambda m: m["steps"][0].update(tensor="nothing"),
        lambda m: m["steps"][1].update(layer_runs=[[0, 2], [9, 1]]),
        lambda m: m["steps"][1].update(layer_runs=[[0, 1 << 40]]),
        lambda m: m["steps"][1].update(inputs=["t"]),
        lambda m: m["steps"][1].update(image="target.yaml"),
        lambda m: m["steps"][2].update(shape=[1, 2, 3, 5]),
        lambda m: m["outputs"][0].update(name="z"),
        lambda m: m["steps"][3].update(name=m["steps"][1]["name"]),
        lambda m: m["memory"].update(workspace_bytes=1 << 50),
        lambda m: m["memory"].update(sram_peak_bytes=1 << 30),
        lambda m: m["memory"].update(constants_bytes=3),
    ],
)
def test_inconsistent_programs(package: Path, change: Callable[[dict[str, Any]], None]):
    _rebuild(package, lambda members, manifest: change(manifest))
    _refused(package)


def test_writer_refuses_what_the_reader_would():
    program = copy_program()
    program.steps = [step for step in program.steps if not isinstance(step, TpuStep)]
    with pytest.raises(TilewrightError, match="before it is written"):
        package_bytes(replace(copy_content(), program=program))


def test_code_and_layers_must_agree():
    target = load_target("tiny8")

    def broken(**changes: Any) -> Program:
        program = copy_program()
        program.steps = [
            replace(step, **changes) if isinstance(step, TpuStep) else step
            for step in program.steps
        ]
        return program

    check_program(broken(), target)
    for changes in ({"code": b"x" * 100}, {"code": b""}, {"layers": ("a",)}):
        with pytest.raises(TilewrightError):
            check_program(broken(**changes), target)


def test_rank_of_perm_is_checked():
    program = copy_program()
    program.steps[0] = StoreStep("x", "x", (1, 0))
    with pytest.raises(TilewrightError, match="transposed"):
        check_program(program, load_target("tiny8"))
    program.steps[0] = StoreStep("x", "x", (0, 2, 3, 1))
    program.steps[2] = LoadStep("t", "copied", (24,), (0, 1))
    with pytest.raises(TilewrightError, match="transposed"):
        check_program(program, load_target("tiny8"))


def test_layer_runs_round_trip():
    layers = ("", "a", "a", "b", "a", "", "")
    entry = step_entry(TpuStep("t", b"\0" * 64 * 7, layers), 0)
    names, runs = encode_layers(layers)
    assert names == ("", "a", "b")
    assert runs == ((0, 1), (1, 2), (2, 1), (1, 1), (0, 2))
    assert decode_layers(entry, 7) == layers  # pyright: ignore[reportArgumentType]


def test_failed_write_leaves_nothing(tmp_path: Path):
    def write() -> None:
        with atomic_output(tmp_path / "a") as scratch:
            scratch.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write()
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write()
    assert (tmp_path / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_written_file_has_ordinary_rights(package: Path):
    plain = package.with_name("plain")
    plain.write_text("")
    assert stat.S_IMODE(package.stat().st_mode) == stat.S_IMODE(plain.stat().st_mode)


def test_unwritable_places(tmp_path: Path):
    for path in (tmp_path / "no" / "x.tpupkg", tmp_path, Path("/proc/x.tpupkg")):
        with pytest.raises(TilewrightError) as caught:
            check_writable(path)
        assert caught.value.code == "E0701"
    with pytest.raises(TilewrightError) as caught:
        write_package(tmp_path / "no" / "x.tpupkg", copy_content())
    assert caught.value.code == "E0701"
    check_writable(tmp_path / "fine")
    assert list(tmp_path.iterdir()) == []
