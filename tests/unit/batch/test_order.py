"""What is fed when: families of lines that begin alike, and lanes that keep each worker busy with one."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from broker.batch.lanes import PORTION, Lanes
from broker.batch.plan import Plan
from broker.batch.prefix import ALONE, LEVELS, Prefixes


def ordered(texts: list[str]) -> tuple[list[int], list[int]]:
    prefixes = Prefixes()
    for text in texts:
        prefixes.add(text)
    order, families = prefixes.order()
    return list(order), list(families)


def plan_of(families: list[int]) -> Plan:
    count = len(families)
    offsets, order = array("Q", range(count + 1)), array("I", range(count))
    return Plan("0" * 26, "", count, offsets, order, array("I", families))


def test_lines_that_begin_alike_stand_together_and_branches_keep_the_files_order() -> None:
    first, second = "a" * 300, "b" * 300
    order, families = ordered([first + "1", second + "1", "alone", first + "2", second + "2"])
    assert order == [0, 3, 1, 4, 2]
    assert families == [0, 1, ALONE, 0, 1]


def test_deeper_beginnings_bind_closer() -> None:
    shared = "s" * LEVELS[0]
    deep = shared + "d" * LEVELS[1]
    order, families = ordered([deep + "1", shared + "x" * 2000, deep + "2", shared + "y"])
    assert order == [0, 2, 1, 3]
    assert families == [0, 0, 0, 0]


def test_short_equal_lines_are_a_family_and_short_beginnings_are_not() -> None:
    _, families = ordered(["same", "same", "same thing", "sam"])
    assert families == [0, 0, ALONE, ALONE]


@given(st.lists(st.text(alphabet="ab", max_size=3).map(lambda text: text * 200), max_size=40))
def test_the_order_holds_every_line_once_and_families_are_unbroken(texts: list[str]) -> None:
    order, families = ordered(texts)
    assert sorted(order) == list(range(len(texts)))
    seen: list[int] = []
    for index in order:
        family = families[index]
        if family == ALONE:
            continue
        if not seen or seen[-1] != family:
            assert family not in seen
            seen.append(family)


@settings(deadline=None)
@given(
    families=st.lists(st.integers(0, 4), max_size=150).map(sorted),
    workers=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    window=st.integers(1, 5),
    finished=st.sets(st.integers(0, 149)),
    dice=st.randoms(use_true_random=False),
)
def test_each_open_line_is_given_once_within_the_window(
    families: list[int], workers: list[int], window: int, finished: set[int], dice: object
) -> None:
    plan = plan_of([family if family else ALONE for family in families])
    open_lines = [index for index in range(plan.count) if index not in finished]
    lanes = Lanes(plan, lambda index: index not in finished, len(open_lines), window)
    given_out: list[int] = []
    flying: list[int] = []
    turn = 0
    while True:
        lanes.serve(workers[turn % len(workers)])
        turn += 1
        while (found := lanes.next()) is not None:
            index, group = found
            assert (group == "") == (plan.families[index] == ALONE)
            given_out.append(index)
            flying.append(index)
            assert len(flying) <= window * (max(workers) + 2)
            assert len(flying) <= lanes.capacity
        if not flying:
            break
        ended = dice.choice(flying)  # type: ignore[attr-defined]
        flying.remove(ended)
        lanes.ended(ended)
    assert sorted(given_out) == open_lines


def test_a_group_never_mixes_families_nor_exceeds_a_portion() -> None:
    plan = plan_of([0] * 100 + [1] * 3 + [ALONE] * 5 + [2] * 50)
    lanes = Lanes(plan, lambda index: True, plan.count, 4)
    lanes.serve(2)
    groups: dict[str, list[int]] = {}
    while (found := lanes.next()) is not None:
        groups.setdefault(found[1], []).append(found[0])
        lanes.ended(found[0])
    assert sum(map(len, groups.values())) == plan.count
    for group, lines in groups.items():
        assert len({plan.families[index] for index in lines}) == 1
        if group:
            assert len(lines) <= PORTION
            assert lines == list(range(lines[0], lines[0] + len(lines)))


def test_one_worker_has_its_window_of_one_family_and_another_whole_group_waits() -> None:
    plan = plan_of([0] * 40 + [40] * 40)
    lanes = Lanes(plan, lambda index: True, plan.count, 4)
    lanes.serve(1)
    given_out = []
    while (found := lanes.next()) is not None:
        given_out.append(found)
    groups = {group for _, group in given_out}
    assert len(given_out) == 8
    assert len(groups) == 2


def test_portions_shrink_towards_the_end_so_that_workers_end_together() -> None:
    plan = plan_of([0] * 200)
    lanes = Lanes(plan, lambda index: True, plan.count, 1)
    lanes.serve(4)
    sizes: dict[str, int] = {}
    while (found := lanes.next()) is not None:
        sizes[found[1]] = sizes.get(found[1], 0) + 1
        lanes.ended(found[0])
    values = list(sizes.values())
    assert values[0] > 2 * values[-1]
    assert values[-1] <= 2


def test_lanes_that_end_make_room_for_lines_without_kin() -> None:
    plan = plan_of([ALONE] * 10)
    lanes = Lanes(plan, lambda index: True, plan.count, 2)
    lanes.serve(1)
    first = [lanes.next() for _ in range(4)]
    assert all(found is not None and found[1] == "" for found in first)
    assert lanes.next() is None
    lanes.ended(first[0][0])  # type: ignore[index]
    assert lanes.next() is not None
    assert lanes.next() is None
