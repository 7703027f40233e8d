"""Units of networks, made by hand: what the affine level would ask the planner."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from tilewright.schedule.plan import Read, TensorSpec, UnitSpec
from tilewright.schedule.tiling import ConvProblem


@dataclass
class Net:
    """Adds units one after the other."""

    units: list[UnitSpec] = field(default_factory=list[UnitSpec])
    tensors: list[TensorSpec] = field(default_factory=list[TensorSpec])

    def tensor(
        self, rows: int, columns: int, channels: int, ddr_only: str = "", **more: int
    ) -> int:
        """Add a tensor; return its number."""
        self.tensors.append(
            TensorSpec(f"t{len(self.tensors)}", rows, columns, channels, 1, ddr_only=ddr_only)
        )
        self.tensors[-1] = replace(self.tensors[-1], **more)
        return len(self.tensors) - 1

    def conv(
        self,
        source: int,
        channels: int,
        kernel: int = 1,
        stride: int = 1,
        depthwise: bool = False,
        second: int | None = None,
        into: int | None = None,
    ) -> int:
        """Add a convolution that keeps the image's size (divided by the stride)."""
        x = self.tensors[source]
        rows, columns = -(-x.rows // stride), -(-x.columns // stride)
        before = (kernel - 1) // 2
        after = max(0, (rows - 1) * stride + kernel - before - x.rows)
        wide = max(0, (columns - 1) * stride + kernel - before - x.columns)
        pads = tuple(max(a, b) for a, b in zip(x.pads, (before, before, after, wide), strict=True))
        self.tensors[source] = replace(x, pads=pads)
        target = self.tensor(rows, columns, channels) if into is None else into
        problem = ConvProblem(
            "conv",
            1,
            x.rows,
            x.columns,
            x.channels,
            rows,
            columns,
            channels,
            (kernel, kernel),
            (stride, stride),
            group=channels if depthwise else 1,
            second=second is not None,
        )
        reads = [Read(source, stride, kernel, before)]
        if second is not None:
            reads.append(Read(second))
        self.units.append(
            UnitSpec(f"u{len(self.units)}", problem, tuple(reads), target, rows, stripable=True)
        )
        return target

    def finish(self, last: int) -> Net:
        """Mark the last tensor as a result."""
        self.tensors[last] = replace(self.tensors[last], ddr_only="a result")
        return self


def mobilenet(size: int = 224) -> Net:
    """A network of inverted residuals."""
    net = Net()
    x = net.tensor(size, size, 3, "an argument")
    x = net.conv(x, 32, 3, 2)
    blocks = [
        (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]  # fmt: skip
    for expand, channels, count, first in blocks:
        for number in range(count):
            stride = first if number == 0 else 1
            skip = x if stride == 1 and net.tensors[x].channels == channels else None
            wide = net.tensors[x].channels * expand
            y = net.conv(x, wide) if expand > 1 else x
            y = net.conv(y, wide, 3, stride, depthwise=True)
            x = net.conv(y, channels, second=skip)
    return net.finish(net.conv(x, 1280))


def resnet(counts: tuple[int, ...] = (3, 4, 6, 3), size: int = 56) -> Net:
    """A network of bottlenecks."""
    net = Net()
    x = net.tensor(size, size, 64, "an argument")
    for stage, count in enumerate(counts):
        narrow = 64 << stage
        for number in range(count):
            stride = 2 if number == 0 and stage else 1
            skip = net.conv(x, narrow * 4, 1, stride) if number == 0 else x
            y = net.conv(x, narrow)
            y = net.conv(y, narrow, 3, stride)
            x = net.conv(y, narrow * 4, second=skip)
    return net.finish(x)
