"""Rules of pointwise operators, and of operators that reduce, scan or sort dimensions."""

from __future__ import annotations

import torch

from autopar.analysis.rules.calls import Maker, OperatorCall, Stated, letters, line, whole

# An entry of the result depends on the operands' entries at the same place only.
_POINTWISE = (
    *(
        "abs",
        "absolute",
        "acos",
        "acosh",
        "angle",
        "asin",
        "asinh",
        "atan",
        "atan2",
        "atanh",
        "bernoulli",
        "bitwise_and",
    ),
    *("bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor", "ceil", "celu", "clamp"),
    *("clamp_max", "clamp_min", "clip", "copysign", "cos", "cosh", "deg2rad", "digamma", "elu", "eq", "erf", "erfc"),
    *("erfinv", "exp", "exp2", "expm1", "exponential", "fill", "floor", "floor_divide", "fmax", "fmin", "fmod", "frac"),
    *(
        "ge",
        "gelu",
        "gt",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "hypot",
        "isclose",
        "isfinite",
        "isinf",
    ),
    *(
        "isnan",
        "isneginf",
        "isposinf",
        "ldexp",
        "le",
        "leaky_relu",
        "lgamma",
        "log",
        "log10",
        "log1p",
        "log2",
        "log_normal",
    ),
    *(
        "log_sigmoid",
        "logaddexp",
        "logaddexp2",
        "logical_and",
        "logical_not",
        "logical_or",
        "logical_xor",
        "logit",
        "lt",
    ),
    *(
        "maximum",
        "minimum",
        "mish",
        "nan_to_num",
        "ne",
        "nextafter",
        "normal",
        "not_equal",
        "polar",
        "pow",
        "reciprocal",
    ),
    *(
        "relu",
        "relu6",
        "remainder",
        "round",
        "rrelu",
        "rsqrt",
        "selu",
        "sgn",
        "sigmoid",
        "sign",
        "signbit",
        "silu",
        "sin",
    ),
    *("sinc", "sinh", "softplus", "softshrink", "special_expit", "special_log1p", "sqrt", "square", "tan", "tanh"),
    *("threshold", "trunc", "uniform", "xlogy", "zero", "__and__", "__or__", "__xor__", "__lshift__", "__rshift__"),
    *("greater", "greater_equal", "less", "less_equal"),
)
_LINEAR_IN = {  # sets of operands in which a pointwise operator is jointly linear
    "*": ("add", "sub", "subtract", "rsub", "complex"),
    "0 1": ("mul", "multiply"),
    "0": (
        *(
            "neg",
            "negative",
            "positive",
            "clone",
            "contiguous",
            "detach",
            "alias",
            "lift_fresh_copy",
            "lift_fresh",
            "lift",
        ),
        *("real", "imag", "conj", "_conj", "conj_physical", "resolve_conj", "resolve_neg"),
    ),
    "12": ("where",),
    "1": ("copy",),
    "02": ("masked_fill",),
    "01 02": ("addcmul",),
    "01": ("addcdiv", "lerp"),
}
_CASTS = ("to", "_to_copy", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision")
_REDUCTIONS = (
    *("amax", "amin", "argmax", "argmin", "any", "all", "prod", "var", "std", "var_mean", "std_mean", "logsumexp"),
    *("median", "nanmedian", "mode", "aminmax", "norm", "linalg_vector_norm", "kthvalue"),
)
_DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")


def pointwise(linear: str = "") -> Maker:
    """Operands align at their last dimension and broadcast."""

    def rule(call: OperatorCall) -> Stated:
        return line(*[["*a"]] * len(call.operands), to=[["*a"]] * len(call.output_shapes), linear=linear)

    return rule


def quotients(call: OperatorCall) -> Stated:
    """Division is linear in the dividend unless it rounds."""
    return "*a, *a -> *a" + (" ; 0" if call.get("rounding_mode") is None else "")


def cast(call: OperatorCall) -> Stated:
    """A conversion of types; linear unless it rounds to integers or booleans."""
    result = call.results[0]
    rounded = result.dtype is torch.bool or (call["self"].is_floating_point() and not result.is_floating_point())
    others = [["[*_]"]] * (len(call.operands) - 1)  # the other tensor of type_as, which gives the type
    return line(["*a"], *others, to=[["*a"]], linear="" if rounded else "0")


def reduction(mark: str = "[]", linear: str = "") -> Maker:
    """sum (mark "": summed), mean ("~": averaged) and reductions of whole dimensions ("[]")."""

    def rule(call: OperatorCall) -> Stated:
        rank = call.rank("self")
        dims = call.dims() if call.has("dim") else list(range(rank))
        names = letters(rank)
        before = whole(names, dims) if mark == "[]" else [mark * (d in dims) + n for d, n in enumerate(names)]
        keep = bool(call.get("keepdim", False))
        after = ["1" if d in dims else n for d, n in enumerate(names) if keep or d not in dims]
        return line(before, to=[after] * len(call.output_shapes), linear=linear)

    return rule


def scan(linear: str = "", mark: str = "[{}]") -> Maker:
    """cumsum, softmax, sort: one dimension is whole and stays, possibly with another size."""

    def rule(call: OperatorCall) -> Stated:
        rank = call.rank("self")
        dim = call.dim() if call.has("dim") else rank - 1
        names = letters(rank)
        afters = []
        for shape in call.output_shapes:
            resized = rank and shape[dim] != call.shape("self")[dim]
            after = [f"[k{dim}]" if resized and d == dim else n for d, n in enumerate(names)]
            afters.append(after)
        before = [mark.format(n) if d == dim else n for d, n in enumerate(names)]
        return line(before, to=afters, linear=linear)

    return rule


def differences(call: OperatorCall) -> Stated:
    """diff, including the tensors to prepend and append."""
    rank, dim = call.rank("self"), call.dim()
    operands = [[f"[k{i}]" if d == dim else n for d, n in enumerate(letters(rank))] for i in range(len(call.operands))]
    result = [f"[k{dim}_]" if d == dim else n for d, n in enumerate(letters(rank))]
    return line(*operands, to=[result], linear="*")


def similarity(call: OperatorCall) -> Stated:
    """cosine_similarity: operands broadcast, and one dimension is reduced."""
    rank = len(call.output_shapes[0]) + 1
    dim = int(call["dim"]) % rank
    names = letters(rank)
    operands = [whole(names, [dim])[rank - len(shape) :] for _, shape in call.operands if shape is not None]
    return line(*operands, to=[[n for d, n in enumerate(names) if d != dim]])


def elements(linear: str = "") -> Maker:
    """max, min: pointwise on two tensors, or a reduction of one."""
    reduced = reduction(linear=linear)

    def rule(call: OperatorCall) -> Stated:
        return pointwise()(call) if call.has("other") else reduced(call)

    return rule


RULES: dict[str, str | Maker] = {
    **dict.fromkeys(_POINTWISE, pointwise()),
    **{name: pointwise(linear) for linear, names in _LINEAR_IN.items() for name in names},
    **dict.fromkeys(("div", "divide", "true_divide"), quotients),
    **dict.fromkeys(_CASTS, cast),
    **dict.fromkeys(_DROPOUTS, pointwise()),
    **dict.fromkeys(("sum", "nansum"), reduction("", "0")),
    "count_nonzero": reduction(""),
    "mean": reduction("~", "0"),
    "nanmean": reduction(),
    **dict.fromkeys(_REDUCTIONS, reduction()),
    **dict.fromkeys(("max", "min"), elements()),
    **dict.fromkeys(("cumsum",), scan("0")),
    **dict.fromkeys(("cumprod", "cummax", "cummin", "logcumsumexp", "sort", "argsort", "topk", "glu"), scan()),
    **dict.fromkeys(("softmax", "log_softmax", "_softmax", "_log_softmax"), scan(mark="{{{}}}")),
    "diff": differences,
    "cosine_similarity": similarity,
}
