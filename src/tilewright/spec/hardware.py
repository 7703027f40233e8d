"""The target description: one YAML file a chip, every field with unit, legal range and meaning.

The documents' keys are kept (`sram_size`, `dma_burst_size`, `mac_array_size: [128, 128]`).
`docs/reference/targets.md`, the JSON schema and the hardware parameters of the RTL are generated
from this one table.
"""

from __future__ import annotations

import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from tilewright.diagnostics import TilewrightError

DType = Literal["int8", "int4", "fp16"]
Rounding = Literal["half_up", "half_away", "half_even", "truncate"]


def _f(unit: str, doc: str, **limits: Any) -> Any:
    return Field(description=doc, json_schema_extra={"unit": unit}, **limits)


class Hardware(BaseModel):
    """A chip: sizes, clocks and latencies of the machine template (docs/concepts/machine.md)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: Annotated[str, _f("", "Name of the target.", pattern=r"^[A-Za-z0-9_.-]+$", max_length=64)]
    description: Annotated[str, _f("", "One line for people.", max_length=200)] = ""
    isa_version: Annotated[
        int, _f("", "Version of the instruction set the chip decodes.", ge=1, le=1)
    ] = 1

    mac_array_size: Annotated[
        tuple[int, int],
        _f(
            "rows x columns",
            "Weight-stationary, square: rows take input channels, columns give output channels.",
        ),
    ]
    dtypes: Annotated[
        tuple[DType, ...], _f("", "Number types the array and the vector unit execute.")
    ] = ("int8",)
    mac_saturation: Annotated[
        bool, _f("", "Accumulators saturate (true) or wrap (false) at 32 bits.")
    ] = True
    rounding: Annotated[Rounding, _f("", "Rounding of the requantising shift.")]
    vector_lanes: Annotated[
        int,
        _f(
            "lanes",
            "Elements the vector unit handles a cycle; equals the array's columns.",
            ge=4,
            le=256,
        ),
    ]

    vector_registers: Annotated[
        int, _f("registers", "V registers, each `vector_lanes` x 32 bit.", ge=8, le=128)
    ] = 128
    scalar_registers: Annotated[
        int, _f("registers", "R address registers, 40 bit; R0 reads as zero.", ge=4, le=32)
    ] = 32
    matrix_registers: Annotated[
        int, _f("registers", "M accumulator registers; two halves alternate.", ge=2, le=16)
    ] = 16
    matrix_register_rows: Annotated[
        int, _f("rows", "Pixels one M register holds (each `columns` x int32).", ge=4, le=1024)
    ]
    quant_banks: Annotated[int, _f("banks", "Quantisation-parameter banks.", ge=2, le=4)] = 4
    quant_bank_entries: Annotated[
        int, _f("entries", "Entries a bank: multiplier and shift for every lane.", ge=4, le=16)
    ] = 16
    vector_rows: Annotated[
        bool,
        _f(
            "",
            "The vector unit has integer softmax and layer normalisation of rows (`vec_softmax`, "
            "`vec_layer_norm`); without, they run on the host.",
        ),
    ] = False

    sram_size: Annotated[int, _f("bytes", "On-chip SRAM.", ge=4096, le=16 * 1024 * 1024)]
    sram_banks: Annotated[
        int,
        _f(
            "banks",
            "Single-ported banks of equal size, consecutive in the address space.",
            ge=2,
            le=64,
        ),
    ]
    sram_word_bytes: Annotated[int, _f("bytes", "Width of a bank's port.", ge=4, le=256)]

    core_clock_mhz: Annotated[
        int, _f("MHz", "Clock of sequencer, array and vector unit.", ge=1, le=5000)
    ]
    ddr_clock_mhz: Annotated[int, _f("MHz", "DDR clock.", ge=1, le=5000)]
    ddr_bus_bytes: Annotated[
        int, _f("bytes", "Bytes DDR moves a DDR clock; also its access granule.", ge=1, le=256)
    ]
    ddr_address_bits: Annotated[int, _f("bits", "Width of a DDR address.", ge=20, le=40)] = 40
    dma_clock_mhz: Annotated[int, _f("MHz", "Clock of the DMA engines.", ge=1, le=5000)]
    dma_channels: Annotated[
        int, _f("channels", "DMA channels, each with its own in-order queue.", ge=2, le=4)
    ]
    dma_bus_bytes: Annotated[int, _f("bytes", "Bytes one channel moves a DMA clock.", ge=1, le=256)]
    dma_burst_size: Annotated[
        int, _f("bytes", "Burst mode: address and length are multiples of it.", ge=8, le=4096)
    ]
    tensor_alignment: Annotated[
        int, _f("bytes", "Alignment of every tensor in DDR.", ge=1, le=4096)
    ] = 64

    dma_latency: Annotated[
        int, _f("DMA cycles", "From start to first byte in burst mode.", ge=1, le=1000)
    ] = 8
    dma_stream_latency_factor: Annotated[
        int, _f("", "Stream mode latency over burst mode latency.", ge=1, le=16)
    ] = 3
    mac_latency: Annotated[
        int, _f("core cycles", "From the last activation to the last accumulator.", ge=1, le=1000)
    ] = 12
    vector_latency: Annotated[
        int, _f("core cycles", "Pipeline depth of the vector unit.", ge=1, le=1000)
    ] = 3

    semaphores: Annotated[
        int, _f("semaphores", "Counting semaphores of 16 bits.", ge=32, le=32)
    ] = 32
    queue_depth: Annotated[
        int, _f("instructions", "Depth of every engine's queue.", ge=2, le=64)
    ] = 16
    activation_layout: Annotated[
        Literal["nhwc"], _f("", "Layout of image tensors in DDR and SRAM.")
    ] = "nhwc"
    channel_pad_alignment: Annotated[
        int,
        _f(
            "bytes",
            "Host tensors in planar layout have channels padded to this many bytes.",
            ge=1,
            le=4096,
        ),
    ] = 64

    @model_validator(mode="after")
    def _consistent(self) -> Hardware:
        rows, columns = self.mac_array_size
        if rows != columns or not 4 <= rows <= 256 or rows & (rows - 1):
            raise ValueError(
                "mac_array_size must be [n, n] with n a power of two from 4 to 256, "
                f"not [{rows}, {columns}]"
            )
        if self.vector_lanes != columns:
            raise ValueError(
                f"vector_lanes must equal the array's columns ({columns}), not {self.vector_lanes}"
            )
        if self.sram_size % self.sram_banks:
            raise ValueError(
                f"sram_size must be a multiple of sram_banks ({self.sram_banks}), "
                f"not {self.sram_size}"
            )
        for field in ("sram_word_bytes", "dma_burst_size", "ddr_bus_bytes", "tensor_alignment"):
            value: int = getattr(self, field)
            if value & (value - 1):
                raise ValueError(f"{field} must be a power of two, not {value}")
        if (self.sram_size // self.sram_banks) % self.sram_word_bytes:
            raise ValueError(
                f"a bank ({self.sram_size // self.sram_banks} bytes) must be "
                "a multiple of sram_word_bytes"
            )
        if "int8" not in self.dtypes:
            raise ValueError("dtypes must contain int8")
        table = -(-256 // (4 * self.vector_lanes))
        if self.vector_registers < table + 2:
            raise ValueError(
                f"vector_registers must be {table + 2} or more, not {self.vector_registers}: "
                f"a lookup table of 256 bytes takes {table} of {self.vector_lanes} lanes, and two "
                "hold the biases of this tile and the next"
            )
        rows = -(-512 // (4 * self.vector_lanes)) + 2
        if self.vector_rows and self.vector_registers < rows:
            raise ValueError(
                f"vector_registers must be {rows} or more with vector_rows, not "
                f"{self.vector_registers}: a softmax table of 512 bytes takes {rows - 2} of "
                f"{self.vector_lanes} lanes, and two hold the biases of this tile and the next"
            )
        if self.matrix_registers % 2:
            raise ValueError(f"matrix_registers must be even, not {self.matrix_registers}")
        return self

    if TYPE_CHECKING:
        # Frozen models are hashable; pydantic makes the method where type checkers do not see it.
        def __hash__(self) -> int: ...

    @property
    def array_size(self) -> int:
        """Rows (and columns) of the MAC array."""
        return self.mac_array_size[0]

    @property
    def bank_size(self) -> int:
        """Bytes of one SRAM bank."""
        return self.sram_size // self.sram_banks

    @property
    def accumulator_rows(self) -> int:
        """Pixels one half of the M registers holds: a MAC instruction's largest pixel block."""
        return self.matrix_registers // 2 * self.matrix_register_rows

    @property
    def ddr_bytes_per_cycle(self) -> float:
        """Peak DDR bytes a core cycle."""
        return self.ddr_bus_bytes * self.ddr_clock_mhz / self.core_clock_mhz

    @property
    def dma_bytes_per_cycle(self) -> float:
        """Peak bytes of one DMA channel a core cycle."""
        return self.dma_bus_bytes * self.dma_clock_mhz / self.core_clock_mhz

    @property
    def ddr_size(self) -> int:
        """Bytes a DDR address can reach."""
        return 1 << self.ddr_address_bits

    def digest(self) -> str:
        """Return the SHA3-256 of all fields but the description, as written in image headers."""
        content = self.model_dump(mode="json", exclude={"description"})
        return hashlib.sha3_256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def to_yaml(self) -> str:
        """Return the target file's text."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def shipped_targets() -> list[str]:
    """Return the names of the targets that come with tilewright, sorted."""
    folder = resources.files("tilewright.spec") / "targets"
    return sorted(
        entry.name.removesuffix(".yaml")
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    )


MAX_TARGET_BYTES = 64 * 1024


def load_target(name_or_path: str | Path) -> Hardware:
    """Return the shipped target of that name, or the one in that YAML file.

    Raises:
        TilewrightError: E0201 with one line a wrong field, or E0701 if there is no such file.
    """
    text, where = _target_text(name_or_path)
    return parse_target(text, where)


def differences(first: Hardware, second: Hardware) -> list[str]:
    """Return a line for each field in which two targets differ as chips: `name: a, not b`."""
    left, right = first.model_dump(mode="json"), second.model_dump(mode="json")
    return [
        f"{name}: {value}, not {right[name]}"
        for name, value in left.items()
        if name != "description" and value != right[name]
    ]


def is_changed_copy(target: Hardware) -> bool:
    """Tell whether a target bears the name of a shipped one, but is another chip."""
    name = target.name
    return name in shipped_targets() and load_target(name).digest() != target.digest()


def _target_text(name_or_path: str | Path) -> tuple[str, str]:
    name = str(name_or_path)
    if name in shipped_targets():
        return (resources.files("tilewright.spec") / "targets" / f"{name}.yaml").read_text(
            "utf-8"
        ), name
    path = Path(name_or_path)
    if not path.is_file():
        raise TilewrightError(
            "E0201",
            f"there is no target `{name}`",
            [f"shipped targets: {', '.join(shipped_targets())}"],
            "give one of these names, or the path of a target file (.yaml)",
        )
    try:
        if path.stat().st_size > MAX_TARGET_BYTES:
            raise TilewrightError(
                "E0201", f"target file `{path}` is larger than {MAX_TARGET_BYTES} bytes"
            )
        return path.read_text("utf-8"), str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TilewrightError("E0701", f"cannot read target file `{path}`", [str(error)]) from error


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands in a mapping twice: which of both counts would be a guess."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping.

        Raises:
            yaml.constructor.ConstructorError: a key is there twice, or cannot be a key.
        """
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"`{key.value}` is given twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def parse_target(text: str, where: str = "target") -> Hardware:
    """Parse a target file's text; `where` names it in errors.

    Raises:
        TilewrightError: E0201; one line a wrong field: name, value, unit, legal range.
    """
    try:
        # A `SafeLoader`: no tag makes an object.
        content: Any = yaml.load(text, _UniqueKeys)
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        # The last two: a date that does not exist, a mapping for a key.
        raise TilewrightError(
            "E0201", f"target file `{where}` is not YAML", str(error).splitlines()[:4]
        ) from error
    if not isinstance(content, dict):
        raise TilewrightError(
            "E0201", f"target file `{where}` must be a mapping of fields to values"
        )
    if wrong := [repr(key) for key in content if not isinstance(key, str)]:
        raise TilewrightError(
            "E0201", f"target file `{where}` has fields whose names are no text", wrong[:4]
        )
    for key in ("mac_array_size", "dtypes"):
        if isinstance(content.get(key), list):
            content[key] = tuple(content[key])
    try:
        return Hardware.model_validate(content)
    except ValidationError as error:
        details = [_field_error(item) for item in error.errors()]
        raise TilewrightError(
            "E0201",
            f"target `{where}` is wrong",
            sorted(details),
            "docs/reference/targets.md lists every field",
        ) from error


def field_range(name: str) -> str:
    """Return the legal range of a field in words."""
    info = Hardware.model_fields[name]
    low = high = None
    for item in info.metadata:
        low = getattr(item, "ge", low)
        high = getattr(item, "le", high)
    if low is not None and high is not None:
        return f"{low}..{high}"
    literal = getattr(info.annotation, "__args__", None)
    if literal is not None and all(isinstance(option, str) for option in literal):
        return " | ".join(literal)
    return {
        "mac_array_size": "[n, n], n a power of two from 4 to 256",
        "dtypes": "a list of int8, int4, fp16",
    }.get(name, "")


def field_unit(name: str) -> str:
    """Return the unit of a field."""
    extra = Hardware.model_fields[name].json_schema_extra
    return str(extra.get("unit", "")) if isinstance(extra, dict) else ""


def _field_error(item: Any) -> str:
    location = item["loc"]
    if not location:
        return str(item["msg"]).removeprefix("Value error, ")
    name = str(location[0])
    if item["type"] == "extra_forbidden":
        import difflib

        close = difflib.get_close_matches(name, Hardware.model_fields, 1)
        return f"{name}: unknown field" + (f"; did you mean `{close[0]}`?" if close else "")
    unit, legal = field_unit(name), field_range(name)
    suffix = (f" {unit}" if unit else "") + (f"; legal: {legal}" if legal else "")
    if item["type"] == "missing":
        return f"{name}: missing" + (f" ({suffix.strip(' ;')})" if suffix else "")
    return f"{name}: {item['input']!r}{suffix} ({item['msg'][0].lower()}{item['msg'][1:]})"
