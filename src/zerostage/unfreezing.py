"""Parameters that become trainable after the model was sharded.

A frozen flat has no gradients, masters or optimizer state. Where some of its parameters are
unfrozen, the flat is replaced by two: one that is trained and one of what stays frozen. It
happens at the start of the next forward (or `gathered` block), for all units at once and on
all ranks alike. A parameter that is frozen again keeps its place and gets no gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zerostage.flat import Flat

if TYPE_CHECKING:
    from zerostage.engine import Engine


def regroup(engine: Engine) -> None:
    """Give every unfrozen parameter what training needs. Does nothing, cheaply, where there is none."""
    if not any(flat.unfrozen for flat in engine.flats):
        return
    changes = {flat: [i for i in flat.unfrozen if flat.parameters[i].requires_grad] for flat in engine.flats if flat.unfrozen}
    names = {flat: [flat.layout.slots[i].name for i in sorted(chosen)] for flat, chosen in changes.items()}
    mine = sorted(name for each in names.values() for name in each)
    for rank, theirs in enumerate(engine.world.collect_objects(mine, f"the unfreezing of {', '.join(mine[:3])}")):
        if theirs != mine:
            different = sorted(set(mine) ^ set(theirs))[0]
            raise RuntimeError(
                f"'{different}' is trainable on rank {engine.world.rank if different in mine else rank} and frozen on rank "
                f"{rank if different in mine else engine.world.rank}: set requires_grad alike on every rank"
            )
    for flat, chosen in changes.items():
        for handle in flat.unfrozen.values():
            handle.remove()
        flat.unfrozen.clear()
        if chosen:
            _split(engine, flat, sorted(chosen))


def _split(engine: Engine, old: Flat, chosen: list[int]) -> None:
    unit, schedule = old.unit, engine.schedule
    if unit.pinned:
        raise RuntimeError(
            f"'{old.layout.slots[chosen[0]].name}' was unfrozen within a `gathered` block: leave the block before the next "
            "forward, or unfreeze before it"
        )
    schedule.hold([unit])
    values = [parameter.detach().clone() for parameter in old.parameters]
    schedule.let_go([unit])
    old.generation += 1  # a graph made before has places in the old buffer
    parts = []
    for indices in (chosen, [i for i in range(len(values)) if i not in chosen]):
        if indices:
            part = engine.new_flat(unit, [old.parameters[i] for i in indices], [old.names[i] for i in indices])
            part.fill([values[i] for i in indices])
            part.sources = [old.sources[i] for i in indices]
            part.count_uses()
            parts.append(part)
    place = unit.flats.index(old)
    unit.flats[place : place + 1] = parts
    unit.rest()
    schedule.exchange(old, parts)
    if engine.driver is not None:
        engine.driver.include(parts[0])
    for average in engine.averages.values():
        average.follow()
