"""The published arithmetic of ZeRO, from `Partition` and `Layout`."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerostage.layout import ALIGN, Layout
from zerostage.partition import Partition

N = 70.6e9
GB = 1e9


def gigabytes(stage: int, n: int, parameters: float = N) -> float:
    return sum(Partition.from_stage(stage, n).bytes(parameters).values()) / GB


def test_sixteen_bytes_per_parameter() -> None:
    assert round(gigabytes(0, 8)) == 1130
    for n in (1, 2, 8, 64):
        assert Partition.from_stage(0, n).bytes_per_parameter() == 16
        assert Partition.from_stage(1, n).bytes_per_parameter() == 4 + 12 / n
        assert Partition.from_stage(2, n).bytes_per_parameter() == 2 + 14 / n
        assert Partition.from_stage(3, n).bytes_per_parameter() == 16 / n


@pytest.mark.parametrize(
    ("n", "stage1", "stage2", "stage3"), [(8, 388, 265, 141), (16, 335, 203, 71), (32, 309, 172, 35), (64, 296, 157, 18)]
)
def test_the_table_of_a_70b_model(n: int, stage1: int, stage2: int, stage3: int) -> None:
    assert [round(gigabytes(stage, n)) for stage in (1, 2, 3)] == [stage1, stage2, stage3]


def test_a_7b_model_at_stage_1() -> None:
    assert gigabytes(0, 8, 7e9) == 112 and gigabytes(1, 8, 7e9) == 28 + 84 / 8 == 38.5


def test_floors_as_ranks_grow() -> None:
    assert [round(gigabytes(stage, 10**9)) for stage in (1, 2, 3)] == [282, 141, 0]
    assert all(gigabytes(stage, 10**6) > 80 for stage in (1, 2))  # no number of 80 GB cards is enough
    assert gigabytes(3, 8) > 80 and gigabytes(3, 16) < 80


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 64])
def test_traffic_in_model_sizes(n: int) -> None:
    numel = 1000 * ALIGN * n
    for stage, sizes in enumerate((2, 2, 2, 3)):
        sent = sum(Partition.from_stage(stage, n).traffic(n, numel, 2, 2).values())
        assert sent * n == sizes * 2 * numel * (n - 1)  # 1.5 times an all-reduce at stage 3
    frozen = sum(Partition.from_stage(3, n).traffic(n, numel, 2, 0).values())
    assert frozen * n == 2 * 2 * numel * (n - 1)


def test_stages_are_presets() -> None:
    assert [Partition.from_stage(stage, 8) for stage in range(4)] == [
        Partition(1, 1, 1), Partition(8, 1, 1), Partition(8, 8, 1), Partition(8, 8, 8)
    ]  # fmt: skip
    assert [Partition.from_stage(stage, 8).stage(8) for stage in range(4)] == [0, 1, 2, 3]
    assert Partition.hybrid(4) == Partition(4, 4, 4) and Partition.hybrid(4).stage(8) is None
    assert Partition.node_local_weights(8, 4) == Partition(8, 8, 4)


@pytest.mark.parametrize("degrees", [(2, 4, 1), (4, 2, 4), (8, 4, 3), (0, 0, 0), (4, 4, -1), (2.0, 1, 1), (True, 1, 1)])
def test_degrees_that_do_not_divide_are_refused(degrees: tuple) -> None:
    with pytest.raises(ValueError, match="Partition"):
        Partition(*degrees)


def test_a_partition_must_fit_the_ranks() -> None:
    with pytest.raises(ValueError, match="optimizer=4 must divide 6"):
        Partition(4, 4, 1).check(6)
    for stage in (4, -1, True, "3"):
        with pytest.raises(ValueError, match="must be 0, 1, 2 or 3"):
            Partition.from_stage(stage, 2)


chains = st.lists(st.integers(1, 4), min_size=4, max_size=4)


@given(chains, st.integers(1, 5))
def test_slices_nest_and_tile(radices: list[int], blocks: int) -> None:
    w, g, o = radices[0], radices[0] * radices[1], math.prod(radices[:3])
    n = math.prod(radices)
    partition, numel = Partition(o, g, w), blocks * n
    assert partition.levels(n) == tuple(radices)
    for level, degree in enumerate((1, w, g, o, n)):
        held = [partition.interval(level, rank, n, numel) for rank in range(n)]
        assert {stop - start for start, stop in held} == {numel // degree}
        assert len(set(held)) == degree and sorted(set(held))[0][0] == 0
        if level:
            outer = [partition.interval(level - 1, rank, n, numel) for rank in range(n)]
            assert all(a <= start and stop <= b for (a, b), (start, stop) in zip(outer, held))


shapes = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=8)


@given(shapes, st.integers(1, 9))
def test_a_layout_covers_its_parameters_once(sizes: list[list[int]], ranks: int) -> None:
    layout = Layout([((f"p{i}",), shape) for i, shape in enumerate(sizes)], ranks)
    assert layout.numel % (ranks * ALIGN) == 0
    assert layout.values == sum(math.prod(shape) for shape in sizes)
    assert sum(stop - start for start, stop in layout.padding()) == layout.numel - layout.values
    position = 0
    for slot in layout.slots:
        assert slot.start == position and slot.start % ALIGN == 0 and slot.stop >= slot.start + slot.numel
        position = slot.stop
    assert position == layout.numel
    part = layout.numel // ranks
    pieces = [piece for rank in range(ranks) for piece in layout.segments(rank * part, (rank + 1) * part)]
    assert sum(last - first for _, first, last in pieces) == layout.numel
    assert all(first % ALIGN == 0 and last % ALIGN == 0 for _, first, last in pieces)
