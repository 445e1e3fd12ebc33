"""One option of every operator: against trying all, against an integer program, against a chain's own recurrence."""

from __future__ import annotations

import ast
import itertools
import math
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar.planner
from autopar.errors import InfeasibleError, InputError
from autopar.planner.intra_op.elimination.choices import Edge, Selection, SelectionProblem, cost
from autopar.planner.intra_op.elimination.order import planned
from autopar.planner.intra_op.elimination.reduction import reduced
from autopar.planner.intra_op.elimination.solve import EFFORT, select

# A transformer layer: norm, q, k, v, attention, out, add, norm, up, gate, down, add.
LAYER = [(0, 1), (0, 2), (0, 3), (1, 4), (2, 4), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (7, 9), (8, 10), (9, 10)]
LAYER += [(10, 11), (6, 11)]
LINKS = [(11, 0), (11, 6)]  # from one layer to the next
PER_LAYER = 12


def random_edge(random: np.random.Generator, i: int, j: int, sizes: list[int], labels: int, allowed: float) -> Edge:
    seconds = random.integers(0, 6, (labels, labels)).astype(float)
    seconds[random.random((labels, labels)) > allowed] = math.inf
    return Edge(i, j, random.integers(0, labels, sizes[i]), random.integers(0, labels, sizes[j]), seconds)


def random_choices(
    random: np.random.Generator, sizes: list[int], ends: list[tuple[int, int]], labels: int = 2, allowed: float = 0.9
) -> SelectionProblem:
    """Whole numbers, so that sums are exact and many choices equally good."""
    return SelectionProblem(
        seconds=[random.integers(0, 8, k).astype(float) for k in sizes],
        bytes=[random.integers(0, 8, k).astype(float) for k in sizes],
        edges=[random_edge(random, i, j, sizes, labels, allowed) for i, j in ends],
    )


def transformer(n_layers: int, options: int, labels: int, seed: int = 0) -> SelectionProblem:
    """Equal layers, each option the quicker the more bytes it takes."""
    random = np.random.default_rng(seed)
    sizes = [options] * PER_LAYER
    seconds = [random.random(options) for _ in sizes]
    bytes_ = [np.floor(100 / (0.2 + own) * random.uniform(0.8, 1.2, options)) for own in seconds]
    edges = {ends: random_edge(random, *ends, sizes, labels, 0.9) for ends in LAYER + LINKS}
    made = []
    for layer in range(n_layers):
        at = layer * PER_LAYER
        made += [Edge(at + i, at + j, e.out, e.into, e.seconds / 4) for (i, j), e in list(edges.items())[: len(LAYER)]]
        if layer:
            links = [edges[ends] for ends in LINKS]
            made += [Edge(at - PER_LAYER + e.source, at + e.target, e.out, e.into, e.seconds / 4) for e in links]
    return SelectionProblem(seconds * n_layers, bytes_ * n_layers, made)


def least_by_trial(choices: SelectionProblem, memory: float) -> float:
    """Seconds of the best of all choices, inf if none fits."""
    best = math.inf
    for options in itertools.product(*(range(len(own)) for own in choices.seconds)):
        seconds, size = cost(choices, options)
        if size <= memory and all(options[i] == option for i, option in choices.fixed.items()):
            best = min(best, seconds)
    return best


def least_by_integer_program(choices: SelectionProblem, memory: float) -> float:
    """By HiGHS: one binary variable an option and one a pair of labels of an edge, their sums tied together."""
    optimize = pytest.importorskip("scipy.optimize")
    sparse = pytest.importorskip("scipy.sparse")
    start = np.cumsum([0, *(len(own) for own in choices.seconds)])
    objective = [float(x) for own in choices.seconds for x in own]
    upper = [1.0] * len(objective)
    rows: list[tuple[dict[int, float], float, float]] = [
        ({int(n): 1.0 for n in range(start[i], start[i + 1])}, 1.0, 1.0) for i in range(len(choices.seconds))
    ]
    if not math.isinf(memory):
        rows.append(({n: float(x) for n, x in enumerate(np.concatenate(choices.bytes))}, 0.0, memory))
    for edge in choices.edges:
        first, (n_out, n_into) = len(objective), edge.seconds.shape
        objective += [0.0 if math.isinf(x) else float(x) for x in edge.seconds.flat]
        upper += [0.0 if math.isinf(x) else 1.0 for x in edge.seconds.flat]
        for i, labels, count, pairs in (
            (edge.source, edge.out, n_out, [[a * n_into + b for b in range(n_into)] for a in range(n_out)]),
            (edge.target, edge.into, n_into, [[a * n_into + b for a in range(n_out)] for b in range(n_into)]),
        ):
            for label in range(count):
                row = {int(start[i] + s): 1.0 for s in np.flatnonzero(labels == label)}
                rows.append((row | {first + pair: -1.0 for pair in pairs[label]}, 0.0, 0.0))
    entries = [(r, n, x) for r, (row, _, _) in enumerate(rows) for n, x in row.items()]
    r, n, x = zip(*entries, strict=True)
    matrix = sparse.csr_matrix((x, (r, n)), shape=(len(rows), len(objective)))
    result = optimize.milp(
        objective,
        constraints=optimize.LinearConstraint(matrix, [row[1] for row in rows], [row[2] for row in rows]),
        integrality=np.arange(len(objective)) < start[-1],
        bounds=optimize.Bounds(0, upper),
        options={"mip_rel_gap": 0},
    )
    return float(result.fun) if result.status == 0 else math.inf


def least_bytes(choices: SelectionProblem) -> float:
    """Of all choices that the edges allow, inf if there is none."""
    allowed = [
        Edge(e.source, e.target, e.out, e.into, np.where(np.isinf(e.seconds), np.inf, 0.0)) for e in choices.edges
    ]
    return least_by_integer_program(SelectionProblem(choices.bytes, choices.seconds, allowed), math.inf)


def assert_kept(choices: SelectionProblem, memory: float, found: Selection) -> None:
    """What every selection promises."""
    assert (found.seconds, found.bytes) == cost(choices, found.options)
    assert found.bytes <= memory
    assert found.bound <= found.seconds
    assert found.bound == found.seconds or not found.proven
    assert all(found.options[i] == option for i, option in choices.fixed.items())


def assert_least(choices: SelectionProblem, memory: float, least: float, **how: float) -> None:
    if math.isinf(least):
        with pytest.raises(InfeasibleError):
            select(choices, memory, **how)
        return
    found = select(choices, memory, **how)
    assert_kept(choices, memory, found)
    assert found.proven
    assert found.seconds == pytest.approx(least, rel=1e-9, abs=1e-9)


@st.composite
def small(draw: st.DrawFn) -> tuple[SelectionProblem, float]:
    """Any graph of up to 6 variables: trees, cycles, parts, parallel edges, edges from a variable to itself."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    variable = st.integers(0, len(sizes) - 1)
    ends = draw(st.lists(st.tuples(variable, variable), max_size=10))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    choices = random_choices(random, sizes, ends, draw(st.integers(1, 3)), draw(st.sampled_from([0.6, 0.9, 1.0])))
    fixed = {i: draw(st.integers(0, sizes[i] - 1)) for i in draw(st.sets(variable, max_size=2))}
    memory = draw(st.one_of(st.just(math.inf), st.integers(0, 5 * len(sizes)).map(float)))
    return SelectionProblem(choices.seconds, choices.bytes, choices.edges, fixed), memory


@settings(max_examples=examples(40), deadline=None)
@given(small())
def test_selection_is_the_best_of_all_choices(problem: tuple[SelectionProblem, float]) -> None:
    choices, memory = problem
    assert_least(choices, memory, least_by_trial(choices, memory))


@settings(max_examples=examples(20), deadline=None)
@given(small(), st.sampled_from([1, 4, 12]))
def test_tables_that_must_not_be_large_change_no_answer(problem: tuple[SelectionProblem, float], entries: int) -> None:
    choices, memory = problem
    assert_least(choices, memory, least_by_trial(choices, memory), entries=entries)


@pytest.mark.parametrize("seed", range(6))
def test_selection_agrees_with_an_integer_program_on_any_graph(seed: int) -> None:
    random = np.random.default_rng(seed)
    n = int(random.integers(8, 21))
    ends = [(i, int(random.integers(0, i))) for i in range(1, n)]
    ends += [(int(i), int(j)) for i, j in random.integers(0, n, (n // 3, 2)) if i != j]
    choices = random_choices(random, [int(k) for k in random.integers(2, 7, n)], ends, labels=3)
    fits = least_bytes(choices)
    for memory in (math.inf, fits, fits + 3, fits + n, fits - 1):
        assert_least(choices, memory, least_by_integer_program(choices, memory))


@pytest.mark.slow
@pytest.mark.parametrize("n_layers", [2, 3])
def test_selection_agrees_with_an_integer_program_on_a_transformer(n_layers: int) -> None:
    choices = transformer(n_layers, options=6, labels=3)
    fits, most = least_bytes(choices), select(choices).bytes
    for memory in (math.inf, fits + 0.3 * (most - fits), fits + 0.8 * (most - fits)):
        assert_least(choices, memory, least_by_integer_program(choices, memory))


def test_a_chain_takes_what_its_own_recurrence_says_with_and_without_limit() -> None:
    """best[v][b] = least seconds up to option v of the last variable with b bytes, for every whole b."""
    n, options, labels, memory = 60, 5, 3, 200
    random = np.random.default_rng(3)
    seconds, size = random.random(options), random.integers(1, 8, options)
    edge = Edge(0, 1, random.integers(0, labels, options), random.integers(0, labels, options), random.random((3, 3)))
    choices = SelectionProblem(
        [seconds] * n,
        [size.astype(float)] * n,
        [Edge(i, i + 1, edge.out, edge.into, edge.seconds) for i in range(n - 1)],
    )
    between = edge.seconds[np.ix_(edge.out, edge.into)]
    best = np.full((options, memory + 1), math.inf)
    for v in range(options):
        best[v, size[v] :] = seconds[v]
    for _ in range(n - 1):
        before = (best[:, None, :] + between[:, :, None]).min(axis=0)
        best = np.full_like(best, math.inf)
        for v in range(options):
            best[v, size[v] :] = before[v, : memory + 1 - size[v]] + seconds[v]
    assert select(choices).bytes > memory, "the limit binds"
    assert_least(choices, memory, float(best[:, memory].min()))


def test_equal_layers_are_eliminated_once() -> None:
    def operations(n_layers: int) -> int:
        return len(planned(reduced(transformer(n_layers, 12, 4), with_bytes=True), math.inf).operations)

    few, many = operations(8), operations(40)
    assert many - few <= 2 * 32, "only the chain between equal layers grows"


def test_layers_with_arrays_of_their_own_give_what_shared_ones_do() -> None:
    shared = transformer(6, 10, 4)
    own = SelectionProblem(
        [seconds.copy() for seconds in shared.seconds],
        [size.copy() for size in shared.bytes],
        [Edge(e.source, e.target, e.out.copy(), e.into.copy(), e.seconds.copy()) for e in shared.edges],
    )
    memory = 0.9 * select(shared).bytes
    assert select(own) == select(shared)
    assert select(own, memory) == select(shared, memory)


def test_equally_good_options_give_the_lowest_numbers() -> None:
    zeros = [np.zeros(4)] * 5
    labels = np.array([0, 1, 0, 1])
    choices = SelectionProblem(
        zeros, [np.ones(4)] * 5, [Edge(i, (i + 1) % 5, labels, labels, np.zeros((2, 2))) for i in range(5)]
    )
    assert select(choices).options == select(choices, memory=5.0).options == (0,) * 5


def test_a_graph_in_which_all_are_neighbours_is_solved_though_its_tables_would_be_too_large() -> None:
    random = np.random.default_rng(5)
    choices = random_choices(random, [4] * 8, list(itertools.combinations(range(8), 2)), labels=4, allowed=1.0)
    whole = select(choices)
    assert whole.width == 7
    split = select(choices, entries=64)
    assert split.proven
    assert split.seconds == whole.seconds
    memory = whole.bytes - 4
    assert select(choices, memory, entries=64).seconds == select(choices, memory).seconds


def limited() -> list[tuple[SelectionProblem, float]]:
    """Choices with memory limits that bind."""
    choices = transformer(3, options=8, labels=4, seed=2)
    least, most = least_bytes(choices), select(choices).bytes
    return [(choices, least + part * (most - least)) for part in (0.2, 0.5, 0.8)]


@pytest.mark.slow
@pytest.mark.parametrize("effort", [0.0, 3e4, 1e5])
def test_little_effort_gives_a_choice_and_a_bound_that_hold(effort: float) -> None:
    for choices, memory in limited():
        exact, hasty = select(choices, memory), select(choices, memory, effort=effort)
        assert_kept(choices, memory, hasty)
        assert hasty.bound <= exact.seconds * (1 + 1e-9)
        assert exact.seconds <= hasty.seconds * (1 + 1e-9)
    assert effort or not hasty.proven, "the effort was too little to prove the choice"


@pytest.mark.slow
@pytest.mark.parametrize("effort", [0.0, 3e4, 1e5, EFFORT])
def test_neither_the_clock_nor_a_busy_machine_changes_an_answer(monkeypatch: pytest.MonkeyPatch, effort: float) -> None:
    alone = [select(*problem, effort=effort) for problem in limited()]
    hours = itertools.count(step=3600.0)
    for name in ("time", "monotonic", "perf_counter", "process_time"):
        monkeypatch.setattr(time, name, lambda: next(hours))
    stop = threading.Event()
    busy = [threading.Thread(target=_burn, args=(stop,), daemon=True) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        assert [select(*problem, effort=effort) for problem in limited()] == alone
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def _burn(stop: threading.Event) -> None:
    while not stop.is_set():
        sum(range(1000))


@pytest.mark.slow
def test_the_planner_has_no_clock() -> None:
    """A result that depends on how fast the machine is cannot be repeated."""
    package = Path(autopar.planner.__path__[0])
    sources = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
    assert len(sources) > 20
    imported = {
        (str(path.relative_to(package)), name)
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [one.name for one in node.names])
    }
    clocks = {(path, name) for path, name in imported if name.split(".")[0] in ("time", "timeit", "datetime", "signal")}
    assert not clocks


def test_what_does_not_fit_is_named_with_the_least_that_would() -> None:
    choices = SelectionProblem([np.array([1.0, 2.0])] * 3, [np.array([9.0, 4.0])] * 3)
    with pytest.raises(InfeasibleError, match=r"fits into 11 bytes: the smallest takes 12"):
        select(choices, memory=11)
    assert select(choices, memory=12).options == (1, 1, 1)


def test_options_that_exclude_each_other_are_refused() -> None:
    never, label = np.array([[math.inf]]), np.zeros(2, dtype=int)
    with pytest.raises(InfeasibleError, match=r"no option of variable [01] is allowed"):
        select(SelectionProblem([np.zeros(2)] * 2, [np.zeros(2)] * 2, [Edge(0, 1, label, label, never)]))
    differ = np.array([[math.inf, 0.0], [0.0, math.inf]])  # no two colours for three neighbours
    ends = [(0, 1), (1, 2), (2, 0)]
    with pytest.raises(InfeasibleError, match="allowed by all edges"):
        select(
            SelectionProblem(
                [np.zeros(2)] * 3, [np.zeros(2)] * 3, [Edge(*e, np.arange(2), np.arange(2), differ) for e in ends]
            )
        )


def test_no_variables_cost_nothing() -> None:
    assert select(SelectionProblem([], [])) == Selection((), 0.0, 0.0, 0.0, 0, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"seconds": [np.zeros(2)], "bytes": []}, "bytes of 0"),
        ({"seconds": [np.zeros(0)], "bytes": [np.zeros(0)]}, "variable 0"),
        ({"seconds": [np.array([-1.0])], "bytes": [np.zeros(1)]}, "-1.0"),
        ({"seconds": [np.zeros(1)], "bytes": [np.array([math.inf])]}, "bytes must be finite"),
        ({"seconds": [np.zeros(1)], "bytes": [np.zeros(1)], "fixed": {0: 1}}, "no option 1"),
        (
            {
                "seconds": [np.zeros(1)] * 2,
                "bytes": [np.zeros(1)] * 2,
                "edges": [Edge(0, 1, np.array([0]), np.array([3]), np.zeros((1, 3)))],
            },
            "edge 0: labels 3 to 3 of variable 1",
        ),
    ],
)
def test_choices_that_make_no_sense_are_refused_by_name(arguments: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        SelectionProblem(**arguments)
    with pytest.raises(InputError, match="memory"):
        select(SelectionProblem([], []), memory=math.nan)
