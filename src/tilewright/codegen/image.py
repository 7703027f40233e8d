"""The `.bin` image: header, code, DDR constants.

Little endian. Header of 128 bytes:

| bytes | content |
|---|---|
| 0..7 | magic `TILEWRT` and a zero byte |
| 8..11 | format version (1) |
| 12..15 | ISA version |
| 16..47 | SHA3-256 digest of the target |
| 48..55 | bytes of code (a multiple of 64) |
| 56..63 | bytes of constants |
| 64..71 | bytes of workspace (not stored) |
| 72..103 | SHA3-256 of code, constants and the header before this field |
| 104..127 | zero |

Then the code, then the constants, and nothing after them.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

from tilewright.diagnostics import TilewrightError
from tilewright.spec.hardware import Hardware
from tilewright.spec.isa import INSTRUCTION_BYTES, ISA_VERSION

MAGIC = b"TILEWRT\0"
FORMAT_VERSION = 1
HEADER_BYTES = 128
MAX_CODE_BYTES = 1 << 30
MAX_DDR_BYTES = 1 << 40
_HEAD = struct.Struct("<8sII32sQQQ")
assert _HEAD.size == 72, "layout documented above"


@dataclass(frozen=True)
class Image:
    """A program with its constants, for one target."""

    target_digest: str
    """`Hardware.digest()`, hexadecimal."""
    code: bytes
    constants: bytes
    workspace_bytes: int
    """DDR bytes after the constants that the program uses."""
    isa_version: int = ISA_VERSION


def _digest(head: bytes, code: bytes, constants: bytes) -> bytes:
    sha = hashlib.sha3_256(head)
    sha.update(code)
    sha.update(constants)
    return sha.digest()


def write_image(image: Image) -> bytes:
    """Return the bytes of an image; equal images give equal bytes.

    Raises:
        TilewrightError: E0601 if a size is out of range.
    """
    _check_sizes(len(image.code), len(image.constants), image.workspace_bytes)
    head = _HEAD.pack(
        MAGIC,
        FORMAT_VERSION,
        image.isa_version,
        bytes.fromhex(image.target_digest),
        len(image.code),
        len(image.constants),
        image.workspace_bytes,
    )
    digest = _digest(head, image.code, image.constants)
    padding = bytes(HEADER_BYTES - len(head) - len(digest))
    return b"".join((head, digest, padding, image.code, image.constants))


def _check_sizes(code: int, constants: int, workspace: int) -> None:
    if code % INSTRUCTION_BYTES or not 0 < code <= MAX_CODE_BYTES:
        raise TilewrightError(
            "E0601",
            f"image: code size must be a multiple of {INSTRUCTION_BYTES} from "
            f"{INSTRUCTION_BYTES} to {MAX_CODE_BYTES} bytes, not {code}",
        )
    if constants + workspace > MAX_DDR_BYTES:
        raise TilewrightError(
            "E0601",
            f"image: constants and workspace must take at most {MAX_DDR_BYTES} bytes together, "
            f"not {constants} + {workspace}",
        )


def read_image(data: bytes, hardware: Hardware | None = None) -> Image:
    """Return the image in `data`, every field and the checksum verified.

    With `hardware`, also that the image is for that target and that its memory fits DDR.

    Raises:
        TilewrightError: E0601.
    """
    if len(data) < HEADER_BYTES:
        raise TilewrightError(
            "E0601", f"image: the header has {HEADER_BYTES} bytes, the file only {len(data)}"
        )
    head = data[: _HEAD.size]
    magic, version, isa, target, code_size, constant_size, workspace = _HEAD.unpack(head)
    if magic != MAGIC:
        raise TilewrightError(
            "E0601", f"image: the file starts with {magic!r}, not {MAGIC!r}",
            hint="give a .bin file written by `tilewright compile`",
        )  # fmt: skip
    if version != FORMAT_VERSION:
        raise TilewrightError(
            "E0601", f"image: format version must be {FORMAT_VERSION}, not {version}"
        )
    if isa != ISA_VERSION:
        raise TilewrightError("E0601", f"image: ISA version must be {ISA_VERSION}, not {isa}")
    _check_sizes(code_size, constant_size, workspace)
    if len(data) != HEADER_BYTES + code_size + constant_size:
        raise TilewrightError(
            "E0601",
            f"image: header, code and constants are {HEADER_BYTES} + {code_size} + "
            f"{constant_size} bytes, but the file has {len(data)}",
        )
    code = data[HEADER_BYTES : HEADER_BYTES + code_size]
    constants = data[HEADER_BYTES + code_size :]
    end = _HEAD.size + 32
    if data[_HEAD.size : end] != _digest(head, code, constants):
        raise TilewrightError("E0601", "image: the checksum is wrong: the file is damaged")
    if any(data[end:HEADER_BYTES]):
        raise TilewrightError("E0601", f"image: header bytes {end}..{HEADER_BYTES - 1} must be 0")
    if hardware is not None:
        if target.hex() != hardware.digest():
            raise TilewrightError(
                "E0601",
                f"image: it was compiled for another target than `{hardware.name}`",
                [f"image: {target.hex()}", f"{hardware.name}: {hardware.digest()}"],
                "compile the model again for this target",
            )
        if constant_size + workspace > hardware.ddr_size:
            raise TilewrightError(
                "E0601",
                f"image: {constant_size + workspace} bytes of DDR do not fit target "
                f"`{hardware.name}` ({hardware.ddr_size} bytes)",
            )
    return Image(target.hex(), code, constants, workspace, isa)
