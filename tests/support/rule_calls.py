"""Makers of calls of ATen operators of any sizes, in double precision: families of operators that are called alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten
F64: dict[str, Any] = {"dtype": torch.float64}
Call = tuple[Any, tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    a: int
    b: int
    c: int
    d: int


def x(*shape: int) -> torch.Tensor:
    return torch.rand(shape, **F64) * 0.8 + 0.1


def places(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def call(target: Any, *args: Any, **kwargs: Any) -> Call:
    return target, args, kwargs


def sample_call(name: str) -> Callable[[Sizes], Call]:
    """A call of an entry-by-entry operator, or of one that takes a tensor first: arguments by its schema."""

    def make(s: Sizes) -> Call:
        packet = getattr(aten, name)
        failures: list[str] = []
        for overload in ("Tensor", "default", "Scalar", *packet.overloads()):
            if overload not in packet.overloads() or "out" in overload:
                continue
            target = getattr(packet, overload)
            for whole in (False, True):
                shapes = [(s.a, s.b, s.c), (s.b, 1), (s.a, 1, s.c)]
                args: list[Any] = []
                for argument in target._schema.arguments:
                    kind = str(argument.type)
                    if kind == "Tensor":
                        shape = shapes[len(args) % 3]
                        args.append(places(5, *shape) + 1 if whole else x(*shape))
                    elif argument.default_value is None and not argument.has_default_value():
                        if kind not in ("number", "float", "int"):
                            break
                        args.append(2)
                else:
                    try:
                        target(*args)
                    except (RuntimeError, TypeError, NotImplementedError) as error:
                        failures.append(str(error)[:200])
                        continue
                    return target, tuple(args), {}
        raise AssertionError(f"no call of {name}: {failures}")

    return make


def reductions(name: str, *rest: Any) -> list[Callable[[Sizes], Call]]:
    packet = getattr(aten, name)
    overload = next(o for o in ("dim_IntList", "dim", "int", "default") if o in packet.overloads())
    target = getattr(packet, overload)
    listed = any(a.name == "dim" and "List" in str(a.type) for a in target._schema.arguments)
    made: list[Callable[[Sizes], Call]] = [lambda s: call(target, x(s.a, s.b, s.c), *rest, [1] if listed else 1)]
    if listed:
        made += [
            lambda s: call(target, x(s.a, s.b, s.c), *rest, [0, -1], True),
            lambda s: call(target, x(s.a, s.b), *rest, [0]),
        ]
    if "default" in packet.overloads() and target is not packet.default and not rest:
        made.append(lambda s: call(packet.default, x(s.a, s.b)))
    return made


def convolutions(n: int) -> dict[str, list[Callable[[Sizes], Call]]]:
    plain, transposed = getattr(aten, f"conv{n}d"), getattr(aten, f"conv_transpose{n}d")
    transpose = transposed.default if n == 1 else transposed.input
    space, kernel = (4, 5, 6)[:n], (2,) * n
    return {
        f"conv{n}d": [
            lambda s: call(plain.default, x(s.a, s.b, *space), x(s.c, s.b, *kernel), x(s.c)),
            lambda s: call(plain.default, x(s.b, *space), x(s.c, s.b, *kernel)),
            lambda s: call(plain.default, x(s.a, 4, *space), x(6, 2, *kernel), x(6), [1] * n, [1] * n, [1] * n, 2),
        ],
        f"conv_transpose{n}d": [
            lambda s: call(transpose, x(s.a, s.b, *space), x(s.b, s.c, *kernel), x(s.c)),
            lambda s: call(transpose, x(s.a, 4, *space), x(4, 3, *kernel), x(6), [1] * n, [0] * n, [0] * n, 2),
        ],
    }


def pools(n: int) -> dict[str, list[Callable[[Sizes], Call]]]:
    space, ones = (4, 5, 6)[:n], [2] * n

    def of(name: str, *rest: Any) -> list[Callable[[Sizes], Call]]:
        target = getattr(aten, name).default
        return [lambda s: call(target, x(s.a, s.b, *space), *rest), lambda s: call(target, x(s.b, *space), *rest)]

    found = {f"{kind}_pool{n}d": of(f"{kind}_pool{n}d", ones) for kind in ("avg", "max")}
    found |= {f"adaptive_{kind}_pool{n}d": of(f"adaptive_{kind}_pool{n}d", ones) for kind in ("avg", "max")}
    if n > 1:
        found[f"max_pool{n}d_with_indices"] = of(f"max_pool{n}d_with_indices", ones)
    return found


def resized(name: str) -> list[Callable[[Sizes], Call]]:
    n, target = int(name[-2]), getattr(aten, f"upsample_{name}").default
    corners = [] if name.startswith("nearest") else [False]
    return [lambda s: call(target, x(s.a, s.b, *(3, 4, 2)[:n]), [7, 5, 4][:n], *corners)]


def recurrent(name: str, gates: int) -> list[Callable[[Sizes], Call]]:
    target, packed = getattr(aten, name).input, name == "lstm"

    def make(s: Sizes, first: bool, both: bool) -> Call:
        ways, h = 1 + both, s.d
        state = x(ways, s.a, h)
        parameters = [x(gates * h, s.c), x(gates * h, h), x(gates * h), x(gates * h)] * ways
        steps = (s.a, s.b, s.c) if first else (s.b, s.a, s.c)
        hx = [state, x(ways, s.a, h)] if packed else state
        return call(target, x(*steps), hx, parameters, True, 1, 0.0, False, both, first)

    return [lambda s: make(s, True, False), lambda s: make(s, False, True)]


def cells(name: str, gates: int) -> list[Callable[[Sizes], Call]]:
    packet = getattr(aten, name)

    def make(s: Sizes) -> Call:
        h = s.d
        hx = [x(s.a, h), x(s.a, h)] if name == "lstm_cell" else x(s.a, h)
        target = packet.default
        return call(target, x(s.a, s.c), hx, x(gates * h, s.c), x(gates * h, h), x(gates * h), x(gates * h))

    return [make]


def losses(name: str) -> list[Callable[[Sizes], Call]]:
    target = getattr(aten, name).default
    more = {"poisson_nll_loss": (True, False, 1e-8)}.get(name, ())
    weights = [None] if name == "binary_cross_entropy" else [None, None] if name.endswith("logits") else []

    def make(reduction: int) -> Callable[[Sizes], Call]:
        return lambda s: call(target, x(s.a, s.b), x(s.a, s.b), *weights, *more, reduction)

    return [make(reduction) for reduction in (0, 1, 2)]


def entropies(target: Any, *, spatial: tuple[bool, ...], soft: bool) -> list[Callable[[Sizes], Call]]:
    def make(reduction: int, wide: bool, weighed: bool) -> Callable[[Sizes], Call]:
        def one(s: Sizes) -> Call:
            more = (s.c, s.d)[: 2 if wide else 0]
            weight = x(s.b) if weighed else None
            return call(target, x(s.a, s.b, *more), places(s.b, s.a, *more), weight, reduction)

        return one

    made = [make(r, wide, w) for r in (0, 1, 2) for wide in spatial for w in (False, True)]
    if soft:
        made += [lambda s: call(target, x(s.a, s.b, s.c), x(s.a, s.b, s.c), None, 1)]
    return made


def attention(**options: Any) -> Callable[[Sizes], Call]:
    def make(s: Sizes) -> Call:
        q, k, v = x(s.a, 2, s.b, 4), x(s.a, 2, s.c, 4), x(s.a, 2, s.c, s.d)
        mask = options.get("mask")
        extra = {key: value for key, value in options.items() if key != "mask"}
        return call(aten.scaled_dot_product_attention.default, q, k, v, x(*mask(s)) if mask else None, 0.0, **extra)

    return make


def grouped(mask: Callable[[Sizes], tuple[int, ...]] | None = None) -> Callable[[Sizes], Call]:
    """Each head of keys and values serves two of queries."""

    def make(s: Sizes) -> Call:
        q, k, v = x(s.a, 4, s.b, 4), x(s.a, 2, s.c, 4), x(s.a, 2, s.c, s.d)
        given = x(*mask(s)) if mask else None
        return call(aten.scaled_dot_product_attention.default, q, k, v, given, enable_gqa=True)

    return make


def norms(s: Sizes) -> Call:
    return call(aten.layer_norm.default, x(s.a, s.b, s.c, s.d), [s.c, s.d], x(s.c, s.d), x(s.c, s.d))


def like(name: str) -> list[Callable[[Sizes], Call]]:
    more = {"full_like": (3.0,), "randint_like": (5,)}.get(name, ())
    return [lambda s: call(getattr(aten, name).default, x(s.a, s.b), *more)]


def made(name: str) -> list[Callable[[Sizes], Call]]:
    packet = getattr(aten, name)
    target = packet.low if name == "randint" else packet.memory_format if name == "empty" else packet.default
    before, more = ((0, 5) if name == "randint" else ()), ((3.0,) if name.endswith("full") else ())
    if name.startswith("new"):
        return [lambda s: call(target, x(s.a), [s.b, s.c], *more)]
    return [lambda s: call(target, *before, [s.b, s.c], *more)]


def scans(name: str, *rest: Any) -> list[Callable[[Sizes], Call]]:
    packet = getattr(aten, name)
    target = packet.int if name.endswith("softmax") else packet.default
    return [
        lambda s: call(target, x(s.a, s.b, s.c), *rest, 1),
        lambda s: call(target, x(s.a, s.b), *rest, 0),
    ]


def casts(name: str) -> list[Callable[[Sizes], Call]]:
    made: dict[str, list[Callable[[Sizes], Call]]] = {
        "to": [
            lambda s: call(aten.to.dtype, x(s.a, s.b), torch.long),
            lambda s: call(aten.to.dtype, places(5, s.a, s.b), torch.float64),
            lambda s: call(aten.to.other, x(s.a, s.b), x(3)),
        ],
        "_to_copy": [lambda s: call(aten._to_copy.default, x(s.a, s.b), dtype=torch.bool)],
        "type_as": [lambda s: call(aten.type_as.default, x(s.a, s.b), x(3))],
    }
    return made[name]
