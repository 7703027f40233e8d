"""Graph inputs: shapes the user binds, defaults that are frozen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tilewright.diagnostics import TilewrightError
from tilewright.dialects.onnx import UnknownValueError
from tilewright.frontends.onnx.tensors import check_dims, malformed

if TYPE_CHECKING:
    from onnx import TensorShapeProto, ValueInfoProto

Shapes = Mapping[str, tuple[int, ...]]


def symbol_of(dim: TensorShapeProto.Dimension) -> str:
    """Return the name of a symbolic dimension; some exporters write "?" for want of one."""
    return "" if dim.dim_param == "?" else dim.dim_param


class ShapeBinder:
    """Gives each graph input a static shape from the file and from what the user bound.

    A key of `shapes` is the name of an input (the whole shape) or of a symbolic dimension (one
    number).
    """

    def __init__(self, inputs: list[ValueInfoProto], shapes: Shapes) -> None:
        self._inputs = inputs
        names = {info.name for info in inputs}
        self._shapes = {key: tuple(value) for key, value in shapes.items() if key in names}
        symbols = {
            symbol_of(dim)
            for info in inputs
            for dim in info.type.tensor_type.shape.dim
            if symbol_of(dim)
        }
        self._dims: dict[str, int] = {}
        self._found: dict[str, int] = {}
        for key, value in shapes.items():
            if key in names:
                continue
            if key not in symbols or len(value) != 1:
                raise TilewrightError(
                    "E0103",
                    f"the shape given for {key!r} fits nothing in the model",
                    [
                        f"inputs: {', '.join(sorted(names)) or 'none'}",
                        f"symbolic dimensions: {', '.join(sorted(symbols)) or 'none'}",
                    ],
                )
            self._dims[key] = value[0]
        for key, value in [*self._shapes.items(), *((k, (v,)) for k, v in self._dims.items())]:
            if any(dim < 1 for dim in value):
                raise TilewrightError(
                    "E0103", f"the shape given for {key!r} has a size below 1", [f"{list(value)}"]
                )

    def bind(self, info: ValueInfoProto) -> tuple[int, ...]:
        """Return the static shape of one input.

        Raises:
            TilewrightError: E0103, a dimension is not known or contradicts what the user gave.
        """
        name = info.name
        tensor = info.type.tensor_type
        given = self._shapes.get(name)
        if not tensor.HasField("shape"):
            if given is None:
                raise UnknownValueError(
                    "E0103",
                    f"input {name!r} has no shape",
                    [],
                    f"give it, for example `--shape {_flag(name)}=1x3x224x224`",
                )
            return given
        declared = list(tensor.shape.dim)
        if given is not None and len(given) != len(declared):
            raise TilewrightError(
                "E0103",
                f"the shape given for input {name!r} has {len(given)} dimensions",
                [f"the model says {_shown(info)}"],
            )
        shape: list[int] = []
        open_dims: list[str] = []
        for axis, dim in enumerate(declared):
            # Exporters write -1 for an unknown size; 0 is a size ONNX allows.
            fixed = dim.dim_value if dim.HasField("dim_value") and dim.dim_value >= 0 else None
            bound = given[axis] if given is not None else self._dims.get(symbol_of(dim))
            symbol = self._dims.get(symbol_of(dim))
            if bound is None:
                bound = self._found.get(symbol_of(dim))
            clash = next(
                (v for v in (fixed, symbol) if bound is not None and v not in (None, bound)), None
            )
            if clash is not None:
                raise TilewrightError(
                    "E0103",
                    f"the size given for axis {axis} of input {name!r} contradicts the model",
                    [f"given {bound}; the model says {clash}"],
                )
            size = fixed if fixed is not None else bound
            if size is None:
                label = f" ({symbol_of(dim)!r})" if symbol_of(dim) else ""
                open_dims.append(f"axis {axis}{label} of input {name!r}")
            else:
                if symbol_of(dim):
                    self._bind_symbol(symbol_of(dim), size, name, axis)
                shape.append(size)
        if open_dims:
            raise self._dynamic(info, open_dims)
        check_dims(name, shape)
        return tuple(shape)

    def _bind_symbol(self, symbol: str, size: int, name: str, axis: int) -> None:
        """One symbol is one number in the whole graph."""
        if self._found.setdefault(symbol, size) != size:
            raise TilewrightError(
                "E0103",
                f"the symbolic dimension {symbol!r} gets two sizes",
                [f"{self._found[symbol]}, and {size} from axis {axis} of input {name!r}"],
            )

    def _dynamic(self, info: ValueInfoProto, open_dims: list[str]) -> TilewrightError:
        example = "x".join(
            str(dim.dim_value)
            if dim.HasField("dim_value") and dim.dim_value >= 0
            else dim.dim_param or "?"
            for dim in info.type.tensor_type.shape.dim
        )
        symbols = [symbol_of(d) for d in info.type.tensor_type.shape.dim if symbol_of(d)]
        other = f", or each symbol by itself: `--shape {_flag(symbols[0])}=1`" if symbols else ""
        return UnknownValueError(
            "E0103",
            f"input {info.name!r} has a dynamic shape, {_shown(info)}",
            [f"unknown: {item}" for item in open_dims],
            f"fix it with `--shape {_flag(info.name)}={example}`, numbers in place of "
            f"what is unknown{other}",
        )


def _flag(name: str) -> str:
    return name if name.isidentifier() else f'"{name}"'


def _shown(info: ValueInfoProto) -> str:
    dims = info.type.tensor_type.shape.dim
    return (
        "["
        + ", ".join(
            str(d.dim_value) if d.HasField("dim_value") else d.dim_param or "?" for d in dims
        )
        + "]"
    )


def check_tensor_input(info: ValueInfoProto) -> int:
    """Return the element type of a graph input.

    Raises:
        TilewrightError: E0104 for a sequence or optional, E0106 if the type is missing.
    """
    kind = info.type.WhichOneof("value")
    if kind is None:
        raise malformed(f"input {info.name!r} has no type")
    if kind != "tensor_type":
        raise TilewrightError(
            "E0104",
            f"input {info.name!r} is not a tensor",
            [f"it is a {kind.removesuffix('_type').replace('_', ' ')}; only tensors are supported"],
        )
    return info.type.tensor_type.elem_type
