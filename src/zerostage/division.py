"""How a model falls into units.

Each block of the model's repeated layers is a unit. Large modules outside the blocks
(embeddings, heads) are units of their own, small ones share the root unit. A parameter that
modules of several units share, found by identity, gets a unit with all of its users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn


@dataclass
class Division:
    """One unit to be: its name, the modules whose forward needs it, its parameters with all their names."""

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)
    resident: bool = False


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of the outermost lists of two or more modules of one class that have parameters."""
    blocks: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        children = list(module.named_children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = [type(child) for _, child in children]
            alike = {kind for kind in kinds if kinds.count(kind) > 1}
            repeated = [(n, c) for n, c in children if type(c) in alike and next(c.parameters(), None) is not None]
            if len(repeated) > 1:
                blocks.extend((f"{prefix}{name}", child) for name, child in repeated)
                children = [child for child in children if child not in repeated]
        for name, child in children:
            visit(f"{prefix}{name}.", child)

    visit("", model)
    return blocks


def divide(model: nn.Module, units: Sequence[nn.Module | str | type] | None = None) -> list[Division]:
    """The units of `model`, in the order in which its modules are defined.

    `units`: the modules that shall each be one, as modules, names, or a class whose
    instances are meant; None finds them. Raises ValueError for a name or module that the
    model does not have.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"'{name}' has no shape yet: run one forward of a lazy module before zerostage.shard")
    blocks = repeated_blocks(model) if units is None else _chosen(model, units)
    owner_block: dict[nn.Module, str] = {}
    for name, block in sorted(blocks, key=lambda item: item[0].count(".")):
        for module in block.modules():
            owner_block[module] = name  # the innermost block that holds it
    modules = dict(blocks)
    total = sum(p.numel() for p in model.parameters())
    sizes = [sum(p.numel() for p in block.parameters()) for block in modules.values()]
    large = max(1, min(max(sizes, default=total), total // 8))

    names: dict[nn.Parameter, list[str]] = {}
    users: dict[nn.Parameter, list[nn.Module]] = {}
    places: dict[nn.Parameter, list[str]] = {}
    for prefix, module in model.named_modules(remove_duplicate=True):
        own = sum(p.numel() for p in module.parameters(recurse=False))
        place = owner_block.get(module, prefix if own >= large else "")
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{prefix}.{key}" if prefix else key)
                users.setdefault(parameter, []).append(module)
                if place not in places.setdefault(parameter, []):
                    places[parameter].append(place)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in names[parameter]:  # a module that is registered twice
            names[parameter].append(name)

    divisions: dict[str, Division] = {}
    for parameter, where in places.items():
        shared = len(where) > 1
        key = names[parameter][0].rpartition(".")[0] + " (shared)" if shared else where[0]
        if key not in divisions:
            block = modules.get(key)
            divisions[key] = Division(key or "root", [block] if block is not None else [], resident=shared or not key)
        division = divisions[key]
        division.parameters.append(parameter)
        division.names.append(tuple(names[parameter]))
        if key not in modules:
            division.modules += [module for module in users[parameter] if module not in division.modules]
    return list(divisions.values())


def _chosen(model: nn.Module, units: Sequence[nn.Module | str | type]) -> list[tuple[str, nn.Module]]:
    named = dict(model.named_modules())
    name_of = {module: name for name, module in named.items()}
    chosen: dict[str, nn.Module] = {}
    for unit in units:
        if isinstance(unit, type):
            found = {name: module for name, module in named.items() if isinstance(module, unit)}
        elif isinstance(unit, str):
            found = {unit: named[unit]} if unit in named else {}
        else:
            found = {name_of[unit]: unit} if unit in name_of else {}
        if not found:
            raise ValueError(f"units: the model has no module {unit!r}; give modules of it, their names, or a class")
        chosen.update(found)
    chosen.pop("", None)  # what no other unit takes is the root's
    return list(chosen.items())
