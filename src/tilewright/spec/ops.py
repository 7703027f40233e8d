"""What becomes of each operator: the table behind refusals and `docs/reference/ops.md`.

Two tables. `TOP_OPS` says where each op of the `top` dialect runs. `ONNX_OPS` says how each ONNX
operator reaches `top`; its status follows from both, so the two cannot disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Place = Literal["array", "vector", "lut", "move", "host", "none"]
"""Where an op runs: the systolic array; the vector unit; a 256-entry table; data movement (or no
work at all); in float on the host; nowhere (constants)."""

How = Literal["op", "composed", "body", "folded", "refused"]
"""op: one op of `top`; composed: several, by a rule of ours; body: by the function body ONNX
defines for it; folded: computed at compile time; refused."""

Status = Literal["direct", "composed", "host", "folded", "refused"]


@dataclass(frozen=True)
class TopSupport:
    """Where an op of the `top` dialect runs after quantisation."""

    place: Place
    reason: str = ""
    """For the host: why no instruction does it."""


@dataclass(frozen=True)
class OnnxSupport:
    """How an operator of ONNX's default domain reaches `top`."""

    how: How
    top: tuple[str, ...] = ()
    """Ops of `top` it becomes, as far as they are fixed."""
    reason: str = ""
    """Why it is refused, or a limit."""

    @property
    def status(self) -> Status:
        """direct, composed, host (at least one part runs there), folded or refused."""
        if self.how in ("refused", "folded"):
            return self.how
        if any(TOP_OPS[name].place == "host" for name in self.top):
            return "host"
        return "direct" if self.how == "op" else "composed"


def _rows(place: Place, names: str, reason: str = "") -> dict[str, TopSupport]:
    return {name: TopSupport(place, reason) for name in names.split()}


_INDEX = "indices are computed by the host"
_ONE_TENSOR = "of a tensor and one number; of two tensors it runs on the host"

TOP_OPS: dict[str, TopSupport] = {
    **_rows("none", "none weight"),
    **_rows("array", "conv linear", "weights and bias must be constants, images of rank 4"),
    **_rows("array", "matmul"),
    **_rows("array", "batch_norm", "folded into a layer before it; by itself it runs on the host"),
    **_rows("vector", "add sub mul"),
    **_rows("vector", "max_pool", "images of rank 4, no indices"),
    **_rows("vector", "avg_pool", "images of rank 4; windows must all count as many elements"),
    **_rows("vector", "resize", "nearest and linear; cubic, antialiased and cropped: host"),
    **_rows("vector", "reduce", "means and sums over neighbouring axes; other kinds: host"),
    **_rows("vector", "relu clip", "part of the operation before, or a table"),
    **_rows("move", "reshape transpose concat slice"),
    **_rows("move", "pad", "with zeros or by repetition; with another value: host"),
    **_rows(
        "lut",
        """
        leaky_relu elu selu celu sigmoid hard_sigmoid hard_swish silu mish softplus softsign gelu
        tanh erf exp reciprocal neg abs sign floor ceil round sin cos
        """,
    ),
    **_rows("lut", "div pow min max", _ONE_TENSOR),
    **_rows("lut", "prelu", "with one slope; with a slope for each channel it runs on the host"),
    **_rows("host", "log sqrt rsqrt", "undefined for half of the codes of a symmetric scale"),
    **_rows(
        "host",
        "thresholded_relu shrink tan asin acos atan sinh cosh asinh acosh atanh",
        "there is no table of it yet",
    ),
    **_rows("host", "expand tile", "repetition has no instruction yet"),
    **_rows("vector", "softmax", "along the last axis, on targets with `vector_rows`; else host"),
    **_rows("vector", "layer_norm", "on targets with `vector_rows`; else host"),
    **_rows("host", "log_softmax hardmax", "needs exponentials and a division"),
    **_rows("host", "instance_norm lrn", "divides by a deviation computed at run time"),
    **_rows("host", "conv_transpose", "the array reads no stretched input yet"),
    **_rows("host", "cumsum", "a running sum is sequential"),
    **_rows("host", "mod", "remainders have no integer form"),
    **_rows(
        "host",
        """
        and or xor not bitwise_and bitwise_or bitwise_xor bitwise_not bit_shift equal greater
        greater_equal less less_equal is_nan is_inf where cast
        """,
        "booleans and integers are not quantised",
    ),
    **_rows(
        "host",
        "quantize_linear dequantize_linear",
        "what the scales of neighbouring layers did not take up, exactly as ONNX defines it",
    ),
    **_rows(
        "host",
        "dynamic_quantize_linear matmul_integer conv_integer",
        "scales known only at run time; replaced by given ranges when there is calibration data",
    ),
    **_rows(
        "host", "arg topk gather gather_elements gather_nd scatter_elements scatter_nd", _INDEX
    ),
}
"""By name without the dialect's prefix."""


def _same(pairs: str, how: How = "op") -> dict[str, OnnxSupport]:
    """Rows `Name=top_op`, or `Name=a+b` for several."""
    table: dict[str, OnnxSupport] = {}
    for pair in pairs.split():
        name, _, ops = pair.partition("=")
        table[name] = OnnxSupport(how, tuple(op for op in ops.split("+") if op))
    return table


def _refused(reason: str, names: str) -> dict[str, OnnxSupport]:
    return {name: OnnxSupport("refused", (), reason) for name in names.split()}


ONNX_OPS: dict[str, OnnxSupport] = {
    **_same(
        """
        Conv=conv ConvTranspose=conv_transpose MatMul=matmul Gemm=linear MaxPool=max_pool
        AveragePool=avg_pool Resize=resize Upsample=resize GlobalAveragePool=reduce
        GlobalMaxPool=reduce GlobalLpPool=reduce BatchNormalization=batch_norm
        InstanceNormalization=instance_norm LayerNormalization=layer_norm LRN=lrn
        """
    ),
    **_same(
        """
        Relu=relu Clip=clip LeakyRelu=leaky_relu Elu=elu Celu=celu Selu=selu
        ThresholdedRelu=thresholded_relu Sigmoid=sigmoid HardSigmoid=hard_sigmoid
        HardSwish=hard_swish Mish=mish Softplus=softplus Softsign=softsign Shrink=shrink
        Gelu=gelu Tanh=tanh Erf=erf Exp=exp Log=log Sqrt=sqrt Reciprocal=reciprocal Neg=neg
        Abs=abs Sign=sign Floor=floor Ceil=ceil Round=round Sin=sin Cos=cos Tan=tan
        Asin=asin Acos=acos Atan=atan Sinh=sinh Cosh=cosh Asinh=asinh Acosh=acosh
        Atanh=atanh Not=not BitwiseNot=bitwise_not IsNaN=is_nan IsInf=is_inf PRelu=prelu
        """
    ),
    **_same(
        """
        Add=add Sub=sub Mul=mul Div=div Pow=pow Min=min Max=max Sum=add Mod=mod And=and
        Or=or Xor=xor BitwiseAnd=bitwise_and BitwiseOr=bitwise_or BitwiseXor=bitwise_xor
        BitShift=bit_shift Equal=equal Greater=greater GreaterOrEqual=greater_equal
        Less=less LessOrEqual=less_equal Where=where Cast=cast
        """
    ),
    **_same(
        """
        Softmax=softmax LogSoftmax=log_softmax Hardmax=hardmax CumSum=cumsum ArgMax=arg
        ArgMin=arg TopK=topk Gather=gather GatherElements=gather_elements GatherND=gather_nd
        Scatter=scatter_elements ScatterElements=scatter_elements ScatterND=scatter_nd
        """
    ),
    **_same(
        """
        ReduceMean=reduce ReduceSum=reduce ReduceMax=reduce ReduceMin=reduce
        ReduceProd=reduce ReduceL1=reduce ReduceL2=reduce ReduceLogSum=reduce
        ReduceLogSumExp=reduce ReduceSumSquare=reduce
        """
    ),
    **_same(
        """
        Reshape=reshape Flatten=reshape Squeeze=reshape Unsqueeze=reshape Expand=expand
        Tile=tile Transpose=transpose Concat=concat Split=slice Slice=slice Pad=pad
        Identity= Dropout= ConstantOfShape=weight EyeLike=weight
        """
    ),
    **_same(
        """
        Mean=add+div Swish=silu LpPool=avg_pool+mul+sqrt DepthToSpace=reshape+transpose
        SpaceToDepth=reshape+transpose Trilu=where LpNormalization=reduce+div+where
        OneHot=equal+where ReverseSequence=gather_elements Compress=gather
        """,
        "composed",
    ),
    **_same(
        """
        Einsum=reduce+transpose+reshape+matmul RNN=linear+add+tanh
        GRU=linear+add+mul+sub+sigmoid+tanh
        LSTM=linear+add+mul+sigmoid+tanh
        """,
        "composed",
    ),
    **_same("Constant= Shape= Size= If= Loop= Scan=", "folded"),
    **_same(
        """
        CastLike= GroupNormalization= RMSNormalization= MeanVarianceNormalization=
        Attention= RotaryEmbedding= AffineGrid= CenterCropPad= NegativeLogLikelihoodLoss=
        SoftmaxCrossEntropyLoss= BlackmanWindow= HammingWindow= HannWindow= Range=
        LinearAttention= CausalConvWithState= FlexAttention=
        """,
        "body",
    ),
    **_same("QLinearConv=conv QLinearMatMul=matmul", "body"),
    "QuantizeLinear": OnnxSupport(
        "op", (), "a scale of the layer before it; else on the host: `top.quantize_linear`"
    ),
    "DequantizeLinear": OnnxSupport(
        "op", (), "a scale of what it reads; else on the host: `top.dequantize_linear`"
    ),
    **_same(
        """
        DynamicQuantizeLinear=dynamic_quantize_linear MatMulInteger=matmul_integer
        ConvInteger=conv_integer
        """
    ),
    **_refused("the size of its result depends on the data", "NonZero Unique NonMaxSuppression"),
    **_refused("loops over sequences are not compiled", "SequenceMap"),
    **_refused(
        "it works on sequences or optional values, which a chip cannot hold",
        """
        SequenceAt SequenceConstruct SequenceEmpty SequenceErase SequenceInsert
        SequenceLength SplitToSequence ConcatFromSequence Optional OptionalGetElement
        OptionalHasElement
        """,
    ),
    **_refused(
        "it works on text",
        """
        StringConcat StringNormalizer StringSplit RegexFullMatch TfIdfVectorizer
        ImageDecoder
        """,
    ),
    **_refused(
        "its result is random",
        """
        RandomNormal RandomNormalLike RandomUniform RandomUniformLike Multinomial Bernoulli
        """,
    ),
    **_refused(
        "it is not supported yet",
        """
        GridSample RoiAlign MaxRoiPool DeformConv MaxUnpool Col2Im Det DFT STFT
        MelWeightMatrix BitCast CumProd TensorScatter
        """,
    ),
}
"""Operators of the default domain (and FlexAttention of `ai.onnx.preview`)."""

SHAPE_OPERANDS: dict[str, tuple[int, ...]] = {
    "Reshape": (1,),
    "Expand": (1,),
    "Tile": (1,),
    "Slice": (1, 2, 3, 4),
    "Pad": (1, 3),
    "Resize": (1, 2, 3),
    "Upsample": (1,),
    "Squeeze": (1,),
    "Unsqueeze": (1,),
    "Split": (1,),
    "TopK": (1,),
    "OneHot": (1,),
    "ConstantOfShape": (0,),
    "Range": (0, 1, 2),
    "Compress": (1,),
    "CenterCropPad": (1,),
    "AffineGrid": (1,),
    "BlackmanWindow": (0,),
    "HammingWindow": (0,),
    "HannWindow": (0,),
    **{
        f"Reduce{kind}": (1,)
        for kind in (
            "Mean",
            "Sum",
            "Max",
            "Min",
            "Prod",
            "L1",
            "L2",
            "LogSum",
            "LogSumExp",
            "SumSquare",
        )
    },
}
"""Operands whose values decide the shape of the result."""

BODY_DOMAINS = ("", "ai.onnx.preview")


def importable(domain: str, op_type: str) -> str:
    """Return "direct" (there is a rule), "function" (ONNX's body is used), or why it is refused."""
    row = ONNX_OPS.get(op_type) if domain in BODY_DOMAINS else None
    if row is None:
        place = "operators of other domains" if domain else "this operator"
        return f"{place} cannot be compiled"
    if row.how == "body":
        return "function"
    if domain or row.how in ("refused", "folded"):
        return row.reason or "its operands are not known at compile time"
    return "direct"


def reference_parts(
    table: Callable[[Sequence[str], Iterable[Sequence[object]]], str],
) -> list[str]:
    """Return the parts of `docs/reference/ops.md`; `table` formats a table from head and rows."""
    onnx_rows = [
        (name, row.status, ", ".join(f"`top.{op}`" for op in row.top), row.reason)
        for name, row in sorted(ONNX_OPS.items())
    ]
    top_rows = [(f"`top.{name}`", row.place, row.reason) for name, row in sorted(TOP_OPS.items())]
    return [
        "direct: one operation of `top`. composed: several, or the body ONNX defines for it. "
        "host: at least one part runs in float on the host. folded: computed at compile time. "
        "refused: the compiler says so, and names every such node of the model.",
        "## ONNX operators",
        table(("operator", "status", "becomes", "remark"), onnx_rows),
        "## Where operations of `top` run",
        table(("operation", "runs on", "remark"), top_rows),
    ]
