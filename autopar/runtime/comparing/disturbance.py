"""Rounds that another program disturbed, and steps that nobody should believe.

The kernel says how long the threads of this process were ready to run but had no core. Where it does not, a round in
which a step took much longer than in the others counts as disturbed. Rounds whose ratios disagree are followed by more.

    round   automatic   plain model   waited for cores
    1       60 ms       110 ms        1 ms
    2       190 ms      2300 ms       900 ms             left out
    3       61 ms       111 ms        0 ms

Contestants that are close to the fastest run some more rounds at the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from autopar.costs.cost_table import Progress
from autopar.costs.present_speed import runs_whole_model
from autopar.plan.plan import Plan
from autopar.runtime.comparing.contestants import Racer, Round, Rounds, rounds_in_turn
from cost_models import Device

Steps = Mapping[str, tuple[float, ...]]  # plan -> s of each step that counts
Doubts = Callable[[Steps, bool], str]

_WAITED = 0.25  # s of waiting for a core, a second of a round: from there on it is disturbed
_LONGER = 1.5  # a step over the typical one of the same contestant: the same, where waiting is not reported
_ENOUGH_TO_TELL = 3  # rounds
_AGREE = 1.25  # the highest over the lowest ratio of two contestants, of rounds that agree
_PASSES = 3  # of rounds, at most
_CLOSE = 1.25  # over the fastest contestant's step: a round or two do not tell which of them is faster
_MOST_GAIN = 1.5  # times the number of devices: a higher speed-up is not one
_OFF = 4.0  # measured / predicted of one plan over that of the others


@dataclass(frozen=True)
class SteadySteps:
    """Steps by name, and why they are not believed ("": they are)."""

    steps: Steps
    doubt: str = ""


def steady_steps(
    contestants: Sequence[Racer], devices: Sequence[Device], rounds: Rounds, progress: Progress, doubts: Doubts
) -> SteadySteps:
    """The steps of undisturbed rounds, with more rounds as long as they disagree or are doubted.

    `doubts(steps, quiet)` says in words why steps are not to be believed; `quiet`: the kernel says that none waited.
    """
    taken: list[Round] = []
    names = [contestant.name for contestant in contestants]
    steps: Steps = {}
    doubt = ""
    for _ in range(_PASSES):
        taken += rounds_in_turn(contestants, devices, rounds, progress)
        kept, quiet = undisturbed(taken)
        steps = dict(zip(names, zip(*(one.seconds for one in kept), strict=True), strict=True))
        doubt = doubts(steps, quiet)
        if not doubt and agree(kept):
            break
    if rounds.finals and not doubt and (close := _close(contestants, steps)):
        finals = Rounds(rounds.finals, budget=rounds.budget)
        kept, _ = undisturbed(rounds_in_turn(close, devices, finals, progress, warm_ups=0))
        more = dict(zip((one.name for one in close), zip(*(one.seconds for one in kept), strict=True), strict=True))
        steps = {name: seconds + more.get(name, ()) for name, seconds in steps.items()}
    return SteadySteps(steps, doubt)


def _close(contestants: Sequence[Racer], steps: Steps) -> list[Racer]:
    """The contestants that more rounds may show to be the fastest; none where one is alone in front."""
    typical = {name: median(seconds) for name, seconds in steps.items()}
    limit = _CLOSE * min(typical.values())
    close = [one for one in contestants if typical[one.name] <= limit]
    return close if len(close) > 1 else []


def undisturbed(rounds: Sequence[Round]) -> tuple[list[Round], bool]:
    """The rounds that count: all of them where none is known to be better. And whether the kernel says that nothing
    disturbed them."""
    known = [one for one in rounds if one.waited is not None]
    if known:
        quiet = [one for one in known if (one.waited or 0.0) < _WAITED * sum(one.seconds)]
        return (quiet, True) if quiet else (list(rounds), False)
    if len(rounds) < _ENOUGH_TO_TELL:
        return list(rounds), False
    typical = [sorted(seconds)[(len(seconds) - 1) // 4] for seconds in zip(*(r.seconds for r in rounds), strict=True)]
    steady = [r for r in rounds if all(s <= _LONGER * t for s, t in zip(r.seconds, typical, strict=True))]
    return (steady if 2 * len(steady) >= len(rounds) else list(rounds)), False


def agree(rounds: Sequence[Round]) -> bool:
    """Whether the ratio of any two contestants was about the same in the middle half of the rounds."""
    n = len(rounds[0].seconds)
    for a, b in itertools.combinations(range(n), 2):
        ratios = sorted(one.seconds[a] / one.seconds[b] for one in rounds)
        cut = len(ratios) // 4
        if ratios[-1 - cut] > _AGREE * ratios[cut]:
            return False
    return True


def why_unbelievable(plans: Mapping[str, Plan], like_predicted: Collection[str], steps: Steps, quiet: bool) -> str:
    """Why the steps cannot be those of the plans on a machine of their own; "" if they can.

    `like_predicted`: of `plans`, those that ran with as many threads as they were priced for. With more, a step may be
    shorter than predicted, but not longer.
    """
    measured = {name: median(seconds) for name, seconds in steps.items()}
    alone = [name for name in measured if name in like_predicted and runs_whole_model(plans[name])]
    alone = [name for name in alone if len(plans[name].used_devices) == 1]
    single = min((measured[name] for name in alone), default=None)
    for name, seconds in measured.items():
        n = len(plans[name].used_devices)
        if n > 1 and single is not None and single > _MOST_GAIN * n * seconds:
            return (
                f"one device took {_text(single)} and {name} {_text(seconds)}, and {n} devices cannot be "
                f"{single / seconds:.3g}x as fast as one"
            )
    off = {name: s / p for name, s in measured.items() if (p := plans[name].predicted_step_time)}
    off = {name: max(1.0, x) if name not in like_predicted else x for name, x in off.items()}
    if quiet or len(off) < 2:
        return ""
    if len(off) == 2:  # which of them is wrong, nobody knows
        strange = [max(off, key=off.__getitem__)] if max(off.values()) > _OFF * min(off.values()) else []
    else:
        usual = median(off.values())
        strange = [name for name, ratio in off.items() if not usual / _OFF <= ratio <= usual * _OFF]
    if len(strange) != 1:
        return ""
    (name,) = strange
    predicted = plans[name].predicted_step_time or 0.0
    others = median(ratio for other, ratio in off.items() if other != name)
    return (
        f"{name} took {_text(measured[name])} where {_text(predicted)} are predicted ({off[name]:.3g}x), and the other "
        f"plans took {others:.3g}x their predictions"
    )


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
