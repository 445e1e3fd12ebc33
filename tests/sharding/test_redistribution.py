"""Layouts and what changes one into another, carried out on numbers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from autopar import InputError
from autopar.sharding.layouts import (
    PARTIAL,
    REPLICATE,
    Placements,
    from_placements,
    layouts,
    local_shape,
    placements,
    slices,
)
from autopar.sharding.mesh import Mesh, make_mesh, mesh_shapes
from autopar.sharding.redistribution import RedistributionStep, RedistributionTable, bytes_sent
from cost_models import Cluster

Parts = dict[tuple[int, ...], np.ndarray]  # by place in the mesh


def cluster_of(n: int, per_node: int) -> Cluster:
    return Cluster.preset(f"{per_node}xH100", nodes=-(-n // per_node))


def mesh_of(shape: Sequence[int], cluster: Cluster) -> Mesh:
    return make_mesh(shape, [d.name for d in cluster.devices[: math.prod(shape)]])


def table_of(sizes: Sequence[int], shape: Sequence[int], cluster: Cluster) -> RedistributionTable:
    mesh = mesh_of(shape, cluster)
    return RedistributionTable(sizes, 4, shape, lambda collective, n, axis: mesh.seconds(collective, n, axis, cluster))


def places(mesh: Sequence[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh)))


def spread(whole: np.ndarray, layout: Placements, mesh: Sequence[int], random: np.random.Generator) -> Parts:
    """Parts of `whole`; of sums random ones that add up to it."""
    addends: Parts = {(): whole}  # by place along the axes of sums
    for n in (n for n, code in zip(mesh, layout, strict=True) if code == PARTIAL):
        for key, value in list(addends.items()):
            pieces = [random.integers(-9, 9, value.shape) for _ in range(n - 1)]
            addends |= {(*key, i): piece for i, piece in enumerate([*pieces, value - sum(pieces)])}
    keys = {place: tuple(i for i, code in zip(place, layout, strict=True) if code == PARTIAL) for place in places(mesh)}
    return {place: addends[key][slices(layout, whole.shape, mesh, place)] for place, key in keys.items()}


def gathered(parts: Parts, layout: Placements, mesh: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The tensor that the parts are of; every replica must be the same."""
    found: dict[tuple[tuple[tuple[int, int], ...], tuple[int, ...]], np.ndarray] = {}
    for place, part in parts.items():
        ends = tuple((s.start, s.stop) for s in slices(layout, shape, mesh, place))
        addend = tuple(i for i, code in zip(place, layout, strict=True) if code == PARTIAL)
        assert (ends, addend) not in found or np.array_equal(found[ends, addend], part), "replicas differ"
        found[ends, addend] = part
    whole = np.zeros(shape, dtype=int)
    for (ends, _), part in found.items():
        whole[tuple(slice(*pair) for pair in ends)] += part
    return whole


def moved(parts: Parts, move: RedistributionStep, mesh: Sequence[int]) -> Parts:
    """What a move does, on numbers: only devices along its axis meet, and only what it says is exchanged."""
    axis, n = move.axis, mesh[move.axis]
    before, after = move.before[axis], move.after[axis]
    assert move.before[:axis] + move.before[axis + 1 :] == move.after[:axis] + move.after[axis + 1 :]
    new: Parts = {}
    for place, part in parts.items():
        line = [parts[(*place[:axis], i, *place[axis + 1 :])] for i in range(n)]
        match move.collective:
            case None if after == PARTIAL:
                new[place] = part if place[axis] == 0 else np.zeros_like(part)
            case None:
                new[place] = np.split(part, n, after)[place[axis]]
            case "all_gather":
                new[place] = np.concatenate(line, before)
            case "all_reduce":
                new[place] = sum(line[1:], line[0])
            case "reduce_scatter":
                new[place] = np.split(sum(line[1:], line[0]), n, after)[place[axis]]
            case "all_to_all":
                new[place] = np.concatenate([np.split(p, n, after)[place[axis]] for p in line], before)
    return new


meshes = st.sampled_from([(2,), (4,), (2, 2), (2, 3), (1, 4), (2, 2, 2)])


@settings(max_examples=examples(20), deadline=None)
@given(meshes, st.sampled_from([(12,), (4, 12), (12, 3, 8)]), st.data())
def test_moves_along_the_way_turn_any_layout_into_any_other(
    shape: tuple[int, ...], sizes: tuple[int, ...], data: st.DataObject
) -> None:
    cluster = cluster_of(math.prod(shape), 4)
    found = table_of(sizes, shape, cluster)
    before, after = (data.draw(st.sampled_from(found.layouts)) for _ in range(2))
    random = np.random.default_rng(0)
    whole = random.integers(-9, 9, sizes)
    parts = spread(whole, before, shape, random)
    seconds = 0.0
    for move in found.path(before, after):
        assert {p.shape for p in parts.values()} == {local_shape(move.before, sizes, shape)}
        parts = moved(parts, move, shape)
        seconds += move.seconds
    assert np.array_equal(gathered(parts, after, shape, sizes), whole)
    assert seconds == pytest.approx(found.seconds[found.number[before], found.number[after]])


@given(meshes, st.sampled_from([(12,), (4, 12)]))
def test_no_detour_is_faster_and_staying_is_free(shape: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    cluster = cluster_of(math.prod(shape), 4)
    seconds = table_of(sizes, shape, cluster).seconds
    assert (np.diag(seconds) == 0).all()
    assert (seconds[:, None, :] <= (seconds[:, :, None] + seconds[None, :, :]) * (1 + 1e-12)).all()


def test_a_part_is_exchanged_rather_than_gathered_and_cut() -> None:
    cluster = cluster_of(4, 4)
    found = table_of((64, 64), (4,), cluster)
    assert [move.collective for move in found.path((0,), (1,))] == ["all_to_all"]
    assert [move.collective for move in found.path((PARTIAL,), (1,))] == ["reduce_scatter"]
    assert [move.collective for move in found.path((PARTIAL,), (REPLICATE,))] in (
        ["all_reduce"],
        ["reduce_scatter", "all_gather"],
    )
    assert [move.collective for move in found.path((REPLICATE,), (0,))] == [None]


def test_the_outer_of_two_axes_on_a_dimension_waits_for_the_inner_one() -> None:
    cluster = cluster_of(4, 4)
    found = table_of((8,), (2, 2), cluster)
    assert found.seconds[found.number[0, 0], found.number[REPLICATE, 0]] > 0
    assert [move.axis for move in found.path((0, 0), (REPLICATE, REPLICATE))] == [1, 0]


def test_parts_across_nodes_take_longer_than_parts_within() -> None:
    cluster = cluster_of(16, 8)
    found = table_of((1 << 12, 1 << 12), (2, 8), cluster)
    whole = found.number[REPLICATE, REPLICATE]
    across, within = found.number[PARTIAL, REPLICATE], found.number[REPLICATE, PARTIAL]
    assert found.seconds[across, whole] > found.seconds[within, whole]


@pytest.mark.parametrize("layout", layouts((4, 4), (2, 2)))
def test_layouts_are_torchs_placements(layout: Placements) -> None:
    converted = placements(layout)
    assert from_placements(converted) == layout
    assert placements((0, REPLICATE, PARTIAL)) == (Shard(0), Replicate(), Partial())
    with pytest.raises(InputError, match="max"):
        from_placements([Partial("max")])


def test_slices_are_those_of_torchs_distributed_tensors() -> None:
    """The first axis is the outermost: torch.distributed.tensor, Shard."""
    assert slices((0, 0), (8,), (2, 2), (1, 0)) == (slice(4, 6),)
    assert slices((1, 0), (4, 6), (3, 2), (2, 1)) == (slice(2, 4), slice(4, 6))
    assert slices((REPLICATE,), (5,), (2,), (1,)) == (slice(0, 5),)


def test_only_even_parts_are_layouts() -> None:
    assert set(layouts((4, 3), (2,), partial=False)) == {(REPLICATE,), (0,)}
    assert (0, 0) not in layouts((2, 6), (2, 2))
    assert layouts((4,), (1,)) == [(REPLICATE,)]


def test_a_mesh_is_checked_and_has_lines() -> None:
    mesh = make_mesh((2, 3), "abcdef")
    assert [mesh.line(axis) for axis in (0, 1)] == [("a", "d"), ("a", "b", "c")]
    assert mesh.place(4) == (1, 1)
    assert set(mesh_shapes(4, 2)) == {(1, 4), (2, 2), (4, 1)}
    for shape, devices, names in (
        ((2, 2), "abc", None),
        ((2,), "aa", None),
        ((0,), "", None),
        ((2,), "ab", ("x", "y")),
    ):
        with pytest.raises(InputError, match="mesh"):
            make_mesh(shape, devices, names)


def test_without_a_cluster_a_path_sends_the_fewest_bytes() -> None:
    """The bytes that a device sends, counted by hand for 4 devices and a tensor of 64 * 64 * 4 bytes."""
    table = RedistributionTable((64, 64), 4, (4,), bytes_sent((4,)))
    nbytes = 64 * 64 * 4
    assert table.between((PARTIAL,), (REPLICATE,)) == 2 * nbytes * 3 / 4
    assert table.between((0,), (REPLICATE,)) == nbytes * 3 / 4
    assert table.between((0,), (1,)) == nbytes / 4 * 3 / 4
    assert table.between((PARTIAL,), (1,)) == nbytes * 3 / 4
