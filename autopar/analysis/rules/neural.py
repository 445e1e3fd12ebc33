"""Rules of products, and of layers and losses of neural networks."""

from __future__ import annotations

from autopar.analysis.rules.calls import Maker, OperatorCall, Stated, letters, line, quotient, whole

_NONE, _MEAN = 0, 1  # the reductions of losses; 2: sum


def matmul(call: OperatorCall) -> Stated:
    """A vector on the left has no rows, and one on the right no columns."""
    left, right = call.rank("self"), call.rank("other")
    first = ["k"] if left == 1 else ["*b", "m", "k"]
    second = ["k"] if right == 1 else ["*b", "k", "n"]
    batch = ["*b"] if max(left, right) > 2 else []
    return line(first, second, to=[[*batch, *(["m"] * (left > 1)), *(["n"] * (right > 1))]], linear="0 1")


def added(product: str) -> Maker:
    """A product and a term that broadcasts to its dimensions."""
    names = product.split("->")[1].split()

    def rule(call: OperatorCall) -> Stated:
        return f"{' '.join(names[len(names) - call.rank('self') :])}, {product} ; 01 02"

    return rule


def einsum(call: OperatorCall) -> Stated:
    """The equation itself, with `...` as `*`. Equations without an arrow have no rule."""
    equation = str(call["equation"]).replace(" ", "")
    if "->" not in equation:
        return None
    left, right = equation.split("->")

    def dims(text: str) -> list[str]:
        return list(text.replace("...", "*")) if "*" not in text else []

    operands = [["*e" if c == "*" else c for c in dims(part)] for part in left.split(",")]
    result = ["*e" if c == "*" else c for c in dims(right)]
    return line(*operands, to=[result], linear=" ".join(map(str, range(len(operands)))))


def convolution(call: OperatorCall) -> Stated:
    """Spatial dimensions are whole; with groups, channels are whole, too."""
    spatial = call.rank("weight") - 2
    batch = ["b"] if call.rank("input") == spatial + 2 else []
    transposed = call.get("transposed", "transpose" in call.name)
    i, o = ("i", "o") if call["groups"] == 1 else ("[i]", "[o]")
    kernel = [f"[{n}]" for n in letters(spatial, "k")]
    weight = [i, o] if transposed else [o, i]
    if call["groups"] != 1:  # of one side the weight has a group's channels only
        weight = ["[c]", "[d]"]
    before, after = ([f"[{n}]" for n in letters(spatial, prefix)] for prefix in "st")
    return line([*batch, i, *before], [*weight, *kernel], [o], to=[[*batch, o, *after]], linear="02 12")


def pooling(spatial: int, linear: str = "") -> Maker:
    """Pooling or resizing of the last dimensions, which are whole; all dimensions before them are kept."""

    def rule(call: OperatorCall) -> Stated:
        before, after = ([f"[{n}]" for n in letters(spatial, prefix)] for prefix in "st")
        return line(["*b", *before], to=[["*b", *after]] * len(call.output_shapes), linear=linear)

    return rule


def normalised(call: OperatorCall) -> Stated:
    """layer_norm, rms_norm: the last dimensions are whole."""
    rank, depth = call.rank("input"), len(call["normalized_shape"])
    names = letters(rank)
    inner = whole(names, range(rank))[rank - depth :]
    rest = names[: rank - depth]
    statistics = [[*rest, *["1"] * depth]] * (len(call.output_shapes) - 1)
    return line([*rest, *inner], *[inner] * (len(call.operands) - 1), to=[[*rest, *inner], *statistics])


def batch_norm(call: OperatorCall) -> Stated:
    """With running statistics the operator is pointwise; in training all entries of a channel are whole.

    Batch norm in training also needs the whole batch, unless devices compute the statistics together.
    """
    trains = bool(call["use_input_stats"] if call.name == "instance_norm" else call["training"])
    rest = letters(call.rank("input") - 2, "s")
    alone = call.name == "instance_norm"  # every sample by its own statistics
    first = "{b}" if trains and not alone else "b"
    tail = [f"[{n}]" for n in rest] if trains else rest
    return line([first, "c", *tail], *[["c"]] * 4, to=[[first, "c", *tail]])


def attention(call: OperatorCall) -> Stated:
    """Keys are whole; queries are independent of each other, except under a causal mask.

    With grouped heads, each of the `g` heads of keys and values serves `r` consecutive heads of queries.
    """
    query = "[l]" if call["is_causal"] else "l"
    if not call.get("enable_gqa", False):
        q, k, v = ["*b", query, "[e]"], ["*b", "[s]", "[e]"], ["*b", "[s]", "v"]
        return line(q, k, v, ["*b", query, "[s]"], to=[["*b", query, "v"]], linear="2")
    heads, groups = call.shape("query")[-3], call.shape("key")[-3]
    if groups != call.shape("value")[-3] or (r := quotient(heads, groups)) is None:
        return None
    mask = call.operands[3][1]
    shared = ["*b", "(g r)"] if mask is not None and len(mask) > 2 else []
    q, k, v = ["*b", "(g r)", query, "[e]"], ["*b", "g", "[s]", "[e]"], ["*b", "g", "[s]", "v"]
    return line(q, k, v, [*shared, query, "[s]"], to=[["*b", "(g r)", query, "v"]], linear="2"), {"g": groups, "r": r}


def recurrent(call: OperatorCall) -> Stated:
    """lstm, gru, rnn: samples are independent; steps and features are whole."""
    if call.has("batch_sizes") or call.rank("input") != 3:
        return None  # a packed sequence, or a single sequence without a batch dimension

    def steps(feature: str) -> list[str]:
        return ["b", "[t]", feature] if call["batch_first"] else ["[t]", "b", feature]

    states = 2 if call.name == "lstm" else 1
    initial = [["[l]", "b", "[h0]"], ["[l]", "b", "[h1]"]][:states]
    parameters = [
        [f"[p{i}{d}]" for d in range(len(shape))]
        for i, (_, shape) in enumerate(call.operands[1 + states :])
        if shape is not None
    ]
    return line(steps("[i]"), *initial, *parameters, to=[steps("[o]"), *initial])


def cell(call: OperatorCall) -> Stated:
    """One step of a recurrent network."""
    states = 2 if call.name == "lstm_cell" else 1
    initial = [["b", "[h0]"], ["b", "[h1]"]][:states]
    parameters = [[f"[p{i}{d}]" for d in range(len(s or ()))] for i, (_, s) in enumerate(call.operands[1 + states :])]
    return line(["b", "[i]"], *initial, *parameters, to=initial)


def _reduced(names: list[str], reduction: int) -> tuple[list[str], list[str]]:
    """The indices of the operands and of the loss."""
    return [f"~{n}" if reduction == _MEAN else n for n in names], names if reduction == _NONE else []


def loss(call: OperatorCall) -> Stated:
    """mse_loss and other pointwise losses, followed by the mean, the sum or no reduction."""
    names, after = _reduced(["*a"], call["reduction"])
    return line(*[names] * len(call.operands), to=[after])


def cross_entropy(call: OperatorCall) -> Stated:
    """Classes are the second dimension (the first one of a single sample).

    The rule takes the mean over all targets, which is exact if none is ignored; with weights of classes the result is
    no mean. Devices that communicate inside the operator compute both exactly, and also the loss of split classes.
    """
    rank = call.rank("self")
    places, reduction = letters(rank - 1, "n"), call["reduction"]
    soft, weighed = call["target"].is_floating_point(), call["weight"] is not None
    names, after = _reduced(places, reduction)
    if reduction == _MEAN and (weighed or not soft):
        names = [("[{}]" if soft else "{{{}}}" if weighed else "{{~{}}}").format(n) for n in places]
    scores = [*names[:1], "[c]" if soft or weighed else "{c}", *names[1:]]
    results = [after, *[[]] * (len(call.output_shapes) - 1)]
    return line(scores, scores if soft else names, ["[c]"], to=results)


def grouped_product(call: OperatorCall) -> Stated:
    """Rows are sorted by expert `e` and multiplied by its matrix; the third operand has the last row of each expert."""
    (_, rows), (_, matrices), (_, ends), *others = call.operands
    if rows is None or matrices is None or ends is None or (len(rows), len(matrices)) != (2, 3):
        return None
    if any(shape is not None for _, shape in others):
        return None
    return line(["[n]", "k"], ["{e}", "k", "m"], ["[f]"], *[["[_]"]] * len(others), to=[["[n]", "m"]], linear="0 1")


_PRODUCTS: dict[str, str | Maker] = {
    "linear": "*b k, n k, n -> *b n ; 02 12",
    "matmul": matmul,
    "mm": "m k, k n -> m n ; 0 1",
    "bmm": "b m k, b k n -> b m n ; 0 1",
    "mv": "m k, k -> m ; 0 1",
    "dot": "k, k -> ; 0 1",
    "outer": "m, n -> m n ; 0 1",
    "addmm": added("m k, k n -> m n"),
    "addmv": added("m k, k -> m"),
    "baddbmm": added("b m k, b k n -> b m n"),
    "einsum": einsum,
}
_MEANS = ("avg_pool", "adaptive_avg_pool")
_LARGEST = ("max_pool", "adaptive_max_pool")
_RESIZINGS = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
_LOSSES = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
_SIZES = {"1d": 1, "2d": 2, "3d": 3}

RULES: dict[str, str | Maker] = {
    **_PRODUCTS,
    "scaled_dot_product_attention": attention,
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback"), grouped_product),
    **{f"conv{size}": convolution for size in _SIZES},
    **{f"conv_transpose{size}": convolution for size in _SIZES},
    "convolution": convolution,
    **{name + size: pooling(n, "0") for name in _MEANS for size, n in _SIZES.items()},
    **{name + size: pooling(n) for name in _LARGEST for size, n in _SIZES.items()},
    **{f"max_pool{n}d_with_indices": pooling(n) for n in (2, 3)},
    **{f"upsample_{name}": pooling(int(name[-2]), "0") for name in _RESIZINGS},
    **dict.fromkeys(("pixel_shuffle", "pixel_unshuffle"), pooling(3, "0")),
    "im2col": "*b [c] [h] [w] -> *b [k] [l] ; 0",
    "grid_sampler": "b c [h] [w], b [m] [n] [z] -> b c [m] [n] ; 0",
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), normalised),
    "group_norm": "b [c] [*s], [c], [c] -> b [c] [*s]",
    **dict.fromkeys(("batch_norm", "instance_norm"), batch_norm),
    "prelu": "b c *s, c -> b c *s",
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), recurrent),
    **dict.fromkeys(("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"), cell),
    **dict.fromkeys(("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd"), cross_entropy),
    **dict.fromkeys(_LOSSES, loss),
}
