"""What other engines hold, and when: each follows its engine's source."""

from __future__ import annotations

from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.memory.deepspeed import DeepSpeed
from zerostage.planning.memory.megatron import Megatron
from zerostage.planning.memory.zerostage import Zerostage
from zerostage.planning.model.architecture import Unit
from zerostage.planning.run import ITEMSIZE


class FSDP(Buffers):
    """What both have in common: blocks and a root, shards in the masters' dtype, and which units are gathered."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.reshards = self.partition.weights > 1
        self.held: set[str] = set()
        self.backward = False

    def divide(self) -> tuple[Unit, ...]:
        return self.architecture.blocks_and_root

    def gradient_itemsize(self) -> int:
        return self.master

    def arrive(self, unit: Unit, elements: int) -> None:
        self.add(unit, elements * self.c)

    def _release(self, unit: Unit) -> None:
        if unit.name in self.held:
            self.held.discard(unit.name)
            self.track.change("gathered", -self.whole(unit))


class FSDP2(FSDP):
    """torch.distributed.fsdp.fully_shard with a MixedPrecisionPolicy (`_fsdp_param_group.py`, `_fsdp_collectives.py`).

    Shards are kept in the masters' dtype only. A gather is an all-gather buffer and the weights that are copied out of
    it; the buffer stays until the next unit's is there. Gradients are copied into the reduce-scatter's input, which
    stays until the next unit's; its result, a slice, becomes the kept gradient. The root is kept after forward. Stage 2
    is reshard_after_forward=False.
    """

    stages = (2, 3, None)

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.gather_buffer = self.reduce_input = 0
        self.ahead: Unit | None = None  # the unit whose gather is under way
        wide = self.run.fp32_reduce if self.run.fp32_reduce is not None else self.g == 4
        self.reduce_itemsize = 4 if wide else self.c

    def sizes(self) -> dict[str, int]:
        """All terms are divided alike, at stage 2 too; weights are kept as masters."""
        found = super().sizes()
        if self.has_master:
            found["weights"] = sum(self.stored(u) for u in self.units if not self.padded(u, True)) // self.partition.optimizer
        else:
            found["weights"] = sum(self.stored(u) for u in self.units) // self.partition.optimizer
        return found

    def need(self, unit: Unit, following: list[Unit]) -> None:
        """Forward frees a gather's buffer at the next gather, backward at once; it gathers the next block ahead."""
        if unit.name in self.held:
            return
        if self.ahead is not unit:
            self._gather(unit)
        self.held.add(unit.name)
        self.track.change("gathered", self.whole(unit))
        if self.backward:
            self.track.change("gathered", -self.gather_buffer)
            self.gather_buffer = 0
            self.ahead = next((u for u in following if not u.resident and u.name not in self.held), None)
            if self.ahead is not None:
                self._gather(self.ahead)

    def _gather(self, unit: Unit) -> None:
        """The shards, cast, and the buffer into which they are gathered."""
        shard = self.whole(unit) // self.partition.optimizer if self.has_master else 0
        self.track.change("gathered", self.whole(unit) + shard)
        self.track.change("gathered", -shard - self.gather_buffer)
        self.gather_buffer = self.whole(unit)

    def leave(self, unit: Unit, last: bool) -> None:
        blocks = [u for u in self.units if not u.resident]
        kept = self.run.implementation == "torchtitan" and unit is blocks[-1]  # its apply_fsdp leaves the last block gathered
        if self.reshards and not unit.resident and not kept:
            self._release(unit)

    def end_forward(self) -> None:
        self.track.change("gathered", -self.gather_buffer)
        self.gather_buffer = 0
        self.backward = True

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        elements = self.padded(unit, True)
        self.complete(unit)
        self._release(unit)
        if not elements:
            return
        if not self.reduces:  # kept whole, in the dtype of the reduction
            self.keep(unit, elements * self.reduce_itemsize)
            self.track.change("reduce", -elements * self.c)
            return
        self.track.change("reduce", -self.reduce_input)
        self.reduce_input = elements * self.reduce_itemsize
        self.track.change("reduce", self.reduce_input)
        self.track.change("reduce", -elements * self.c)
        n = self.partition.optimizer
        self.track.change("reduce", elements * self.reduce_itemsize // n)
        self.keep(unit, elements * self.g // n)
        self.track.change("reduce", -(elements * self.reduce_itemsize // n))

    def end_backward(self) -> None:
        self.track.change("reduce", -self.track.now["reduce"])
        self.track.change("gathered", -self.track.now["gathered"])
        self.gather_buffer = self.reduce_input = 0
        self.backward, self.ahead = False, None
        self.held.clear()


class FSDP1(FSDP):
    """torch.distributed.fsdp.FullyShardedDataParallel with mixed precision (`_flat_param.py`, `_runtime_utils.py`).

    A unit is one flat parameter, kept as a shard in the masters' dtype. A gather casts the shard and gathers it into
    one buffer; the rate limiter lets two units be there. Backward gathers the next unit before it comes to it. The
    gradient of the views is put together into one flat gradient, sent padded, and its shard cast to the masters'
    dtype. SHARD_GRAD_OP (stage 2) keeps units gathered from forward to backward.
    """

    stages = (0, 2, 3, None)
    #: zero_grad lets go of the original parameters' views; the flat gradient goes in `_reset_flat_param_grad_info_if_needed`.
    gradients_outlive_zero_grad = True
    pending_units = 2  # the rate limiter's

    def sizes(self) -> dict[str, int]:
        found = super().sizes()
        found["weights"] = 0 if self.has_master else sum(map(self.stored, self.units)) // self.partition.optimizer
        return found

    def need(self, unit: Unit, following: list[Unit]) -> None:
        self._gather(unit)
        if self.backward and following and not unit.resident:
            self._gather(following[0])

    def _gather(self, unit: Unit) -> None:
        if unit.name not in self.held:
            self.held.add(unit.name)
            self.track.change("gathered", self.whole(unit))

    def leave(self, unit: Unit, last: bool) -> None:
        if self.reshards and not unit.resident:
            self._release(unit)

    def end_forward(self) -> None:
        self.backward = True

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        self._release(unit)
        self.complete(unit)
        elements, n = self.padded(unit, True), self.partition.optimizer
        self.track.change("reduce", elements * self.c)  # put together, beside the parts
        self.track.change("reduce", -elements * self.c)
        if not self.reduces:  # the flat gradient stays
            self.keep(unit, elements * self.c)
            self.track.change("reduce", -elements * self.c)
            return
        self.track.change("reduce", elements * self.c // n)
        self.keep(unit, elements * self.g // n)
        self.track.change("reduce", -(elements * self.c // n) - elements * self.c)

    def end_backward(self) -> None:
        self.backward = False
        for unit in self.units:
            self._release(unit)
        self.track.change("reduce", -self.track.now["reduce"])


class DDP(Buffers):
    """DistributedDataParallel: whole weights and gradients, and buckets of the gradients' size beside them (reducer.cpp).

    Stage 1 is ZeroRedundancyOptimizer. Mixed precision is torch.autocast, which casts the weights of matrix products
    once a forward (cached_cast in autocast_mode.cpp); autograd keeps the casts for backward, and checkpointing does not.
    """

    stages = (0, 1)

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.cast: dict[str, int] = {}  # bytes of the casts that are there, by unit
        self.there: set[str] = set()  # units whose gradients are there

    def gradient_itemsize(self) -> int:
        return self.master

    def sizes(self) -> dict[str, int]:
        found = super().sizes()
        if self.has_master:
            whole = ITEMSIZE["fp32"] * sum(self.padded(unit, True) for unit in self.units)
            found["weights"], found["master"] = 0, 0 if self.run.offload == "optimizer+weights" else whole
        return found

    def buffers(self) -> int:
        return sum(self.padded(unit, True) for unit in self.units) * self.g if self.ranks > 1 else 0

    def need(self, unit: Unit, following: list[Unit]) -> None:
        if self.run.autocast and unit.name not in self.cast:
            table = self.architecture.weights[0]
            used = [w for w in unit.weights if len(w.shape) > 1 and (w is not table or self.architecture.tied)]
            self.cast[unit.name] = self.c * sum(w.numel for w in used)
            self.track.change("gathered", self.cast[unit.name])

    def end_forward(self) -> None:
        if self.run.checkpointing != "none":
            self._drop(*self.cast)

    def _drop(self, *names: str) -> None:
        for name in names:
            self.track.change("gathered", -self.cast.pop(name, 0))

    def arrive(self, unit: Unit, elements: int) -> None:
        if not self.run.bucket_view or self.ranks == 1:
            if unit.name in self.there:
                self.track.change("gradients", elements * self.g)  # added to what is there
                self.track.change("gradients", -elements * self.g)
            else:
                self.track.change("gradients", elements * self.g)

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        self._drop(unit.name)
        self.there.add(unit.name)

    def end_backward(self) -> None:
        self._drop(*self.cast)

    def zero_grad(self) -> None:
        super().zero_grad()
        self.there.clear()


BUFFERS = {
    "zerostage": Zerostage, "fsdp2": FSDP2, "fsdp1": FSDP1, "deepspeed": DeepSpeed, "ddp": DDP, "megatron": Megatron,
}  # fmt: skip
