"""DeepSpeed ZeRO as of 0.19: what a rank holds, and when.

Sources, in deepspeed/runtime: zero/stage_1_and_2.py, zero/stage3.py, zero/partition_parameters.py,
zero/partitioned_param_coordinator.py, bf16_optimizer.py, fp16/unfused_optimizer.py; defaults: zero/config.py.
"""

from __future__ import annotations

from zerostage.planning.memory.buffers import Buffers
from zerostage.planning.model.architecture import Unit, Weight

#: Elements, as in DeepSpeed's zero/config.py. A run's field of the same name replaces one.
DEFAULTS = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_param_persistence_threshold": 100_000,
}


class DeepSpeed(Buffers):
    """DeepSpeed's optimizers by stage.

    0: (FP16_UnfusedOptimizer) whole weights, masters, moments; gradients in the compute dtype, fp32 copies in the step.
    1, 2: (DeepSpeedZeroOptimizer) flat weights; a bucket of `reduce_bucket_size` elements (two with overlap_comm)
    lives during backward, as large as asked for whatever the model's size.
    1 with fp32 gradients: (BF16_Optimizer) a flat fp32 gradient of the whole model, always there.
    3: (DeepSpeedZeroOptimizer_Stage3) the bucket and the gradients' slices are always there; weights stay gathered
    where they are used again within stage3_max_reuse_distance, and are gathered ahead up to stage3_max_live_parameters.
    """

    kernel = "fused"

    def divide(self) -> tuple[Unit, ...]:
        """One unit a block, and one for each weight outside of blocks."""
        units: list[Unit] = []
        for unit in self.architecture.units:
            apart = [Unit(weight.name, (weight,), len(weight.names) > 1) for weight in unit.weights]
            units += [unit] if unit.name in self.architecture.block_names else apart
        return tuple(units)

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        p, run = self.partition, self.run
        self.stage = 3 if p.weights > 1 else 2 if p.gradients > 1 else 1 if p.optimizer > 1 else 0
        self.whole_fp32 = self.stage == 1 and self.c == 2 and self.g == 4 and run.offload == "none"  # BF16_Optimizer
        self.contiguous = run.contiguous_gradients is not False or run.offload != "none"
        self.buckets = 2 if run.overlap_comm and self.stage in (1, 2) else 1
        self.bucket = self.option("reduce_bucket_size")
        self.gradients_outlive_zero_grad = self.stage == 3
        self.trained = sum(self.padded(unit, True) for unit in self.units)
        self.largest = max((self.elements(w) for w in self.architecture.weights if w.trainable), default=0)
        self.filled = self.tensors = self.sent = self.loose = self.micro_batch = 0
        self.live: dict[str, int] = {}  # gathered weights: elements
        self.ahead: set[str] = set()  # gathered for a use that comes later
        self.flats: list[tuple[set[str], int, list[bool]]] = []  # gathered together: names to come, elements, whether copied out
        self.seen: list[Unit] = []
        self.backward = self.bucket_is_there = self.own_is_there = False

    def option(self, name: str) -> int:
        """Elements that the run gives, or DeepSpeed's default."""
        given = getattr(self.run, name)
        return DEFAULTS[name] if given is None else given

    def elements(self, weight: Weight) -> int:
        return weight.numel // self.run.tensor

    def persists(self, weight: Weight) -> bool:
        """Small weights are never taken apart (mark_persistent_parameters)."""
        return self.elements(weight) <= self.option("stage3_param_persistence_threshold")

    # At rest

    def sizes(self) -> dict[str, int]:
        found = super().sizes()
        n, offload = self.partition.optimizer, self.run.offload
        if offload == "optimizer+weights" and self.stage < 3:  # weights are offloaded at stage 3 only
            found["weights"] = sum(map(self.stored, self.units))
        if self.stage and not self.has_master:  # cloned, also in the weights' own dtype
            found["master"] = 0 if offload != "none" else self.trained * self.c // n
        if self.stage == 3:
            if offload != "none":
                found["gradients"] = 0
            if self.partition.weights != n:  # zero_hpz_partition_size: a second copy, divided within a node
                found["weights"] += found["weights"] * self.partition.weights // n
            small = sum(self.elements(w) for unit in self.units for w in unit.weights if self.persists(w))
            found["buffers"] = self.c * small + (self.c * self.bucket if self.contiguous else 0)
        elif self.stage:
            if self.stage == 2:  # stage 1 has all of them until the end of backward
                found["gradients"] = self.own_gradients()
            found["buffers"] = self.c * self.largest if offload != "none" else 0  # temp_grad_buffer_for_gpu_offload
        return found

    def own_gradients(self) -> int:
        """Bytes of the averaged gradients that a rank keeps at stages 1 and 2.

        In the weights' dtype they are of whole weights: all that reach into the slice. In fp32 they are the slice.
        """
        if self.whole_fp32:
            return 4 * self.trained
        if self.g > self.c:
            return self.g * self.trained // self.partition.optimizer
        if self.run.offload != "none":
            return 0
        slice_ = -(-self.trained // self.partition.optimizer)
        if self.architecture.family == "parameters":  # only their number is known
            return self.c * slice_
        held: dict[int, int] = {}
        start = 0
        for elements in (self.elements(w) for w in self.architecture.weights if w.trainable and w.numel):
            for rank in range(start // slice_, (start + elements - 1) // slice_ + 1):
                held[rank] = held.get(rank, 0) + elements
            start += elements
        return self.c * max(held.values(), default=0)

    def start(self) -> None:
        super().start()
        if self.stage == 3 or self.whole_fp32:
            self.track.change("gradients", self.sizes()["gradients"])

    # Gathering at stage 3: PartitionedParameterCoordinator, which works through modules; here through units

    def need(self, unit: Unit, following: list[Unit]) -> None:
        if self.stage < 3:
            return
        for weight in unit.weights:
            self._hold([weight])
            self._copy_out(weight.name)
            self.ahead.discard(weight.name)
        queue = [weight for later in following for weight in later.weights]
        if not self.backward:
            queue += [w for later in (*following[::-1], unit, *self.seen[::-1]) for w in later.weights[::-1]]
            self.seen.append(unit)
        for _ in unit.weights:  # each module gathers ahead when it is come to
            self._prefetch(queue)

    def _prefetch(self, queue: list[Weight]) -> None:
        room = self.option("stage3_max_live_parameters") - sum(self.live.values())
        room = min(room, self.option("stage3_prefetch_bucket_size"))
        taken: list[Weight] = []
        total = 0
        for weight in queue:
            if total >= room:
                break
            self.ahead.add(weight.name)
            if weight.name not in self.live and not self.persists(weight) and weight not in taken:
                taken.append(weight)
                total += self.elements(weight)
        self._hold(taken)

    def _hold(self, weights: list[Weight]) -> None:
        weights = [w for w in weights if w.name not in self.live and not self.persists(w)]
        elements = sum(map(self.elements, weights))
        self.live.update((weight.name, self.elements(weight)) for weight in weights)
        self.track.change("gathered", self.c * elements)
        if len(weights) > 1:  # one flat tensor; each weight is copied out of it when the first is used
            self.flats.append(({weight.name for weight in weights}, elements, [False]))

    def _copy_out(self, name: str) -> None:
        """The flat tensor stays until the last of its weights is used (AllGatherCoalescedHandle.wait)."""
        for names, elements, copied in self.flats:
            if name in names:
                if not copied[0]:
                    self.track.change("gathered", self.c * elements)
                    copied[0] = True
                names.discard(name)
                if not names:
                    self.track.change("gathered", -self.c * elements)
        self.flats = [flat for flat in self.flats if flat[0]]

    def _release(self, unit: Unit) -> None:
        for weight in unit.weights:
            if weight.name in self.live and weight.name not in self.ahead:
                self.track.change("gathered", -self.c * self.live.pop(weight.name))

    def leave(self, unit: Unit, last: bool) -> None:
        if self.stage < 3 or not last:
            return
        # elements from here to this unit's use in backward: those to come, and again on the way back
        visits = 2 if self.run.checkpointing == "none" else 3
        later = sum(map(self.elements, self.architecture.weights)) - sum(self.elements(w) for u in self.seen for w in u.weights)
        if visits * later >= self.option("stage3_max_reuse_distance"):
            self._release(unit)

    def end_forward(self) -> None:
        self.backward = True
        self.micro_batch += 1

    # Gradients: reduce_independent_p_g_buckets_and_remove_grads, reduce_ipg_grads

    def arrive(self, unit: Unit, elements: int) -> None:
        size = elements * self.c
        if self.stage in (1, 2) and not self.whole_fp32 and self.contiguous and not self.bucket_is_there:
            self.bucket_is_there = True
            self.track.change("reduce", self.buckets * self.bucket * (self.g if self.stage == 1 else self.c))
        if self.stage < 2:  # the gradients of autograd, or fp32 sums of them
            kept = elements * (self.c if self.stage == 0 or self.whole_fp32 else self.g)
            self.track.change("gradients", kept)
            self.track.change("gradients", -kept if self.micro_batch > 1 else 0)
        else:
            self.track.change("reduce", size)
            self._fill(elements, "reduce", size)

    def _fill(self, elements: int, term: str, size: int) -> None:
        """Put a gradient of `size` bytes of `term` into the bucket."""
        if self.filled and self.filled + elements > self.bucket:
            self._send()
        self.filled += elements
        self.tensors += 1
        if self.contiguous and self.filled <= self.bucket:
            self.track.change(term, -size)
        elif term == "reduce":
            self.loose += size  # goes when it has been sent

    def _send(self) -> None:
        """The bucket's contents are put together once more, unless they are one tensor.

        At stages 1 and 2 all that one rank gets is one tensor, but what is added into an fp32 slice is not.
        """
        itemsize = self.g if self.stage == 1 else self.c
        wide = self.g // self.partition.optimizer if self.stage == 3 and self.g != self.c else 0
        copy = self.filled * (itemsize + wide if self._pieces() > 1 else wide) if self.ranks > 1 else 0
        self.track.change("reduce", copy)
        self.track.change("reduce", -copy)
        if self.stage < 3 and not self.own_is_there:
            self.own_is_there = True
            # in the weights' dtype a second micro-batch's slice is made beside the first's, then added
            self.track.change("gradients" if self.micro_batch == 1 or self.stage == 1 else "reduce", self.own_gradients())
        self.track.change("reduce", -self.loose)
        self.filled = self.tensors = self.loose = 0

    def _pieces(self) -> int:
        if self.stage == 3 or self.g > self.c:
            return self.tensors
        slice_ = -(-self.trained // self.partition.optimizer)
        end, self.sent = self.trained - self.sent, self.sent + self.filled  # backward goes from the end to the start
        return max(1, (end - 1) // slice_ - max(0, end - self.filled) // slice_ + 1)

    def reduce(self, unit: Unit, following: list[Unit]) -> None:
        if self.stage == 3:
            self.ahead.difference_update(weight.name for weight in unit.weights)
            self._release(unit)

    def end_backward(self) -> None:
        last = self.micro_batch == self.run.accumulation
        if last and self.ranks > 1 and (self.stage == 0 or self.whole_fp32):  # buffered_allreduce_fallback
            copy = self.c * (min(self.trained, 500_000_000) if self.stage == 0 else self.trained)
            self.track.change("reduce", copy)
            self.track.change("reduce", -copy)
        if self.stage == 1 and last and not self.whole_fp32:
            missing = self.g * self.trained - self.track.now["gradients"]  # what no tape has, of biases and positions
            self.track.change("gradients", max(0, missing))
            for elements in (self.elements(w) for w in self.architecture.weights if w.trainable):
                self._fill(elements, "gradients", self.g * elements)
        if self.filled:
            self._send()
        if self.stage == 1 and last and not self.whole_fp32:
            self.track.change("gradients", self.own_gradients() - self.track.now["gradients"])
        if self.stage > 1 or last:
            self.track.change("reduce", -self.track.now["reduce"])
            self.bucket_is_there = False
        self.own_is_there = self.g > self.c and not last
        self.sent = 0
        self.track.change("gathered", -self.track.now["gathered"])
        for held in (self.live, self.ahead, self.flats, self.seen):
            held.clear()
        self.backward = False

    # The step

    def step(self) -> None:
        """Gradients become one flat tensor in the masters' dtype: whole (0), a slice (1, 2), or a sub-group's (3)."""
        n = self.partition.optimizer
        if self.stage and self.run.offload == "none" and not self.whole_fp32:  # norms of one gradient at a time, in fp64
            norm = 8 * (-(-self.largest // n) if self.stage == 3 else self.largest)
            self.track.change("optimizer_temporaries", norm)
            self.track.change("optimizer_temporaries", -norm)
        if self.run.offload == "none" and not self.whole_fp32:
            master = self.master if self.has_master else self.c
            elements = self._sub_group() if self.stage == 3 else self.trained // n
            flat = 0 if self.stage == 0 or (self.stage < 3 and self.g > self.c) else elements * self.g
            wide = elements * master if master != self.g else 0
            self.track.change("optimizer_temporaries", flat + wide)
            self.track.change("optimizer_temporaries", -flat if wide else 0)
            if self.stage < 3 and (flat or wide):
                self.track.change("gradients", -self.track.now["gradients"])
        super().step()
        self.track.change("optimizer_temporaries", -self.track.now["optimizer_temporaries"])
        self.micro_batch = 0

    def _sub_group(self) -> int:
        """Elements of a rank's largest sub-group: whole slices up to or just over sub_group_size."""
        limit, largest, now = self.option("sub_group_size"), 0, 0
        for weight in (w for w in self.architecture.weights if w.trainable):
            now += -(-self.elements(weight) // self.partition.optimizer)
            largest = max(largest, now)
            now = 0 if now >= limit else now
        return largest

    def zero_grad(self) -> None:
        if self.whole_fp32:
            self.track.change("gradients", 4 * self.trained - self.track.now["gradients"])
        elif self.stage != 3:
            super().zero_grad()
