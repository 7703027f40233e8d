"""Binary images."""

from __future__ import annotations

import struct

import pytest

from tilewright.codegen.image import HEADER_BYTES, Image, read_image, write_image
from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import load_target
from tilewright.spec.program import Instr, encode_program

TINY, EDGE = load_target("tiny8"), load_target("edge16")
IMAGE = Image(TINY.digest(), encode_program([Instr("halt")]), b"constants", 4096)
DATA = write_image(IMAGE)


def refused(data: bytes) -> str:
    with pytest.raises(TilewrightError) as error:
        read_image(data, TINY)
    assert error.value.code == "E0601"
    return error.value.message


def test_round_trip_and_determinism() -> None:
    assert read_image(DATA, TINY) == IMAGE
    assert write_image(read_image(DATA)) == DATA
    assert len(DATA) == HEADER_BYTES + 64 + 9


def test_every_damaged_byte_is_noticed() -> None:
    for position in range(len(DATA)):
        spoiled = bytearray(DATA)
        spoiled[position] ^= 1
        refused(bytes(spoiled))


def test_every_truncation_is_noticed() -> None:
    for size in range(len(DATA)):
        refused(DATA[:size])
    refused(DATA + b"\0")


@pytest.mark.parametrize(
    ("offset", "size", "message"),
    [
        (48, 2**63, "code size must be a multiple of 64"),
        (48, 0, "code size must be a multiple of 64 from 64"),
        (48, 65, "code size must be a multiple of 64"),
        (48, 128, "but the file has"),
        (56, 2**64 - 1, "must take at most"),
        (64, 2**41, "must take at most"),
    ],
)
def test_hostile_sizes(offset: int, size: int, message: str) -> None:
    spoiled = bytearray(DATA)
    struct.pack_into("<Q", spoiled, offset, size)
    assert message in refused(bytes(spoiled))


def test_versions_and_magic_are_named() -> None:
    assert "starts with b'XILEWRT" in refused(b"X" + DATA[1:])
    assert "format version must be 1, not 2" in refused(DATA[:8] + b"\2" + DATA[9:])
    assert "ISA version must be 1, not 7" in refused(DATA[:12] + b"\7" + DATA[13:])


def test_image_of_another_target() -> None:
    with pytest.raises(TilewrightError, match="another target than `edge16`"):
        read_image(DATA, EDGE)


def test_image_larger_than_ddr() -> None:
    large = write_image(Image(TINY.digest(), IMAGE.code, b"", 1 << 33))
    with pytest.raises(TilewrightError, match="do not fit target `tiny8`"):
        read_image(large, TINY)


def test_writing_checks_sizes() -> None:
    with pytest.raises(TilewrightError, match="code size"):
        write_image(Image(TINY.digest(), b"", b"", 0))
