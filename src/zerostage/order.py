"""In which order the units are visited: learned from what really happens, and the same on all ranks."""

from __future__ import annotations

from zerostage.notes import OrderError
from zerostage.unit import Unit


class Order:
    """The order in which a kind of work visits the units, learned from what really happened."""

    def __init__(self, units: list[Unit]) -> None:
        self.units = list(units)
        self.learned = False
        self.seen: dict[Unit, int] = {}  # visits this time, in the order of the first ones

    def visit(self, unit: Unit) -> None:
        self.seen[unit] = self.seen.get(unit, 0) + 1

    def proposal(self, numbers: dict[Unit, int]) -> list[int] | None:
        """What was seen, as numbers of units, if there is something to learn from it."""
        if self.seen and (not self.learned or self.deviates()):
            return [numbers[unit] for unit in self.seen]
        return None

    def deviates(self) -> bool:
        """Whether the units came in another order than the recorded one."""
        place = {unit: i for i, unit in enumerate(self.units)}
        places = [place[unit] for unit in self.seen]
        return places != sorted(places)

    def adopt(self, seen: list[Unit]) -> None:
        """Follow `seen` from now on. Units that it lacks keep their place behind the unit before them."""
        order = list(seen)
        for place, unit in enumerate(self.units):
            if unit not in order:
                before = [order.index(u) for u in self.units[:place] if u in order]
                order.insert(before[-1] + 1 if before else 0, unit)
        self.units = order
        self.learned = True


class Pass:
    """One walk through the units in order; `cursor` is the place of the next one to be gathered."""

    def __init__(self, units: list[Unit], learned: bool) -> None:
        self.units, self.learned = units, learned
        self.cursor = 0
        self._place = {unit: place for place, unit in enumerate(units)}

    def ahead(self, unit: Unit) -> bool:
        return self._place[unit] >= self.cursor

    def next(self) -> Unit | None:
        return self.units[self.cursor] if self.cursor < len(self.units) else None


def agree(orders: list[list[int] | None], names: list[str]) -> None:
    """Raise OrderError if two ranks' orders (by rank, as numbers of units) put the same units in different orders."""
    different: dict[tuple[int, ...], int] = {}  # and the first rank that has it: of many ranks, few differ
    for rank, order in enumerate(orders):
        if order:
            different.setdefault(tuple(order), rank)
    for place, (first, rank) in enumerate(different.items()):
        for second, other in list(different.items())[place + 1 :]:
            in_both = set(first) & set(second)
            for a, b in zip((i for i in first if i in in_both), (i for i in second if i in in_both)):
                if a != b:
                    raise OrderError(
                        f"the ranks ran the model's units in different orders: where rank {rank} ran '{names[a]}', rank "
                        f"{other} ran '{names[b]}'. Every rank must run the same modules in the same order in each forward"
                    )
