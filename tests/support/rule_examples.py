"""Calls of every ATen operator that has a rule, and is not called as its schema alone tells."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers.integrations.moe  # noqa: F401  (registers an operator)
from rule_calls import (
    F64,
    Call,
    Sizes,
    aten,
    attention,
    call,
    casts,
    cells,
    convolutions,
    entropies,
    grouped,
    like,
    losses,
    made,
    norms,
    places,
    pools,
    recurrent,
    reductions,
    resized,
    scans,
    x,
)

EXAMPLES: dict[str, list[Callable[[Sizes], Call]]] = {
    **{name: casts(name) for name in ("to", "_to_copy", "type_as")},
    "_autocast_to_reduced_precision": [
        lambda s: call(aten._autocast_to_reduced_precision.default, x(s.a), False, False, torch.half, torch.half)
    ],
    "_autocast_to_full_precision": [lambda s: call(aten._autocast_to_full_precision.default, x(s.a), False, False)],
    **{
        n: reductions(n) for n in ("sum", "nansum", "mean", "nanmean", "amax", "amin", "argmax", "argmin", "any", "all")
    },
    "prod": [
        lambda s: call(aten.prod.dim_int, x(s.a, s.b), 1, True),
        lambda s: call(aten.prod.default, x(s.a, s.b)),
    ],
    **{n: reductions(n) for n in ("var", "std", "median", "nanmedian", "mode", "logsumexp")},
    **{n: [lambda s, n=n: call(getattr(aten, n).dim, x(s.a, s.b, s.c), [0, 2])] for n in ("var_mean", "std_mean")},
    "count_nonzero": [lambda s: call(aten.count_nonzero.dim_IntList, places(2, s.a, s.b), [1])],
    "aminmax": [lambda s: call(aten.aminmax.default, x(s.a, s.b), dim=1)],
    "kthvalue": [lambda s: call(aten.kthvalue.default, x(s.a, s.b), 2, 1)],
    "norm": [lambda s: call(aten.norm.ScalarOpt_dim, x(s.a, s.b), 2, [1]), lambda s: call(aten.norm.Scalar, x(s.a))],
    "linalg_vector_norm": reductions("linalg_vector_norm", 2.0),
    **{
        n: [
            lambda s, n=n: call(getattr(aten, n).dim, x(s.a, s.b), 1, True),
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b)),
            lambda s, n=n: call(getattr(aten, n).other, x(s.a, s.b), x(s.b)),
        ]
        for n in ("max", "min")
    },
    **{n: scans(n) for n in ("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "log_softmax")},
    **{n: [lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b), 1, False)] for n in ("_softmax", "_log_softmax")},
    **{n: scans(n) for n in ("sort", "argsort")},
    "topk": scans("topk", 2),
    "glu": [lambda s: call(aten.glu.default, x(s.a, 4, s.b), 1)],
    "diff": [
        lambda s: call(aten.diff.default, x(s.a, s.b)),
        lambda s: call(aten.diff.default, x(s.a, s.b), 1, 0, x(2, s.b)),
    ],
    "cosine_similarity": [
        lambda s: call(aten.cosine_similarity.default, x(s.a, s.b), x(s.a, s.b)),
        lambda s: call(aten.cosine_similarity.default, x(s.a, 1, s.c), x(s.b, s.c), -1),
    ],
    "where": [
        lambda s: call(aten.where.self, x(s.a, 1) > 0.5, x(s.a, s.b), x(s.b)),
        lambda s: call(aten.where.ScalarOther, x(s.a, 1) > 0.5, x(s.a, s.b), -3.0),
    ],
    "masked_fill": [
        lambda s: call(aten.masked_fill.Scalar, x(s.a, s.b), x(s.b) > 0.5, -3.0),
        lambda s: call(aten.masked_fill.Tensor, x(s.a, s.b), x(s.a, 1) > 0.5, x()),
    ],
    "copy": [lambda s: call(aten.copy.default, x(s.a, s.b), x(s.b))],
    "fill": [lambda s: call(aten.fill.Scalar, x(s.a, s.b), 2.0)],
    "lerp": [lambda s: call(aten.lerp.Tensor, x(s.a, s.b), x(s.b), x(s.a, 1))],
    "threshold": [lambda s: call(aten.threshold.default, x(s.a, s.b), 0.5, 0.1)],
    "polar": [lambda s: call(aten.polar.default, x(s.a, s.b), x(s.b))],
    "complex": [lambda s: call(aten.complex.default, x(s.a, s.b), x(s.b))],
    "imag": [lambda s: call(aten.imag.default, torch.complex(x(s.a, s.b), x(s.a, s.b)))],
    "_conj": [lambda s: call(aten._conj.default, torch.complex(x(s.a, s.b), x(s.a, s.b)))],
    **{
        n: [
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b), 0.4, 0.6),
            lambda s, n=n: call(getattr(aten, n).Tensor, x(s.a, s.b), x(s.b), None),
        ]
        for n in ("clamp", "clip")
    },
    "contiguous": [lambda s: call(aten.contiguous.default, x(s.a, s.b).t())],
    "lift_fresh": [lambda s: call(aten.lift_fresh.default, x(s.a, s.b))],
    "div": [
        lambda s: call(aten.div.Tensor, x(s.a, s.b), x(s.b)),
        lambda s: call(aten.div.Tensor_mode, x(s.a, s.b), x(s.b), rounding_mode="floor"),
    ],
    "add": [lambda s: call(aten.add.Tensor, x(s.a, s.b), x(s.b), alpha=3), lambda s: call(aten.add.Tensor, x(s.a), 2)],
    # indexing
    "gather": [
        lambda s: call(aten.gather.default, x(s.a, s.b), 1, places(s.b, s.a, s.c)),
        lambda s: call(aten.gather.default, x(s.a + 1, s.b), 1, places(s.b, s.a, s.c)),
    ],
    "scatter": [
        lambda s: call(aten.scatter.value, x(s.a, s.b), 1, places(s.b, s.a, s.c), 7.0),
        lambda s: call(aten.scatter.src, x(s.a, s.b), 1, torch.arange(s.b).expand(s.a, -1), x(s.a, s.b)),
    ],
    "scatter_add": [lambda s: call(aten.scatter_add.default, x(s.a, s.b), 1, places(s.b, s.a, s.c), x(s.a, s.c))],
    "scatter_reduce": [
        lambda s: call(aten.scatter_reduce.two, x(s.a, s.b), 0, places(s.a, s.c, s.b), x(s.c, s.b), "amax")
    ],
    "index_select": [lambda s: call(aten.index_select.default, x(s.a, s.b, s.c), 1, places(s.b, s.d))],
    "index_add": [lambda s: call(aten.index_add.default, x(s.a, s.b, s.c), 1, places(s.b, s.d), x(s.a, s.d, s.c))],
    "index_copy": [lambda s: call(aten.index_copy.default, x(s.a, s.b, s.c), 1, torch.arange(s.b), x(s.a, s.b, s.c))],
    "index_fill": [lambda s: call(aten.index_fill.int_Scalar, x(s.a, s.b), 1, places(s.b, 2), 7.0)],
    **{
        n: [
            lambda s, n=n: call(getattr(aten, n).Tensor, x(s.a, s.b, s.c), [None, places(s.b, s.d)]),
            lambda s, n=n: call(getattr(aten, n).Tensor, x(s.a, s.b, s.c), [places(s.a, s.d, 1), places(s.b, s.c)]),
            lambda s, n=n: call(getattr(aten, n).Tensor, x(s.a, s.b, s.c), [places(s.a, s.d), None, places(s.c, s.d)]),
        ]
        for n in ("index", "_unsafe_index")
    },
    **{
        n: [
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b), [None, torch.arange(s.b)], x(s.a, s.b)),
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b), [places(s.a, s.d)], x(s.b)),
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b), [x(s.a) > 0.5], x()),
        ]
        for n in ("index_put", "_unsafe_index_put")
    },
    "embedding": [lambda s: call(aten.embedding.default, x(s.a, s.b), places(s.a, s.c, s.d))],
    "one_hot": [lambda s: call(aten.one_hot.default, places(3, s.a, s.b), 3)],
    "bucketize": [lambda s: call(aten.bucketize.Tensor, x(s.a, s.b), torch.tensor([0.2, 0.5, 0.7], **F64))],
    "isin": [lambda s: call(aten.isin.Tensor_Tensor, places(9, s.a, s.b), places(9, s.c))],
    "histc": [lambda s: call(aten.histc.default, x(s.a, s.b), 4, 0, 1)],
    "bincount": [lambda s: call(aten.bincount.default, places(4, s.a), x(s.a), 4)],
    # products
    "linear": [
        lambda s: call(aten.linear.default, x(s.a, s.b, s.c), x(s.d, s.c), x(s.d)),
        lambda s: call(aten.linear.default, x(s.c), x(s.d, s.c)),
    ],
    "matmul": [
        lambda s: call(aten.matmul.default, x(s.a, s.b, s.c), x(s.c, s.d)),
        lambda s: call(aten.matmul.default, x(s.a, 1, s.b, s.c), x(s.d, s.c, 2)),
        lambda s: call(aten.matmul.default, x(s.c), x(s.a, s.c, s.d)),
        lambda s: call(aten.matmul.default, x(s.a, s.b, s.c), x(s.c)),
        lambda s: call(aten.matmul.default, x(s.c), x(s.c)),
    ],
    "mm": [lambda s: call(aten.mm.default, x(s.a, s.b), x(s.b, s.c))],
    "bmm": [lambda s: call(aten.bmm.default, x(s.a, s.b, s.c), x(s.a, s.c, s.d))],
    "mv": [lambda s: call(aten.mv.default, x(s.a, s.b), x(s.b))],
    "dot": [lambda s: call(aten.dot.default, x(s.a), x(s.a))],
    "outer": [lambda s: call(aten.outer.default, x(s.a), x(s.b))],
    "addmm": [
        lambda s: call(aten.addmm.default, x(s.c), x(s.a, s.b), x(s.b, s.c), beta=2, alpha=3),
        lambda s: call(aten.addmm.default, x(s.a, 1), x(s.a, s.b), x(s.b, s.c)),
    ],
    "addmv": [lambda s: call(aten.addmv.default, x(s.a), x(s.a, s.b), x(s.b))],
    "baddbmm": [lambda s: call(aten.baddbmm.default, x(s.a, 1, s.d), x(s.a, s.b, s.c), x(s.a, s.c, s.d))],
    "einsum": [
        lambda s: call(aten.einsum.default, "bij, bjk -> bik", [x(s.a, s.b, s.c), x(s.a, s.c, s.d)]),
        lambda s: call(aten.einsum.default, "...i,oi->...o", [x(s.a, s.b, s.c), x(s.d, s.c)]),
        lambda s: call(aten.einsum.default, "bi,bi,b->", [x(s.a, s.b), x(s.a, s.b), x(s.a)]),
        lambda s: call(aten.einsum.default, "ii->i", [x(s.a, s.a)]),
    ],
    "grouped_mm_fallback": [
        lambda s: call(
            torch.ops.transformers.grouped_mm_fallback.default,
            *(x(s.a + s.b, s.c), x(3, s.c, s.d)),
            torch.tensor([s.a, s.a, s.a + s.b], dtype=torch.int32),
        )
    ],
    "_grouped_mm": [
        lambda s: call(
            aten._grouped_mm.default,
            *(x(6, 8).float(), x(2, 8, 4).float(), torch.tensor([2, 6], dtype=torch.int32)),
        )
    ],
    "scaled_dot_product_attention": [
        attention(),
        attention(mask=lambda s: (s.b, s.c)),
        attention(mask=lambda s: (s.a, 1, 1, s.c)),
        attention(is_causal=True),
        grouped(),
        grouped(lambda s: (s.b, s.c)),
        grouped(lambda s: (s.a, 4, s.b, s.c)),
        grouped(lambda s: (s.a, 1, s.b, s.c)),
    ],
    "convolution": [
        lambda s: call(aten.convolution.default, x(s.a, s.b, 4), x(s.c, s.b, 2), x(s.c), [1], [0], [1], False, [0], 1),
        lambda s: call(aten.convolution.default, x(s.a, s.b, 4), x(s.b, s.c, 2), None, [1], [0], [1], True, [0], 1),
    ],
    **convolutions(1),
    **convolutions(2),
    **convolutions(3),
    **pools(1),
    **pools(2),
    **pools(3),
    **{
        f"upsample_{n}": resized(n)
        for n in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "bicubic2d", "trilinear3d")
    },
    "pixel_shuffle": [lambda s: call(aten.pixel_shuffle.default, x(s.a, 4, s.b, s.c), 2)],
    "pixel_unshuffle": [lambda s: call(aten.pixel_unshuffle.default, x(s.a, s.b, 4, 6), 2)],
    "im2col": [lambda s: call(aten.im2col.default, x(s.a, s.b, 4, 5), [2, 2], [1, 1], [0, 0], [1, 1])],
    "grid_sampler": [lambda s: call(aten.grid_sampler.default, x(s.a, s.b, 4, 5), x(s.a, s.c, s.d, 2), 0, 0, False)],
    # norms
    "layer_norm": [norms, lambda s: call(aten.layer_norm.default, x(s.a, s.b), [s.b])],
    "rms_norm": [lambda s: call(aten.rms_norm.default, x(s.a, s.b, s.c), [s.c], x(s.c))],
    "native_layer_norm": [
        lambda s: call(aten.native_layer_norm.default, x(s.a, s.b, s.c), [s.c], x(s.c), x(s.c), 1e-5)
    ],
    "group_norm": [lambda s: call(aten.group_norm.default, x(s.a, 4, s.b), 2, x(4), x(4))],
    "batch_norm": [
        lambda s: call(aten.batch_norm.default, x(s.a, s.b, s.c), *[x(s.b)] * 4, False, 0.1, 1e-5, False),
        lambda s: call(aten.batch_norm.default, x(s.a, s.b, s.c), None, None, None, None, True, 0.1, 1e-5, False),
    ],
    "instance_norm": [
        lambda s: call(
            aten.instance_norm.default, x(s.a, s.b, s.c, s.d), x(s.b), x(s.b), None, None, True, 0.1, 1e-5, False
        )
    ],
    "prelu": [
        lambda s: call(aten.prelu.default, x(s.a, s.b, s.c) - 0.5, x(s.b)),
        lambda s: call(aten.prelu.default, x(s.a, s.b) - 0.5, x(1)),
    ],
    "lstm": recurrent("lstm", 4),
    "gru": recurrent("gru", 3),
    "rnn_tanh": recurrent("rnn_tanh", 1),
    "rnn_relu": recurrent("rnn_relu", 1),
    "lstm_cell": cells("lstm_cell", 4),
    "gru_cell": cells("gru_cell", 3),
    "rnn_tanh_cell": cells("rnn_tanh_cell", 1),
    "rnn_relu_cell": cells("rnn_relu_cell", 1),
    **{
        n: losses(n)
        for n in (
            *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss", "poisson_nll_loss", "kl_div"),
            *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
        )
    },
    "cross_entropy_loss": entropies(aten.cross_entropy_loss.default, spatial=(False, True), soft=True),
    "nll_loss": entropies(aten.nll_loss.default, spatial=(False,), soft=False),
    "nll_loss2d": entropies(aten.nll_loss2d.default, spatial=(True,), soft=False),
    "nll_loss_nd": entropies(aten.nll_loss_nd.default, spatial=(False, True), soft=False),
    # views
    **{
        n: [
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b, s.c), [s.a * s.b, s.c]),
            lambda s, n=n: call(getattr(aten, n).default, x(s.a, 12, s.c), [s.a, 3, 4 * s.c]),
            lambda s, n=n: call(getattr(aten, n).default, x(4, 6), [6, 4]),
        ]
        for n in ("view", "reshape", "_unsafe_view")
    },
    "_reshape_alias": [lambda s: call(aten._reshape_alias.default, x(s.a, s.b), [s.a * s.b], [1])],
    "flatten": [lambda s: call(aten.flatten.using_ints, x(s.a, s.b, s.c), 1, 2)],
    "unflatten": [lambda s: call(aten.unflatten.int, x(s.a, s.b * s.c), 1, [s.b, s.c])],
    "squeeze": [
        lambda s: call(aten.squeeze.dim, x(s.a, 1, s.b), 1),
        lambda s: call(aten.squeeze.dims, x(1, s.a, 1), [0, 2]),
        lambda s: call(aten.squeeze.default, x(s.a, 1, s.b)),
    ],
    "unsqueeze": [lambda s: call(aten.unsqueeze.default, x(s.a, s.b), 1)],
    "view_as": [lambda s: call(aten.view_as.default, x(s.a, s.b), x(s.a * s.b))],
    "reshape_as": [lambda s: call(aten.reshape_as.default, x(s.a, s.b), x(s.a * s.b))],
    "ravel": [lambda s: call(aten.ravel.default, x(s.a, s.b))],
    "permute": [lambda s: call(aten.permute.default, x(s.a, s.b, s.c), [2, 0, 1])],
    "transpose": [lambda s: call(aten.transpose.int, x(s.a, s.b, s.c), 0, -1)],
    "swapaxes": [lambda s: call(aten.swapaxes.default, x(s.a, s.b, s.c), 0, 1)],
    "swapdims": [lambda s: call(aten.swapdims.default, x(s.a, s.b, s.c), 0, 1)],
    **{
        n: [lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b))] for n in ("t", "numpy_T", "mT", "mH", "adjoint")
    },
    "movedim": [lambda s: call(aten.movedim.intlist, x(s.a, s.b, s.c, s.d), [0, 1], [2, 0])],
    "moveaxis": [lambda s: call(aten.moveaxis.int, x(s.a, s.b, s.c), 0, -1)],
    "expand": [
        lambda s: call(aten.expand.default, x(s.b, 1), [s.a, s.b, s.c]),
        lambda s: call(aten.expand.default, x(1, s.b), [s.a, -1]),
    ],
    "expand_as": [lambda s: call(aten.expand_as.default, x(1, s.b), x(s.a, s.b))],
    "broadcast_tensors": [lambda s: call(aten.broadcast_tensors.default, [x(s.a, 1), x(s.b), x(1, s.b)])],
    "broadcast_to": [lambda s: call(aten.broadcast_to.default, x(1, s.b), [s.a, s.b])],
    "repeat": [
        lambda s: call(aten.repeat.default, x(s.a, s.b), [2, 3]),
        lambda s: call(aten.repeat.default, x(s.a, 1), [3, 1, 2]),
    ],
    "tile": [lambda s: call(aten.tile.default, x(s.a, s.b), [3])],
    "repeat_interleave": [lambda s: call(aten.repeat_interleave.self_int, x(s.a, s.b), 3, 0)],
    "slice": [
        lambda s: call(aten.slice.Tensor, x(s.a, 5, s.c), 1, 1, 4, 2),
        lambda s: call(aten.slice.Tensor, x(s.a, s.b), 1, 0, 2**62),
    ],
    "narrow": [lambda s: call(aten.narrow.default, x(s.a, 5), 1, 2, 2)],
    "split": [lambda s: call(aten.split.Tensor, x(s.a, 5, s.b), 2, 1), lambda s: call(aten.split.Tensor, x(s.a), 9)],
    "split_with_sizes": [lambda s: call(aten.split_with_sizes.default, x(s.a, 5), [1, 4], 1)],
    "chunk": [lambda s: call(aten.chunk.default, x(s.a, 5), 3, -1)],
    "tensor_split": [lambda s: call(aten.tensor_split.sections, x(s.a, 5), 3, 1)],
    "select": [lambda s: call(aten.select.int, x(s.a, s.b, s.c), 1, -1)],
    "unbind": [lambda s: call(aten.unbind.int, x(s.a, s.b, s.c), 1)],
    **{
        n: [
            lambda s, n=n: call(getattr(aten, n).default, [x(s.a, 2, s.b), x(s.a, 1, s.b)], 1),
            lambda s, n=n: call(getattr(aten, n).default, [x(s.a, s.b), x(0)], -1),
        ]
        for n in ("cat", "concat", "concatenate")
    },
    "stack": [lambda s: call(aten.stack.default, [x(s.a, s.b), x(s.a, s.b), x(s.a, s.b)], 1)],
    "flip": [lambda s: call(aten.flip.default, x(s.a, s.b, s.c), [1])],
    "roll": [
        lambda s: call(aten.roll.default, x(s.a, s.b, s.c), [1], [1]),
        lambda s: call(aten.roll.default, x(s.a, s.b), [1]),
    ],
    **{n: [lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b, s.c), 1)] for n in ("tril", "triu")},
    "pad": [
        lambda s: call(aten.pad.default, x(s.a, s.b), [1, 2]),
        lambda s: call(aten.pad.default, x(s.a, s.b, 4), [1, 2], "reflect"),
        lambda s: call(aten.pad.default, x(s.a, s.b), [1, 2], "constant", 7.0),
    ],
    "constant_pad_nd": [lambda s: call(aten.constant_pad_nd.default, x(s.a, s.b), [0, 1], 2)],
    "unfold": [lambda s: call(aten.unfold.default, x(s.a, 5, s.b), 1, 3, 2)],
    "meshgrid": [lambda s: call(aten.meshgrid.indexing, [x(s.a), x(s.b)], indexing="ij")],
    "arange": [lambda s: call(aten.arange.default, s.a)],
    "eye": [lambda s: call(aten.eye.default, s.a)],
    "linspace": [lambda s: call(aten.linspace.default, 0, 1, s.a)],
    "tril_indices": [lambda s: call(aten.tril_indices.default, s.a, s.b)],
    "triu_indices": [lambda s: call(aten.triu_indices.default, s.a, s.b)],
    "randperm": [lambda s: call(aten.randperm.default, s.a)],
    "scalar_tensor": [lambda s: call(aten.scalar_tensor.default, 3.0)],
    **{n: made(n) for n in ("zeros", "ones", "full", "empty", "rand", "randn", "randint")},
    **{n: made(n) for n in ("new_zeros", "new_ones", "new_full", "new_empty")},
    **{
        n: like(n)
        for n in ("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like", "randint_like")
    },
    # random
    "bernoulli": [lambda s: call(aten.bernoulli.default, x(s.a, s.b))],
    "normal": [lambda s: call(aten.normal.Tensor_Tensor, x(s.a, s.b), x(s.a, s.b))],
    "rrelu": [lambda s: call(aten.rrelu.default, x(s.a, s.b))],
    **{
        n: [lambda s, n=n: call(getattr(aten, n).default, x(s.a, s.b, s.c), 0.0, True)]
        for n in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "native_dropout")
    },
}
# What draws anew in every call, leaves memory as it finds it, or takes few sizes and single precision alone.
RANDOM = {
    *("bernoulli", "normal", "exponential", "uniform", "log_normal", "randperm", "rand", "randn", "randint"),
    *("empty", "new_empty", "empty_like", "rand_like", "randn_like", "randint_like", "_grouped_mm"),
}
