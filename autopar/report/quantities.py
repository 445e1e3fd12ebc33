"""Quantities as people write them: 231 ms, 61.2 GB, 12.4 days, 1.3 million tokens per second."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autopar.errors.numbers import count, digits, duration_text, seconds_text
from cost_models import bytes_text
from cost_models.hardware.device_specs import data_sheet_of

__all__ = [
    "count",
    "digits",
    "duration_text",
    "flops_text",
    "largest_text",
    "no_data_sheet",
    "percent",
    "rate_text",
    "seconds_text",
    "share_of_text",
    "size_text",
    "ticks",
    "utilisation_note",
    "utilisation_text",
]

_ROOM = 0.95  # share of an axis from where on a text in the middle would stick out
_ROUNDING = 1e-9


def ticks(seconds: float, most: int = 6) -> tuple[tuple[float, str], ...]:
    """Round times from 0 to `seconds`, at most `most` of them after 0: (share of `seconds`, text). None lies so near to
    the end that its text would stick out."""
    if not seconds > 0:
        return ((0.0, "0 s"),)
    power = 10.0 ** math.floor(math.log10(seconds / most))
    step = next(power * n for n in (1, 2, 5, 10) if seconds / (power * n) <= most)
    places = [n * step / seconds for n in range(int(seconds / step * (1 + _ROUNDING)) + 1)]
    return tuple((place, seconds_text(place * seconds)) for place in places if place <= _ROOM or place >= 1 - _ROUNDING)


def size_text(nbytes: float | None) -> str:
    if not nbytes:
        return "unknown" if nbytes is None else "0"
    return bytes_text(float(f"{nbytes:.3g}"))


def largest_text(sizes: Iterable[float]) -> str:
    """The largest of some sizes, or a dash."""
    return size_text(most) if (most := max(sizes, default=None)) is not None else "-"


def share_of_text(nbytes: float, whole: float | None) -> str:
    """`61.2 of 79.1 GB`, or `61.2 GB` where the whole is unknown."""
    if whole is None:
        return size_text(nbytes)
    part, total = size_text(nbytes), size_text(whole)
    unit = total.partition(" ")[2]
    return f"{part.removesuffix(f' {unit}')} of {total}"


def rate_text(rate: float, what: str) -> str:
    """`12,300 tokens/s`, `1.23 million tokens/s`."""
    return f"{digits(rate / 1e6)} million {what}/s" if rate >= 1e6 else f"{digits(rate)} {what}/s"


def flops_text(rate: float) -> str:
    """`33.9 TFLOP/s`, `6.2 GFLOP/s`."""
    unit, name = (1e12, "TFLOP/s") if rate >= 1e12 else (1e9, "GFLOP/s")
    return f"{digits(rate / unit)} {name}"


def percent(share: float, sign: str = "") -> str:
    """`12.3%`; nothing is `0.0%`, without a sign."""
    text = f"{share:{sign}.1%}"
    return text.lstrip("+-") if text in ("-0.0%", "+0.0%") else text


def utilisation_text(share: float) -> str:
    """`12.3%`, and `0.012%` where one decimal would show nothing."""
    return percent(share) if not share or share >= 1e-3 else f"{digits(100 * share, 2)}%"


def utilisation_note(shares: Iterable[float | None]) -> str:
    """What model FLOPs utilisation is, and how it may exceed 100 %."""
    text = "MFU: model FLOPs utilisation of all devices, used or not."
    if any(share is not None and share > 1 for share in shares):
        text += (
            " It exceeds 100 % where kernels compute fewer products than the model has, such as Winograd's for "
            "convolutions of 3 x 3, or those of causal attention."
        )
    return text


def no_data_sheet(device_kinds: Iterable[str]) -> str:
    """Why the peaks of devices are not known: `no data sheet for AMD EPYC, 1 thread`."""
    without = [kind for kind in dict.fromkeys(device_kinds) if data_sheet_of(kind) is None]
    return f"no data sheet for {' and '.join(without)}" if without else "no data sheet has a peak for these products"
