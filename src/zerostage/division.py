"""How a model falls into units.

Each block of the model's repeated layers is a unit. Large modules outside the blocks
(embeddings, heads) are units of their own, small ones share the root unit. A parameter that
modules of several units share, found by identity, gets a unit with all of its users.

A module that `torch.compile` or activation checkpointing has wrapped goes by its own name. Its
wrapper is what gathers: a graph of the module then has no gathering in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

#: Under which names wrappers hold the module that they wrap: of torch.compile, checkpointing and FSDP.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def own_name(path: str) -> str:
    """The path of a module, parameter or buffer without the wrappers on the way."""
    return ".".join(part for part in path.split(".") if part not in _WRAPPERS)


def unwrapped(module: Any) -> Any:
    """The module within wrappers; anything else is itself."""
    while isinstance(module, nn.Module) and (inner := _WRAPPERS & module._modules.keys()):
        module = module._modules[inner.pop()]
    return module


@dataclass
class Division:
    """One unit to be: its name, the modules whose forward needs it, its parameters with all their names."""

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(default_factory=list)
    names: list[tuple[str, ...]] = field(default_factory=list)
    resident: bool = False


def repeated_blocks(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The members of the outermost lists of two or more modules of one class that have parameters.

    Of members that are never called themselves, such as lists of an attention and an MLP, the parts.
    """
    blocks: list[tuple[str, nn.Module]] = []

    def visit(prefix: str, module: nn.Module) -> None:
        children = list(module.named_children())
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            kinds = [type(unwrapped(child)) for _, child in children]
            alike = {kind for kind in kinds if kinds.count(kind) > 1}
            repeated = [
                (name, child)
                for (name, child), kind in zip(children, kinds)
                if kind in alike and next(child.parameters(), None) is not None
            ]
            if len(repeated) > 1:
                blocks.extend(part for name, child in repeated for part in _called(own_name(f"{prefix}{name}"), child))
                children = [child for child in children if child not in repeated]
        for name, child in children:
            visit(f"{prefix}{name}.", child)

    visit("", model)
    return blocks


def _called(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The module, or the parts of one that has no forward (a ModuleDict): their forwards tell when weights are needed."""
    if getattr(unwrapped(module).forward, "__func__", None) is not nn.Module.forward:  # torch's own, which raises
        yield name, module
        return
    for key, child in module.named_children():
        if next(child.parameters(), None) is not None:
            yield from _called(own_name(f"{name}.{key}"), child)


def divide(model: nn.Module, units: Sequence[nn.Module | str | type] | None = None) -> list[Division]:
    """The units of `model`, in the order in which its modules are defined.

    `units`: the modules that shall each be one, as modules, names, or a class whose
    instances are meant; None finds them. Raises ValueError for a name or module that the
    model does not have.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise ValueError(f"'{own_name(name)}' has no shape yet: run one forward of a lazy module before zerostage.shard")
    blocks = repeated_blocks(model) if units is None else _chosen(model, units)
    outermost = _by_name(model)
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
    for path, module in model.named_modules(remove_duplicate=True):
        prefix = own_name(path)
        own = sum(p.numel() for p in module.parameters(recurse=False))
        place = owner_block.get(module, prefix if own >= large else "")
        for key, parameter in module._parameters.items():
            if parameter is not None:
                names.setdefault(parameter, []).append(f"{prefix}.{key}" if prefix else key)
                users.setdefault(parameter, []).append(outermost[prefix])
                if place not in places.setdefault(parameter, []):
                    places[parameter].append(place)
    for path, parameter in model.named_parameters(remove_duplicate=False):
        if own_name(path) not in names[parameter]:  # a module that is registered twice
            names[parameter].append(own_name(path))

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


def _by_name(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by their own names; where one is wrapped, the outermost wrapper."""
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        found.setdefault(own_name(path), module)
    return found


def _chosen(model: nn.Module, units: Sequence[nn.Module | str | type]) -> list[tuple[str, nn.Module]]:
    named = _by_name(model)
    name_of = {module: own_name(path) for path, module in model.named_modules()}
    chosen: dict[str, nn.Module] = {}
    for unit in units:
        if isinstance(unit, type):
            found = {name: named[name] for module, name in name_of.items() if isinstance(module, unit)}
        elif isinstance(unit, str):
            found = {own_name(unit): named[own_name(unit)]} if own_name(unit) in named else {}
        else:
            found = {name_of[unit]: named[name_of[unit]]} if unit in name_of else {}
        if not found:
            raise ValueError(f"units: the model has no module {unit!r}; give modules of it, their names, or a class")
        chosen.update(found)
    chosen.pop("", None)  # what no other unit takes is the root's
    return list(chosen.items())
