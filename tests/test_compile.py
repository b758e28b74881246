"""torch.compile of a model and of modules in it, before and after zerostage.shard, against the same run without it.

Backend 'eager' runs the same operators as no torch.compile, so results are the same bits.
'aot_eager' takes some operators apart, which may round differently: within 1e-6 in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from models import batch, tiny_llama
from ranks import run
from safetensors.torch import save_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

import zerostage
from zerostage.engine import engine_of


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8).requires_grad_(False), Mlp()
        self.register_buffer("offset", torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x)) + self.offset


class Net(nn.Module):
    """Blocks between two ends and a scale of its own; `call` runs one block."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(4, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.call: Callable = lambda block, x: block(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.layers:
            x = self.call(block, x)
        return self.head(x) * self.scale


class Borrowing(Net):
    """Uses weights apart from their modules, one of which is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(nn.functional.linear(x, self.never.weight))
        return x * self.layers[1].mlp.up.weight.square().mean()


def x_of(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(1 + rank + 100 * step))


# A way compiles a model with the settings of torch.compile, and returns what to call from then on.


def nothing(model: nn.Module, **settings: Any) -> nn.Module:
    return model


def blocks_in_place(model: nn.Module, **settings: Any) -> nn.Module:
    for block in model.layers:
        block.compile(**settings)
    return model


def blocks_wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    for i, block in enumerate(model.layers):
        model.layers[i] = torch.compile(block, **settings)
    return model


def parts_wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    for block in model.layers:
        block.mlp = torch.compile(block.mlp, **settings)
    return model


def ends_wrapped(model: nn.Module, **settings: Any) -> nn.Module:
    model.embed, model.head = torch.compile(model.embed, **settings), torch.compile(model.head, **settings)
    return model


def model_in_place(model: nn.Module, **settings: Any) -> nn.Module:
    model.compile(**settings)
    return model


def twin(model: nn.Module, **settings: Any) -> nn.Module:
    return torch.compile(model, **settings)


WAYS = [blocks_in_place, blocks_wrapped, parts_wrapped, ends_wrapped, model_in_place, twin]


class Counting:
    """A backend that counts its graphs. `seen` tells, step by step, how much torch.compile has done."""

    def __init__(self, backend: str) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        self.backend, self.graphs = backend, 0
        self.seen: list[tuple[int, int]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, inputs)

    def end_step(self) -> None:
        self.seen.append((self.graphs, torch._dynamo.utils.counters["frames"]["total"]))

    def check(self, compiled: bool) -> None:
        """Something was compiled, all of it in the first two steps, and nothing of the engine."""
        assert bool(self.graphs) == compiled, self.seen
        assert self.seen[1] == self.seen[-1] and len(self.seen) > 3, self.seen
        files = {metrics.co_filename for metrics in torch._dynamo.utils.get_compilation_metrics()}
        own = [file for file in files if Path(zerostage.__file__).parent in Path(file or "").parents]
        assert bool(files) == compiled and not own, files


def prepared(
    way: Callable, stage: int, when: str = "before", build: Callable = Net, prefetch: int = 1, **settings: Any
) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    """A model, what to call in its place, and its optimizer; compiled before or after shard, or the twin itself sharded."""
    model = build()
    called = model if when == "after" else way(model, **settings)
    optimizer = torch.optim.SGD(called.parameters(), lr=0.5, momentum=0.9)
    given = called if when == "itself" else model
    assert zerostage.shard(given, optimizer, stage=stage, prefetch=prefetch) == (given, optimizer)
    return model, way(model, **settings) if when == "after" else called, optimizer


def trained(
    rank: int, n: int, ways: list[Callable], stages: list[int], compiler: str, when: str = "before", **options: Any
) -> dict[tuple[str, int], dict[str, Any]]:
    """Steps with accumulation, clipping and evaluation, and what must be the same however the model is compiled."""
    results = {}
    for way in ways:
        for stage in stages:
            counting = Counting(compiler)
            _, called, optimizer = prepared(way, stage, when, backend=counting, **options)
            losses = []
            for step in range(6):
                with zerostage.no_sync(called):
                    called(x_of(rank, 10 * step)).square().mean().backward()
                called(x_of(rank, 10 * step + 1)).square().mean().backward()
                losses.append(zerostage.clip_grad_norm_(called, 0.5).item())
                optimizer.step()
                optimizer.zero_grad()
                called.eval()
                with torch.no_grad():
                    losses.append(called(x_of(rank, step)).sum().item())
                called.train()
                counting.end_step()
            counting.check(way is not nothing)
            zerostage.traffic(called).reset()
            called(x_of(rank, 0)).square().mean().backward()
            optimizer.step()
            sent, memory = zerostage.traffic(called), zerostage.memory(called, optimizer)
            assert {name: sent.bytes.get(name, 0) for name in sent.expected()} == sent.expected(), (way, stage)
            measured = zerostage.audit(called, optimizer)
            results[way.__name__, stage] = {
                "losses": losses,
                "state": zerostage.full_state_dict(called, rank0_only=False),
                "units": [unit.name for unit in engine_of(called).units],
                "memory": (memory.expected, memory.measured, memory.peak),
                "audit": (measured.stage, measured.largest_unit),
            }
            zerostage.close(called)
    return results


def compare(results: dict, oracle: dict, exact: bool) -> None:
    for (way, stage), result in results.items():
        expected = oracle["nothing", stage]
        for part in ("units", "memory", "audit"):
            assert result[part] == expected[part], (way, stage, part)
        assert result["state"].keys() == expected["state"].keys(), (way, stage)
        if exact:
            assert result["losses"] == expected["losses"], (way, stage)
        for name, value in expected["state"].items():
            assert torch.allclose(result["state"][name], value, atol=0 if exact else 1e-6, rtol=0), (way, stage, name)


def test_P1_P2_every_way_to_compile_equals_no_compile_and_compiles_once() -> None:
    oracles = run(trained, n=2, ways=[nothing], stages=[3, 2, 1, 0], compiler="eager")
    for ways, when, stages, compiler in (
        (WAYS, "before", [3], "eager"),
        ([blocks_in_place], "before", [1, 0], "aot_eager"),
        ([twin], "before", [2], "aot_eager"),
        ([blocks_wrapped, parts_wrapped, model_in_place, twin], "after", [3], "aot_eager"),
        ([twin], "itself", [3], "aot_eager"),
    ):
        results = run(trained, n=2, ways=ways, stages=stages, compiler=compiler, when=when)
        for result, oracle in zip(results, oracles):
            compare(result, oracle, exact=compiler == "eager")


def test_compiled_with_other_ranks_and_prefetch_and_models_and_in_one_graph_a_block() -> None:
    for n, ways, options, settings in (
        (1, [blocks_in_place], {}, {"fullgraph": True}),
        (3, [blocks_in_place], {"prefetch": 0}, {"fullgraph": True}),
        (2, [blocks_wrapped, ends_wrapped], {"prefetch": 2}, {"fullgraph": True}),
        (2, [blocks_in_place, twin], {"build": Borrowing}, {}),
    ):
        oracles = run(trained, n=n, ways=[nothing], stages=[3], compiler="eager", **options)
        results = run(trained, n=n, ways=ways, stages=[3], compiler="aot_eager", **options, **settings)
        for result, oracle in zip(results, oracles):
            compare(result, oracle, exact=False)


def names_said(rank: int, n: int) -> list[str]:
    said = []
    for way, when in ((blocks_wrapped, "before"), (twin, "itself"), (blocks_wrapped, "after")):
        _, called, _ = prepared(way, 3, when, backend="eager")
        weight = called.layers[1].mlp.up.weight
        with pytest.raises(RuntimeError) as caught:
            weight.sum()
        said.append(str(caught.value))
        with pytest.raises(RuntimeError) as caught, torch.no_grad(), zerostage.gathered(called.layers[1]):
            weight.zero_()
        said.append(str(caught.value))
    model = blocks_wrapped(Net())
    model.layers[1].mlp.up.weight = nn.Parameter(torch.zeros(16 + rank, 8))
    with pytest.raises(ValueError) as caught:
        zerostage.shard(model)
    return [*said, str(caught.value)]


def test_P1_messages_give_the_names_of_the_model() -> None:
    for said in run(names_said, n=2):
        assert all("'layers.1.mlp.up.weight'" in message for message in said), said


def units_named(rank: int, n: int) -> None:
    chosen = (None, lambda m: "layers.1", lambda m: Block, lambda m: m.layers[1], lambda m: m.layers[1]._orig_mod)
    for choose in chosen:
        model = Net()
        model.layers[1] = torch.compile(model.layers[1])
        zerostage.shard(model, units=choose and [choose(model)])
        (found,) = (unit for unit in engine_of(model).units if unit.name == "layers.1")
        assert found.modules == [model.layers[1]]  # the wrapper gathers, so that its graph need not


def test_compiled_modules_are_found_as_units() -> None:
    run(units_named, n=2)


def fullgraph(rank: int, n: int, stage: int) -> dict[str, Any]:
    said = {}
    for way, when in ((model_in_place, "before"), (model_in_place, "after"), (twin, "before"), (twin, "itself")):
        model, called, optimizer = prepared(way, stage, when, backend=Counting("eager"), fullgraph=True)
        try:
            called(x_of(rank, 0)).sum().backward()
        except RuntimeError as error:
            said[way.__name__, when] = str(error)
            model._compiled_call_impl = None
        model(x_of(rank, 0)).sum().backward()  # the engine is as good as new
        optimizer.step()
    return said


def test_fullgraph_over_a_whole_sharded_model_says_what_to_compile() -> None:
    assert run(fullgraph, n=2, stage=2) == [{}, {}]  # no unit gathers: one graph is possible
    for said in run(fullgraph, n=2, stage=3):
        assert len(said) == 4
        for message in said.values():
            line = message.splitlines()[0]
            assert "fullgraph=True cannot hold here" in line and "block.compile(fullgraph=True)" in line


def step_compiled(rank: int, n: int, compiled: bool) -> list[Any]:
    """torch.compile of the whole step: the engine's hooks of backward and of the optimizer run within it."""
    results = []
    for stage in (3, 0):
        model, _, optimizer = prepared(nothing, stage)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            zerostage.clip_grad_norm_(model, 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        counting = Counting("eager")
        run_step = torch.compile(step, backend=counting) if compiled else step
        losses = []
        for number in range(5):
            losses.append(run_step(x_of(rank, number)).item())
            counting.end_step()
        counting.check(compiled)
        results.append((losses, {k: v.tolist() for k, v in zerostage.full_state_dict(model, rank0_only=False).items()}))
    return results


def test_a_compiled_training_step_equals_a_plain_one() -> None:
    assert run(step_compiled, n=2, compiled=True) == run(step_compiled, n=2, compiled=False)


class Inside(Block):
    """Checkpoints a part of itself, within its graph."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self.mlp, self.norm(x), use_reentrant=self.reentrant) + self.offset


class Silent(nn.ModuleDict):
    """A block without a forward of its own: its parts must gather, or a graph that forward could not use is used by
    the recomputation, whose weights are there already."""

    def __init__(self) -> None:
        super().__init__({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})


#: What is checkpointed, and the ways to compile it that are tried.
KINDS = {
    "around blocks": (blocks_in_place,),
    "within blocks": (blocks_in_place,),
    "wrappers": (blocks_wrapped,),
    "around the model": (model_in_place,),
}


def checkpointing(kind: str, reentrant: bool) -> nn.Module:
    model = Net()
    if kind == "around blocks":
        model.call = partial(checkpoint, use_reentrant=reentrant)
    elif kind == "within blocks":
        for block in model.layers:
            block.__class__ = type("Inside", (Inside,), {"reentrant": reentrant})
    elif kind == "wrappers":
        how = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for i, block in enumerate(model.layers):
            model.layers[i] = checkpoint_wrapper(block, how)
    else:
        model.layers = nn.ModuleList(Silent() for _ in range(3))
        model.call = lambda block, x: x + torch.tanh(block["a"](torch.tanh(block["b"](x))))
    return model


def checkpointed(rank: int, n: int, way: Callable, kinds: list[str], stage: int) -> dict[str, Any]:
    results = {}
    for kind, reentrant in product(kinds, (False, True)):
        counting = Counting("aot_eager")
        _, called, optimizer = prepared(way, stage, build=partial(checkpointing, kind, reentrant), backend=counting)
        for step in range(4):
            x = x_of(rank, step).requires_grad_()
            y = checkpoint(called, x, use_reentrant=reentrant) if kind == "around the model" else called(x)
            y.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            counting.end_step()
        counting.check(way is not nothing)
        results[kind, reentrant] = zerostage.full_state_dict(called, rank0_only=False)
        zerostage.close(called)
    return results


def test_G4_activation_checkpointing_of_compiled_modules_at_stage_3() -> None:
    oracle = run(checkpointed, n=2, way=nothing, kinds=list(KINDS), stage=0)[0]
    for way in (blocks_in_place, blocks_wrapped, model_in_place):
        kinds = [kind for kind, ways in KINDS.items() if way in ways]
        for results in run(checkpointed, n=2, way=way, kinds=kinds, stage=3):
            for kind, state in results.items():
                assert state.keys() == oracle[kind].keys(), (way, kind)
                assert not any("_checkpoint" in name or "_orig" in name for name in state)
                for name, value in oracle[kind].items():
                    assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (way, kind, name)


def exchanged(rank: int, n: int, folder: str, save: Callable, load: Callable, stage: int, meta: bool) -> None:
    _, called, optimizer = prepared(save, stage, backend=Counting("eager"))
    called(x_of(rank, 0)).square().mean().backward()
    optimizer.step()
    state = zerostage.full_state_dict(called, rank0_only=False)
    path = Path(folder) / f"{save.__name__}.safetensors"
    if rank == 0:
        save_file(state, path)
    torch.distributed.barrier()
    plain = Net()
    plain.load_state_dict(state)
    with torch.device("meta" if meta else "cpu"):
        model = Net()
    given = load(model, backend="eager")
    zerostage.shard(given, stage=stage)
    assert zerostage.load_weights(given, path) == []
    loaded = zerostage.full_state_dict(given, rank0_only=False)
    assert loaded.keys() == state.keys() and all(torch.equal(loaded[name], value) for name, value in state.items())
    assert torch.equal(given(x_of(rank, 1)), plain(x_of(rank, 1)))


def test_P1_weights_go_between_compiled_and_uncompiled_models(tmp_path: Path) -> None:
    for save, load in ((blocks_wrapped, nothing), (nothing, blocks_wrapped), (twin, nothing), (nothing, twin)):
        for stage, meta in ((0, False), (3, True)):
            run(exchanged, n=2, folder=str(tmp_path), save=save, load=load, stage=stage, meta=meta)


def llama(rank: int, n: int, way: Callable, stage: int, reentrant: bool | None) -> Any:
    counting = Counting("aot_eager")
    model = tiny_llama()
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    called = way(model, backend=counting) if way in (twin, nothing, model_in_place) else model
    if called is model:
        way(model.model, backend=counting)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zerostage.shard(called, optimizer, stage=stage)
    for step in range(4):
        called(**batch(rank, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        counting.end_step()
    counting.check(way is not nothing)
    return zerostage.full_state_dict(called, rank0_only=False)


def test_G4_a_compiled_llama_equals_an_uncompiled_one() -> None:
    oracle = run(llama, n=2, way=nothing, stage=0, reentrant=None)[0]
    for way, reentrant in ((blocks_in_place, None), (twin, False), (blocks_wrapped, True)):
        for state in run(llama, n=2, way=way, stage=3, reentrant=reentrant):
            assert state.keys() == oracle.keys()
            for name, value in oracle.items():  # compiled as a whole, transformers gives attention another mask
                assert torch.allclose(state[name], value, atol=1e-6, rtol=0), (way, reentrant, name)
