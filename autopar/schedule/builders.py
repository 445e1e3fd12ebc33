"""The table of actions of every schedule, and how many micro-batches each may hold in flight."""

from collections import deque
from collections.abc import Hashable, Iterator, Sequence

from autopar.schedule.clock import Action, Phase
from autopar.schedule.table import Schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zb", "zb-v")
V_SHAPED = ("zb-v",)
"""Schedules under which the stages go along the ranks and back, so that a slot serves two stages."""
INTERLEAVED = ("interleaved-1f1b", "interleaved-zb", *V_SHAPED)
"""Schedules under which a slot serves several stages."""
SPLIT_BACKWARD = ("zb-h1", "interleaved-zb", "zb-v")
"""Schedules whose backwards run in two parts, INPUT and WEIGHT."""


def ranks_of_stages(name: str, ranks: int, chunks: int) -> tuple[int, ...]:
    """The rank of each stage, for `chunks` stages a rank: 0 1 2 0 1 2 ...; 0 1 2 2 1 0 where they come back."""
    there = tuple(range(ranks))
    if name in V_SHAPED and chunks > 1:
        return there + there[::-1]
    return there * chunks


def n_ranks(name: str, groups: Sequence[Hashable]) -> int | None:
    """The number of ranks, if the stages follow them in the order of the schedule; otherwise None.

    `groups`: by stage what identifies its rank, such as its devices.
    """
    each = list(dict.fromkeys(groups))
    chunks, uneven = divmod(len(groups), max(1, len(each)))
    if not each or uneven or not possible_chunks(name, len(each), chunks):
        return None
    return len(each) if list(groups) == [each[rank] for rank in ranks_of_stages(name, len(each), chunks)] else None


def order_in_words(name: str) -> str:
    """How the stages of an interleaved schedule follow the devices."""
    return (
        "go along the devices and back (a | b | b | a)"
        if name in V_SHAPED
        else "go round the devices in turn (a | b | a | b)"
    )


def possible_chunks(name: str, ranks: int, chunks: int) -> bool:
    """Whether a schedule can give each of `ranks` ranks `chunks` stages."""
    if name in V_SHAPED:
        return chunks == 2 or ranks == chunks == 1
    return chunks == 1 or name in INTERLEAVED


def in_flight_limit(name: str, n_microbatches: int, replicas_here: int, devices_from_here_on: int, devices: int) -> int:
    """How many micro-batches a slot of a stage may hold at a time; `make_schedule` never uses more.

    With m micro-batches, r replicas here, R devices in this stage and all later ones, and D devices in all stages:

        gpipe  ceil(m / r)                      all that the slot has
        1f1b   min(ceil(m / r), ceil(R / r))    enough to keep every device from here on busy; p - s where all r are 1
        zb-h1  min(ceil(m / r), ceil(D / r))    as many everywhere as 1f1b on the first stage; p where all r are 1

    Raises ValueError for an unknown name, for interleaved schedules (see `interleaved_in_flight_limit`), and for
    numbers that no pipeline has.
    """
    _check_name(name, n_microbatches)
    if name in INTERLEAVED:
        raise ValueError(
            f"in_flight_limit has no answer for {name}, whose slots serve several stages: "
            "call interleaved_in_flight_limit"
        )
    if not 1 <= replicas_here <= devices_from_here_on <= devices:
        raise ValueError(
            f"{replicas_here} replicas of {devices_from_here_on} devices from here on of {devices}: give "
            "1 <= replicas <= devices from here on <= devices"
        )
    served = {"gpipe": n_microbatches, "1f1b": devices_from_here_on, "zb-h1": devices}[name]
    return -(-min(n_microbatches, served) // replicas_here)


def interleaved_in_flight_limit(name: str, n_microbatches: int, ranks: int, chunks: int, rank: int) -> int:
    """How many pairs of a stage and a micro-batch a slot of `rank` may hold at a time under an interleaved schedule.

    `n_microbatches` are those of the slot: ceil(m / r) with r replicas. For rank g of p with v chunks:

        interleaved-1f1b  min(m v, 2 (p - g - 1) + (v - 1) p + 1)    the warm-up and one more (Narayanan et al. 2021,
                                                https://arxiv.org/abs/2104.04473, as Megatron-LM counts it)
        interleaved-zb    min(m v, 2 (p - 1) + (v - 1) p + 1)        as many everywhere as on the first rank
        zb-v              min(2 m, 2 p)         two stages of half the size: as much as 1f1b on its first stage

    Raises ValueError for the name of another schedule, and for numbers that no pipeline has.
    """
    if name not in INTERLEAVED:
        raise ValueError(f"{name} is not interleaved: choose one of {', '.join(INTERLEAVED)}, or call in_flight_limit")
    if n_microbatches < 1 or chunks < 1 or not 0 <= rank < ranks:
        raise ValueError(
            f"rank {rank} of {ranks} with {chunks} chunks and {n_microbatches} micro-batches: "
            "give 0 <= rank < ranks and at least one chunk and one micro-batch"
        )
    if name in V_SHAPED:
        return chunks * min(n_microbatches, ranks)
    fullest = 0 if name in SPLIT_BACKWARD else rank
    return min(n_microbatches * chunks, _warm_up(fullest, ranks, chunks) + 1)


def make_schedule(
    name: str, n_microbatches: int, replicas: Sequence[int], *, chunks: int = 1, training: bool = True
) -> Schedule:
    """The table of `name` (one of SCHEDULES) for ranks of `replicas[g]` devices; without training, forwards only.

    Slots are numbered rank by rank. With `chunks` = v there are len(replicas) v stages, and rank g serves the stages
    g, g + p, g + 2p, ..., or under zb-v g and 2p - 1 - g (`ranks_of_stages`).

    Under every schedule a stage's backwards (their WEIGHT parts, where they are split) run on a slot in the order of
    micro-batches: gradients are summed in one order, and the choice of schedule does not change a single bit of them.

    Raises ValueError for an unknown name, n_microbatches < 1, no ranks, a rank without devices, chunks < 1, chunks > 1
    under a schedule that is not interleaved, other than 2 chunks under zb-v, and interleaved ones on ranks of different
    sizes.
    """
    _check_name(name, n_microbatches)
    if not replicas:
        raise ValueError("replicas is empty: a pipeline has at least one stage")
    if min(replicas) < 1:
        raise ValueError(f"{min(replicas)} replicas: every stage has at least one device")
    if chunks < 1:
        raise ValueError(f"chunks is {chunks}: a device serves at least one stage")
    if not possible_chunks(name, len(replicas), chunks):
        if name in V_SHAPED:
            raise ValueError(f"{chunks} chunks: {name} puts two stages on a device, chunks=2")
        raise ValueError(
            f"{chunks} chunks: only {' and '.join(INTERLEAVED)} put several stages on a device, not {name}"
        )
    if name in INTERLEAVED and len(set(replicas)) > 1:
        raise ValueError(f"replicas {tuple(replicas)}: {name} needs as many devices on every rank")

    groups, tables, first = [], [], 0
    for rank, here in enumerate(replicas):
        groups.append(tuple(range(first, first + here)))
        first += here
        for replica in range(here):
            microbatches = range(replica, n_microbatches, here)
            if name in V_SHAPED and chunks > 1:
                table = _v_shaped(microbatches, rank, len(replicas))
            elif name in INTERLEAVED:
                table = _interleaved(name, microbatches, rank, len(replicas), chunks)
            else:
                table = _one_stage(name, microbatches, rank, replicas)
            tables.append(tuple(action for action in table if training or action.phase is Phase.FORWARD))
    placement = tuple(groups[rank] for rank in ranks_of_stages(name, len(replicas), chunks))
    return Schedule(name, n_microbatches, placement, tuple(tables))


def _one_stage(name: str, microbatches: range, stage: int, replicas: Sequence[int]) -> Iterator[Action]:
    """A slot's actions. Its k-th turn has the backwards that are due, then the forward of its k-th micro-batch.

    A backward is due a fixed number of turns after its forward: enough to keep every device from this stage on busy;
    under gpipe, as many as the slot has micro-batches. The WEIGHT parts of zb-h1 are as late as on the first stage (Qi
    et al. 2024, Zero Bubble Pipeline Parallelism, https://arxiv.org/abs/2401.10241): with this delay later stages have
    work left while they wait for the last backwards.

    No stage deadlocks. B(s+1, i) waits for at most F(s, i + a), where a = (w[s+1] - 1) r[s+1] with w the turns; the
    slot of stage s runs that forward once B(s, i + a - w[s] r[s]) is done; and a < R[s+1] < w[s] r[s], so that every
    backward waits only for backwards of earlier micro-batches. INPUT parts take the place of the backwards, and no
    other slot waits for WEIGHT parts.
    """
    n, here = len(microbatches), replicas[stage]
    turns = -(-sum(replicas[stage:]) // here)
    due = {
        "gpipe": [(Phase.BACKWARD, n)],
        "1f1b": [(Phase.BACKWARD, turns)],
        "zb-h1": [(Phase.INPUT, turns), (Phase.WEIGHT, -(-sum(replicas) // here))],
    }[name]
    for turn in range(n + due[-1][1]):
        for phase, delay in [*due, (Phase.FORWARD, 0)]:
            if 0 <= turn - delay < n:
                yield Action(phase, stage, microbatches[turn - delay])


def _interleaved(name: str, microbatches: range, rank: int, ranks: int, chunks: int) -> Iterator[Action]:
    """A slot's actions, ordered as in Megatron-LM (Narayanan et al. 2021): of p micro-batches at a time all forwards of
    its first stage, all of its second, and so on, and the backwards likewise from its last stage to its first; after a
    warm-up of w[g] = 2 (p - g - 1) + (v - 1) p forwards one forward and one backward in turn.

    The WEIGHT parts of interleaved-zb come up to 2 g turns after their INPUT parts: so each rank holds as much as the
    first one, and has work left while it waits at the end. Once there are no more forwards, one WEIGHT part comes with
    each INPUT part, which would wait for those of other ranks anyway.

    No number of micro-batches deadlocks. If p divides it, give the n-th forward of rank g the tick 2 (n + g) and its
    n-th backward 2 (n + w[g] + g) + 1. On each rank the ticks rise along the table, and whatever an action waits for
    has a smaller one: F the same on rank g - 1, or on rank 0 the (n - p)-th on rank p - 1; B the same on rank g + 1, or
    on rank p - 1 the (n - p)-th on rank 0, and a forward whose number is at most n + (v - 1) p. If p does not divide
    it, the tables are those for the next multiple without the micro-batches that do not exist, which no other waits
    for. (With a shorter last group in the tables themselves, 5 micro-batches on 4 ranks of 3 chunks do deadlock.)
    INPUT parts take the place of the backwards, and no other slot waits for WEIGHT parts.
    """
    group = ranks * chunks  # forwards of p micro-batches
    n = -(-len(microbatches) // ranks) * group
    warm_up = _warm_up(rank, ranks, chunks)
    turns = [(Phase.FORWARD, 0), (Phase.BACKWARD, warm_up)]
    if name in SPLIT_BACKWARD:
        delay = min(2 * rank, max(0, n - warm_up))
        turns = [(Phase.FORWARD, 0), (Phase.INPUT, warm_up), (Phase.WEIGHT, warm_up + delay)]
    for turn in range(n + turns[-1][1]):
        for phase, since in turns:
            if not 0 <= turn - since < n:
                continue
            groups_before, place = divmod(turn - since, group)
            chunk, member = divmod(place, ranks)
            if phase is not Phase.FORWARD:
                chunk = chunks - 1 - chunk
            position = groups_before * ranks + member
            if position < len(microbatches):
                yield Action(phase, chunk * ranks + rank, microbatches[position])


def _v_shaped(microbatches: range, rank: int, ranks: int) -> Iterator[Action]:
    """A slot's actions under ZB-V (Qi et al. 2024, as zb-h1, section 6): the stages go along the ranks and back, so
    that rank g of p runs the stages g and 2p - 1 - g, and the last rank turns a micro-batch round without a transfer.

    In turn k a slot runs the forward of its later stage for its k-th micro-batch, that stage's backward for its
    (k - g)-th, a forward of its earlier stage, and that stage's backward for its (k - p + 1)-th. Before the first turn
    come 2 (p - g) - 1 forwards of the earlier stage, which fill the time until the first micro-batch is back; from then
    on its forwards keep pace with the backwards that make room, p micro-batches of both stages in all. Once there are
    no more forwards, WEIGHT parts wait until all INPUT parts of the later stage are done.

    No number of micro-batches deadlocks. Give the four parts of turn k on rank g the ticks 6k - 5g + 0, 1, 3 and 4, and
    the forwards before the first turn lower ones, in order. On each rank the ticks rise along the table, and whatever
    an action waits for has a smaller one: a forward of the earlier stage the same on rank g - 1, a tick or more before;
    of the later stage that on rank g + 1, five before; backwards the other way round. No other slot waits for WEIGHT
    parts.
    """
    n, earlier, later = len(microbatches), rank, 2 * ranks - 1 - rank
    ahead = 2 * (ranks - rank) - 1
    for position in range(min(ahead, n)):
        yield Action(Phase.FORWARD, earlier, microbatches[position])
    postponed: deque[Action] = deque()
    for turn in range(n + ranks):
        forward = ahead + turn if turn < rank else turn + ranks - rank if turn >= ranks - 1 else n
        for phase, stage, position in (
            (Phase.FORWARD, later, turn),
            (Phase.INPUT, later, turn - rank),
            (Phase.FORWARD, earlier, forward),
            (Phase.INPUT, earlier, turn + 1 - ranks),
        ):
            if not 0 <= position < n:
                continue
            yield Action(phase, stage, microbatches[position])
            if phase is Phase.INPUT:
                postponed.append(Action(Phase.WEIGHT, stage, microbatches[position]))
                if not n <= turn + (stage == earlier) < n + rank:
                    yield postponed.popleft()
    yield from postponed


def _warm_up(rank: int, ranks: int, chunks: int) -> int:
    """Forwards of an interleaved schedule before a rank's first backward, besides the one in turn with it."""
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks


def _check_name(name: str, n_microbatches: int) -> None:
    if name not in SCHEDULES:
        raise ValueError(f"unknown schedule {name!r}: choose one of {', '.join(SCHEDULES)}")
    if n_microbatches < 1:
        raise ValueError(f"n_microbatches is {n_microbatches}: a step has at least one micro-batch")
