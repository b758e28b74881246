"""Random models, partitions and sequences of operations, against plain torch, stage 0 and the accounts.

An example is a description: a plain dict of the model's tree, its parameters, the optimizer, the
variants (partition, prefetch, units) and the operations in their order. `replay(description)` runs one;
what failed once is kept as a test of its own below. ZEROSTAGE_EXAMPLES=500 runs that many random batches.

Three oracles. Plain torch in one process, over the data of all ranks. Stage 0 of the engine: every other
variant gives the same bits, all ranks alike. The accounts: bytes at rest and traffic as expected.
"""

from __future__ import annotations

import math
import os
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerostage
from zerostage import Partition

#: Whether parameters that were frozen when the model was sharded are unfrozen, too.
UNFREEZE = True

EXAMPLES = int(os.environ.get("ZEROSTAGE_EXAMPLES", "0"))
ROWS, WIDTH = 2, 4
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16,
          "int64": torch.int64, "uint8": torch.uint8}  # fmt: skip
STAGE0 = {"partition": (1, 1, 1), "prefetch": 1, "units": None}

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")

Description = dict[str, Any]


# -- The model ------------------------------------------------------------------------------------


def mixer(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A fixed matrix that keeps values of about 1 at about 1."""
    return (torch.arange(rows * columns).view(rows, columns).cos() / math.sqrt(rows + 1)).to(dtype)


def used(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, trained: bool) -> torch.Tensor:
    """A smooth function of both, between -1 and 1, to which every element of the weight contributes in its own way."""
    value = weight.to(dtype)  # plain torch keeps a 16-bit weight in fp32, as a master
    value = value if trained else value.to(x.dtype) if dtype.is_floating_point else value.to(x.dtype) / 8
    h = x.to(value.dtype)
    if value.dim() == 0:
        h = h * value
    elif value.dim() == 1:
        h = h @ mixer(WIDTH, len(value), h.dtype) * value @ mixer(len(value), WIDTH, h.dtype)
    else:
        matrix = value.reshape(value.shape[0], math.prod(value.shape[1:]))
        h = nn.functional.linear(h @ mixer(WIDTH, matrix.shape[1], h.dtype), matrix)
        h = h @ mixer(matrix.shape[0], WIDTH, h.dtype)
    return torch.tanh(x + h.to(x.dtype))


class Node(nn.Module):
    """Uses its parameters, then its children, then again the parameters that have two uses."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.parts: list[Node] = []
        self.uses: list[tuple[nn.Parameter, torch.dtype, bool, int]] = []

    def adopt(self, children: list[nn.Module], as_list: bool) -> None:
        self.parts = list(children)  # a plain list: no second registration
        if as_list:
            self.children_ = nn.ModuleList(children)
        else:
            for number, child in enumerate(children):
                self.add_module(f"child{number}", child)

    def forward(
        self, x: torch.Tensor, skip: Any = (), path: Any = None, checkpointed: Any = (), reentrant: bool = False
    ) -> torch.Tensor:
        for weight, dtype, trained, times in self.uses:
            x = used(x, weight, dtype, trained) if times > 0 else x
        for place in range(len(self.parts)) if path is None else path:
            child = self.parts[place]
            if child.number not in skip:
                x = checkpoint(child, x, skip, use_reentrant=reentrant) if place in checkpointed else child(x, skip)
        for weight, dtype, trained, times in self.uses:
            x = used(x, weight, dtype, trained) if times > 1 else x
        return x


def build(description: Description, plain: bool) -> tuple[list[Node], list[nn.Parameter]]:
    """The nodes, the model first, and the parameters, as described."""
    weights = []
    for index, one in enumerate(description["params"]):
        dtype, generator = DTYPES[one["dtype"]], torch.Generator().manual_seed(index)
        if dtype.is_floating_point:
            value = (torch.randn(one["shape"], generator=generator) / 2).to(dtype)
            value = value.float() if plain and dtype.itemsize == 2 else value
        else:
            value = torch.randint(0, 4, one["shape"], generator=generator).to(dtype)
        weights.append(nn.Parameter(value, requires_grad=one["trainable"]))
    parents = [None, *description["nodes"]]
    nodes = [Node(number) for number in range(len(parents))]
    for number, node in enumerate(nodes):
        node.adopt([nodes[child] for child, parent in enumerate(parents) if parent == number], description["lists"])
    for index, (weight, one) in enumerate(zip(weights, description["params"])):
        for place, (number, times, registered) in enumerate(one["places"]):
            nodes[number].uses.append((weight, DTYPES[one["dtype"]], one["trainable"], times))
            if registered:
                nodes[number].register_parameter(f"weight{index}_{place}", weight)
    return nodes, weights


def optimizer_over(description: Description, weights: list[nn.Parameter]) -> torch.optim.Optimizer | None:
    chosen = [w for w in weights if w.requires_grad or description["optimize"] == "all"]
    if not any(w.requires_grad for w in chosen):
        return None
    groups = [{"params": chosen}]
    if description["groups"]:
        groups = [{"params": chosen[::2], "weight_decay": 0.1}, {"params": chosen[1::2], "lr": 2e-3}]
    if description["optimizer"] == "sgd":
        return torch.optim.SGD(groups, lr=0.3, momentum=0.9)
    # a large eps: Adam divides a gradient by its own size, which turns rounding noise into steps
    return torch.optim.AdamW(groups, lr=1e-3, eps=1e-3)


# -- What is done with it -------------------------------------------------------------------------


class Session:
    """Plays a description's operations: with the engine on one rank's data, or in plain torch on all ranks'.

    `trace` has what can be seen on the way: a tensor, or one for each rank where the ranks' differ.
    """

    def __init__(self, description: Description, ranks: list[int], variant: dict[str, Any] | None) -> None:
        self.description, self.ranks, self.plain = description, ranks, variant is None
        self.nodes, self.weights = build(description, self.plain)
        self.model = self.nodes[0]
        self.optimizer = optimizer_over(description, self.weights)
        if variant is not None:
            units = variant["units"]
            zerostage.shard(
                self.model,
                self.optimizer,
                partition=Partition(*variant["partition"]),
                prefetch=variant["prefetch"],
                units=units if units is None else [self.nodes[number] for number in units],
            )
        self.trace: list[tuple[str, Any]] = []
        self.graphs: list[dict[int, torch.Tensor]] = []  # results that may still be differentiated
        self.local = False  # whether a backward's gradients wait for one outside no_sync
        self.recomputed = False  # whether a forward has been checkpointed
        self.steps = 0
        self.account: dict[str, Any] = {}

    def play(self) -> Session:
        for operation in self.description["operations"]:
            self.do(**operation)
        self.do("zero_grad")
        self.do("train")
        self.do("train")
        self.measured_step()
        self.do("state")
        return self

    def do(self, do: str, **details: Any) -> None:
        self.steps += 1
        getattr(self, do)(**details)

    def see(self, what: str, value: Any) -> None:
        self.trace.append((f"{what} (operation {self.steps})", value))

    def gathered(self, what: Any, write: bool = False) -> Any:
        return nullcontext() if self.plain else zerostage.gathered(what, write=write)

    def forward(
        self, path: Any = None, skip: Any = (), checkpointed: Any = (), reentrant: bool = False, mode: str = "train",
        input_grad: bool = False,
    ) -> None:  # fmt: skip
        blocks = len(self.model.parts)
        path = range(blocks) if path is None else [place % blocks for place in path if blocks]
        dtype = torch.float64 if all(p["dtype"] == "fp64" for p in self.description["params"]) else torch.float32
        context = {"train": nullcontext, "eval": torch.no_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
        self.model.train(mode != "eval")
        results = {}
        for rank in self.ranks:
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * self.steps + rank)).to(dtype)
            # a rank that uses none of the trained parameters must still have something to differentiate
            x.requires_grad_(input_grad or bool(skip))
            with context[mode]():
                checkpoints = checkpointed if mode == "train" else ()
                results[rank] = self.model(x, skip[rank] if skip else (), path, checkpoints, reentrant)
        self.model.train()
        self.see("output", {rank: y.detach().clone() for rank, y in results.items()})
        if mode == "train":
            self.graphs.append(results)
            self.recomputed |= bool(checkpointed)

    def loss_of_weights(self) -> None:
        """A loss made of the weights themselves."""
        results = {}
        with self.gathered(self.model):
            for rank in self.ranks:
                terms = [w.to(DTYPES[p["dtype"]]).double() for w, p in zip(self.weights, self.description["params"])]
                results[rank] = torch.stack([t.square().sum() / (t.numel() + 1) for t in terms])
        self.graphs.append(results)

    def backward(self, graphs: str = "last", retain: bool = False, sync: bool = True) -> None:
        chosen = {"first": self.graphs[:1], "last": self.graphs[-1:], "all": self.graphs[:]}[graphs]
        losses = [sum(graph[rank].square().mean() for graph in chosen) for rank in self.ranks]
        if not chosen or not losses[0].requires_grad:
            return
        had = [w for w in self.weights if w.grad is not None] if self.plain else []
        for weight in had:
            weight.grad.mul_(len(self.ranks))
        with nullcontext() if sync or self.plain else zerostage.no_sync(self.model):
            for loss in losses:
                loss.backward(retain_graph=retain)
        if self.plain:  # gradients are means over ranks
            for weight in self.weights:
                if weight.grad is not None:
                    weight.grad.div_(len(self.ranks))
        self.local = not sync
        if not retain:
            self.graphs = [graph for graph in self.graphs if all(graph is not one for one in chosen)]

    def clip(self, norm: float) -> None:
        if self.local:
            return
        if self.plain:
            self.see("norm", nn.utils.clip_grad_norm_(self.weights, norm).float())
        else:
            self.see("norm", zerostage.clip_grad_norm_(self.model, norm))

    def step(self) -> None:
        if self.local or self.optimizer is None:
            return
        self.optimizer.step()
        self.graphs = []  # made with weights that are no more

    def zero_grad(self, to_none: bool = True, by: str = "model") -> None:
        (self.optimizer or self.model if by == "optimizer" else self.model).zero_grad(set_to_none=to_none)
        self.local = self.local and not to_none

    def train(self) -> None:
        self.forward()
        self.backward()
        self.step()
        self.zero_grad()

    def drop(self, param: int) -> None:
        self.weights[param].grad = None

    def freeze(self, param: int) -> None:
        self.train_parameter(param, False)

    def unfreeze(self, param: int) -> None:
        one = self.description["params"][param]
        if DTYPES[one["dtype"]].is_floating_point and (one["trainable"] or UNFREEZE):
            self.train_parameter(param, True)

    def train_parameter(self, param: int, trained: bool) -> None:
        self.weights[param].requires_grad_(trained)
        if self.recomputed:  # torch refuses to recompute a forward that now saves other tensors
            self.graphs = []

    def read(self, param: int | None = None) -> None:
        with self.gathered(self.model if param is None else self.weights[param]):
            for index, weight in enumerate(self.weights):
                if param is None or param == index:
                    self.see(f"parameter {index}", weight.detach().clone())

    def write(self, param: int) -> None:
        weight, dtype = self.weights[param], DTYPES[self.description["params"][param]["dtype"]]
        with self.gathered(weight, write=True), torch.no_grad():
            weight.copy_(weight.to(dtype).div(2).to(dtype))
        self.graphs = []

    def state(self) -> None:
        state = self.model.state_dict() if self.plain else zerostage.full_state_dict(self.model, rank0_only=False)
        for name in sorted(state):
            self.see(name, state[name].clone())

    def measured_step(self) -> None:
        """One more step, and after it the accounts."""
        if self.plain:
            return self.train()
        traffic = zerostage.traffic(self.model)
        traffic.reset()
        self.forward()
        reduces = any(w.requires_grad for w in self.weights)
        complete = reduces and self.graphs[-1][self.ranks[0]].requires_grad
        self.backward()
        self.step()
        ledger = zerostage.memory(self.model, self.optimizer)
        sent = {name: traffic.bytes.get(name, 0) for name in traffic.expected()}
        expected, measured = dict(ledger.expected), dict(ledger.measured)
        self.account = {
            "idle": [measured.pop("gathered"), measured.pop("in_flight")],
            "bytes": (expected, measured) if complete else ({}, {}),
            "traffic": (traffic.expected(), sent) if complete else ({}, {}),
            "peak": (ledger.peak["engine"], ledger.peak["bound"]),
        }
        self.zero_grad()


# -- Comparing ------------------------------------------------------------------------------------


def played(rank: int, n: int, descriptions: list[Description]) -> list[tuple[list, list]]:
    """For each description the trace at stage 0, with which every variant's must agree bit for bit, and the accounts."""
    results = []
    for description in descriptions:
        reference, accounts = None, []
        for variant in [STAGE0, *description["variants"]]:
            session = Session(description, [rank], variant).play()
            reference = session.trace if reference is None else reference
            for (what, value), (_, expected) in zip(session.trace, reference, strict=True):
                assert same(value, expected), f"{what} with {variant} is not what it is at stage 0:\n{value}\n{expected}"
            accounts.append(session.account)
            zerostage.close(session.model)
        results.append((reference, accounts))
    return results


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(same(one[key], other[key]) for key in other)
    return torch.equal(one, other) and one.dtype == other.dtype


def check(n: int, descriptions: list[Description]) -> None:
    """Play descriptions for n ranks; raises AssertionError where an oracle disagrees, or a rank fails or hangs."""
    plain = [Session(description, list(range(n)), None).play() for description in descriptions]
    everyone = run(played, n=n, timeout=30 + 10 * len(descriptions), descriptions=descriptions)
    for number, (description, oracle) in enumerate(zip(descriptions, plain)):
        # fp32: the mean over ranks is summed in another order, and momentum adds that up over the steps. A 16-bit
        # gradient is rounded to 8 bits where the oracle keeps it in fp32.
        rough = any(DTYPES[p["dtype"]].itemsize == 2 and (p["trainable"] or UNFREEZE) for p in description["params"])
        tolerance = 0.05 if rough else 1e-5
        for rank, results in enumerate(everyone):
            trace, accounts = results[number]
            for (what, expected), (same_what, value) in zip(oracle.trace, trace, strict=True):
                assert what == same_what
                if isinstance(value, dict):
                    value, expected = value[rank], expected[rank]
                off = (value.double() - expected.double()).abs().max().item() if value.numel() else 0.0
                assert off <= tolerance * max(1.0, expected.double().abs().max().item() if value.numel() else 1.0), (
                    f"{what} on rank {rank} of {n} is off by {off} from plain torch in\n{description}"
                )
            for variant, account in zip([STAGE0, *description["variants"]], accounts):
                check_account(description, variant, oracle, account)


def check_account(description: Description, variant: dict[str, Any], oracle: Session, account: dict[str, Any]) -> None:
    where = f"{variant} in\n{description}"
    assert account["idle"] == [0, 0], f"bytes gathered and in flight at rest: {account['idle']} with {where}"
    expected, measured = account["bytes"]
    states = [w for w in oracle.weights if w in oracle.optimizer.state] if oracle.optimizer else []
    all_stepped = len(states) == sum(p["trainable"] for p in description["params"])
    all_stepped &= not any(one["do"] == "unfreeze" for one in description["operations"])  # what thaws may be in no group
    for term, size in measured.items():
        if all_stepped or term in ("weights", "gradients", "master", "buffers"):
            assert size == expected[term], f"{term}: {size} bytes, expected {expected[term]}, with {where}"
    holds = ("loss_of_weights", "read", "write", "state")  # what gathers or keeps more than a step does
    if not any(one["do"] in holds or not one.get("sync", True) for one in description["operations"]):
        assert account["peak"][0] <= account["peak"][1], f"peak and bound: {account['peak']} with {where}"
    expected, measured = account["traffic"]
    # a module that has a parameter and does not use it may be met once more in backward
    if all(times and registered for p in description["params"] for _, times, registered in p["places"]):
        assert measured == expected, f"sent {measured}, expected {expected}, with {where}"


def replay(description: Description) -> None:
    check(description["n"], [description])


# -- Random descriptions --------------------------------------------------------------------------

SIZES = st.sampled_from([1, 2, 3, 0, 5, 7, 16, 33, 64, 65, 130, 300])
SHAPES = st.lists(SIZES, max_size=3).filter(lambda shape: math.prod(shape) <= 400).map(tuple)
PALETTES = [["fp32"], ["fp32"], ["bf16"], ["fp64"], ["fp32", "bf16"], ["fp16"], ["fp32", "fp64", "bf16", "fp16"]]


def partitions(n: int) -> list[tuple[int, int, int]]:
    """Every partition that fits n ranks, the most divided first."""
    divisors = [d for d in range(n, 0, -1) if n % d == 0]
    return [(o, g, w) for o in divisors for g in divisors if o % g == 0 for w in divisors if g % w == 0]


@st.composite
def parameters(draw: Any, nodes: int, palette: list[str]) -> dict[str, Any]:
    trainable = draw(st.sampled_from([True, True, True, False]))
    place = st.integers(0, nodes - 1)
    places = [[draw(place), draw(st.sampled_from([1, 1, 1, 2, 0])), True]]
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        places.append([draw(place), draw(st.sampled_from([1, 1, 0, 2])), draw(st.booleans())])
    return {
        "shape": draw(SHAPES),
        "dtype": draw(st.sampled_from(palette if trainable else [*palette, "int64", "uint8"])),
        "trainable": trainable,
        "places": places,
    }


def phrases(n: int, params: int, nodes: list[int], reentrant: bool) -> st.SearchStrategy[tuple[dict[str, Any], ...]]:
    """A few operations that often follow one another."""

    def operation(do: str, **details: st.SearchStrategy) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({"do": st.just(do), **details})

    param = st.integers(0, params - 1)
    places = st.lists(st.integers(0, max(0, nodes.count(0) - 1)), max_size=4)
    some = st.lists(st.integers(1, max(1, len(nodes))), unique=True, max_size=3)
    # a parameter that reentrant checkpointing and something else use in one backward has two gradients, which all ranks
    # must reduce, so those that skip must not be without one of them
    skips = st.just([]) if reentrant else st.one_of(st.just([]), st.lists(some, min_size=n, max_size=n))
    forward = operation(
        "forward",
        path=st.one_of(st.none(), st.none(), st.none(), places),
        skip=skips,
        checkpointed=st.one_of(st.just([]), places),
        reentrant=st.just(reentrant),
        mode=st.sampled_from(["train", "train", "train", "no_grad", "inference", "eval"]),
        input_grad=st.booleans(),
    )
    backward = operation(
        "backward",
        graphs=st.sampled_from(["last", "all", "first"]),
        retain=st.sampled_from([False, False, True]),
        sync=st.sampled_from([True, True, False]),
    )
    zero = operation("zero_grad", to_none=st.booleans(), by=st.sampled_from(["model", "optimizer"]))
    clip, step = operation("clip", norm=st.sampled_from([0.01, 1e9])), operation("step")
    single = st.one_of(
        operation("drop", param=param),
        operation("freeze", param=param),
        operation("unfreeze", param=param),
        operation("read", param=st.one_of(st.none(), param)),
        operation("write", param=param),
        operation("state"),
        operation("loss_of_weights"),
    )
    return st.one_of(
        st.tuples(forward),
        st.tuples(forward, backward),
        st.tuples(forward, backward, step),
        st.tuples(forward, backward, clip, step, zero),
        st.tuples(forward, forward, backward, backward),
        st.tuples(single),
        st.tuples(forward, single, backward),
        st.tuples(forward, backward, single, step),
        st.tuples(st.one_of(backward, step, zero, clip)),
        st.tuples(operation("train")),
    )


def above(nodes: list[int], number: int) -> list[int]:
    """Node `number` and the nodes in which it lies, without the model."""
    return [number, *above(nodes, nodes[number - 1])] if number else []


@st.composite
def descriptions(draw: Any, n: int) -> Description:
    nodes = [draw(st.sampled_from([0, number // 2, number])) for number in range(draw(st.integers(0, 5)))]
    palette = draw(st.sampled_from(PALETTES))
    count = draw(st.integers(1, 6))
    params = draw(st.lists(parameters(len(nodes) + 1, palette), min_size=count, max_size=count))
    length = draw(st.integers(0, 6))
    sequence = draw(st.lists(phrases(n, len(params), nodes, draw(st.booleans())), min_size=length, max_size=length))
    units = st.one_of(st.none(), st.lists(st.integers(0, len(nodes)), unique=True, max_size=4))
    variants = st.fixed_dictionaries(
        {"partition": st.sampled_from(partitions(n)), "prefetch": st.integers(0, 2), "units": units}
    )
    operations = [one for phrase in sequence for one in phrase]
    # A rank must not skip a parameter that is used elsewhere, too, and so comes in another order on that rank.
    numbers = range(1, len(nodes) + 1)
    within = {number: {other for other in numbers if number in above(nodes, other)} for number in numbers}
    users = [{number for number, _, _ in p["places"]} for p in params]
    alone = {number for number, inside in within.items() if all(user <= inside or not user & inside for user in users)}
    skipped = any(any(one.get("skip", ())) for one in operations)
    frozen = not all(p["trainable"] for p in params) or any(one["do"] == "freeze" for one in operations)
    for one in operations:
        if one.get("skip"):
            one["skip"] = [[number for number in skips if number in alone] for skips in one["skip"]]
        if skipped and one.get("path"):  # nor can it follow a new order, or run a block again, where others do
            one["path"] = sorted(set(one["path"]))
        if skipped and frozen and one.get("graphs") == "all":  # frozen weights are gathered once for each forward in it
            one["graphs"] = "last"
    return {
        "n": n,
        "nodes": nodes,
        "lists": draw(st.booleans()),
        "params": params,
        "optimizer": draw(st.sampled_from(["sgd", "adamw"])),
        "optimize": draw(st.sampled_from(["trainable", "all"])),
        "groups": draw(st.booleans()),
        "variants": draw(st.lists(variants, min_size=1, max_size=2)),
        "operations": operations,
    }


BATCHES = st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(descriptions(n), min_size=1, max_size=8)))


@settings(
    max_examples=EXAMPLES or 20,
    derandomize=not EXAMPLES,
    phases=list(Phase) if EXAMPLES else [Phase.explicit, Phase.generate],  # shrinking takes long
    database=None,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
@given(BATCHES)
def test_any_model_partition_and_sequence(batch: tuple[int, list[Description]]) -> None:
    check(*batch)


# -- What was found -------------------------------------------------------------------------------


def described(params: list[dict[str, Any]], *operations: dict[str, Any], **rest: Any) -> Description:
    """A description with the usual values for what is not given: two ranks, stages 1 to 3, fp32, SGD."""
    defaults = {"shape": (5,), "dtype": "fp32", "trainable": True}
    variants = [{"partition": partition, "prefetch": 1, "units": None} for partition in partitions(2)]
    model = {"n": 2, "nodes": [0], "lists": False, "variants": variants}
    usual = {**model, "optimizer": "sgd", "optimize": "all", "groups": False}
    return {**usual, "params": [{**defaults, **one} for one in params], "operations": list(operations), **rest}


TRAIN, FORWARD, BACKWARD = {"do": "train"}, {"do": "forward"}, {"do": "backward"}
LOCALLY = {"do": "backward", "sync": False}
ROOT, CHILD = {"places": [[0, 1, True]]}, {"places": [[1, 1, True]]}


def test_found_a_rank_that_skips_all_modules_hands_its_input_back() -> None:
    replay(described([CHILD], {"do": "forward", "skip": [[1], []]}, BACKWARD))


@pytest.mark.parametrize(
    "operation", [{"do": "zero_grad", "to_none": False}, {"do": "drop", "param": 0}], ids=lambda operation: operation["do"]
)
def test_found_gradients_dropped_after_no_sync_stay_dropped(operation: dict[str, Any]) -> None:
    replay(described([CHILD, CHILD], FORWARD, BACKWARD, FORWARD, LOCALLY, operation, FORWARD, BACKWARD, {"do": "step"}))


def test_found_weights_frozen_after_shard_are_gathered_no_more_often() -> None:
    replay(described([ROOT, CHILD, CHILD], {"do": "freeze", "param": 1}))


def test_found_a_write_leaves_the_masters_of_its_neighbours() -> None:
    places = [{"dtype": "bf16", "places": [[node, 1, True]]} for node in (0, 1, 2)]
    places[0]["shape"] = (300,)  # so large that without units the others share one, with it
    variants = [{"partition": (2, 2, 2), "prefetch": 1, "units": []}]
    write = {"do": "write", "param": 1}
    replay(described(places, TRAIN, write, nodes=[0, 0], lists=True, variants=variants))


def test_found_gradients_of_no_sync_are_reduced_by_a_backward_that_has_none() -> None:
    frozen = {"do": "freeze", "param": 0}
    replay(described([ROOT], FORWARD, LOCALLY, frozen, {"do": "forward", "input_grad": True}, BACKWARD, {"do": "step"}))


def test_found_a_rank_that_skips_the_last_block_gathers_the_root_once() -> None:
    replay(described([ROOT, CHILD], TRAIN, {"do": "forward", "skip": [[1], []]}, BACKWARD, TRAIN))


def test_found_a_rank_that_skips_a_part_of_a_block_gathers_the_block_once() -> None:
    variants = [{"partition": (2, 2, 2), "prefetch": 1, "units": [1, 2]}]
    params = [{"places": [[number, 1, True]]} for number in (0, 1, 2)]
    skipping = {"do": "forward", "skip": [[2], []]}
    replay(described(params, TRAIN, TRAIN, skipping, BACKWARD, TRAIN, nodes=[0, 1], variants=variants))


def test_found_a_rank_that_skips_a_unit_within_a_unit_lets_the_others_gather_the_outer_one() -> None:
    inner = [{"places": [[1, 1, True]]}, {"places": [[2, 1, True]]}, {"places": [[3, 1, True]]}]
    variants = [{"partition": (2, 2, 2), "prefetch": prefetch, "units": [1, 2, 3]} for prefetch in (0, 1)]
    for skip in ([[], [2]], [[3], [1]], [[2], [3]], [[1], [2, 3]]):
        operations = [{"do": "forward", "skip": skip}, BACKWARD, {"do": "step"}, TRAIN]
        replay(described(inner, *operations, nodes=[0, 1, 0], variants=variants))


def test_found_a_rank_that_skips_units_within_one_another() -> None:
    params = [{"places": [[number, 1, True]]} for number in (1, 2, 3)]
    variants = [{"partition": (2, 2, 2), "prefetch": prefetch, "units": [1, 2, 3]} for prefetch in (0, 1, 2)]
    skipping = {"do": "forward", "skip": [[], [1]], "input_grad": True}
    replay(described(params, skipping, BACKWARD, TRAIN, skipping, BACKWARD, nodes=[0, 1, 2], variants=variants))
