"""An exponential moving average of the weights, of which each rank keeps the part that its optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from zerostage.autograd import not_compiled
from zerostage.collectives import Pending, piece_size, proceed
from zerostage.engine import require
from zerostage.flat import Flat
from zerostage.layout import Slot
from zerostage.unit import State


class EMA:
    """average = decay * average + (1 - decay) * weight, for the trainable parameters of a sharded model.

    It starts at the weights' present values. Where they have masters it is those that are
    averaged, in the masters' dtype, at least fp32: at stages 1 to 3 4/n bytes per parameter
    and rank. Frozen parameters and buffers (BatchNorm's statistics) are not averaged; a
    parameter that becomes trainable later starts at its value then. `decay`, from 0 to
    less than 1, may be changed at any time; every rank must have the same.

        ema = zerostage.EMA(model, 0.999)
        ...
        optimizer.step(); ema.update()
        ...
        with ema.applied():
            evaluate(model); zerostage.save_weights(model, folder)

    Raises ValueError for a model that is not sharded or a decay out of range, RuntimeError
    for a model that was built on the meta device and has no values yet.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999) -> None:
        engine = require(model)
        if not 0 <= decay < 1:
            raise ValueError(f"decay is {decay!r}; it must be 0 or more and less than 1, such as 0.999")
        if engine.missing:
            raise RuntimeError(
                f"'{min(engine.missing)}' has no values to average yet: call zerostage.load_weights(model, folder) before "
                "zerostage.EMA(model)"
            )
        engine.schedule.refuse_averaged("zerostage.EMA(model)")
        self._engine, self.decay = engine, decay
        self._averages: dict[Flat, torch.Tensor] = {}  # by flat, this rank's optimizer slice
        self.follow()
        engine.averages[max(engine.averages, default=-1) + 1] = self

    def follow(self) -> dict[Flat, torch.Tensor]:
        """The averages of the flats that are trainable now. One that is new starts at its present master."""
        known, self._averages = self._averages, {}
        with torch.inference_mode(False):  # what an evaluation makes must take updates afterwards
            for flat in self._engine.flats:
                if flat.trainable:
                    flat.absorb_changes()
                    if flat not in known:
                        known[flat] = flat.master.to(torch.promote_types(flat.master_dtype, torch.float32), copy=True)
                    self._averages[flat] = known[flat]
        return self._averages

    def tensors(self) -> list[torch.Tensor]:
        """What this rank keeps: one-dimensional, one for each flat."""
        return list(self._averages.values())

    @not_compiled
    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the present weights; after each `optimizer.step()`. No communication.

        Also after a step that was skipped, whose weights then count once more, as in
        torch.optim.swa_utils. To leave them out: `if not optimizer.skipped: ema.update()`.
        """
        self._engine.schedule.refuse_averaged("ema.update()")
        for flat, average in self.follow().items():
            size = piece_size(flat.device)
            for piece, master in zip(average.split(size), flat.master.split(size)):
                # multiplied and added one after the other: a fused kernel may round its last elements otherwise
                piece.mul_(self.decay).add_(master.to(piece.dtype) * (1 - self.decay))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights inside the block, rounded to the weights' dtype.

        Every rank must enter it alike. Forward, `generate`, `full_state_dict`, `save_weights` and `gathered` see them. The
        trained weights, of which a copy of this rank's part is kept meanwhile, are back
        after the block, bit for bit, also after an exception; the masters are not touched.
        Entering sends what a step sends of updated weights, leaving sends nothing.

        What would change the weights (optimizer.step(), gathered(write=True), load_weights,
        load_state_dict, another `applied`) raises RuntimeError inside. So does a backward of
        a graph that was made on the other side of the block's begin or end.
        """
        schedule = self._engine.schedule
        schedule.refuse_averaged("a second ema.applied()")
        schedule.settle()
        for unit in self._engine.units:
            if unit.divided and unit.state is not State.AT_REST:
                raise RuntimeError(f"ema.applied() within `gathered` or a forward of {unit.name}: leave that first")
        averages = self.follow()
        try:
            for flat in averages:
                flat.set_aside()
            sending: list[tuple[Iterator[Pending], Pending]] = []
            for flat, average in averages.items():
                sending = proceed(sending) + proceed([(flat.show(average), Pending())])
            while sending:
                sending = proceed(sending)
            yield
            _refuse_lost_changes(averages)
        finally:
            for flat in averages:
                flat.put_back()

    def _parts(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Each averaged parameter of which this rank has a part, and that part's average."""
        for flat, average in self.follow().items():
            base = flat.bounds[3][0]
            for index, start, stop in flat.layout.segments(*flat.bounds[3]):
                yield flat.layout.slots[index], average[start - base : stop - base]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's parts of the averages by parameter name: one-dimensional, padded like `optimizer.state`.

        Not copies. For this rank at the same partition and number of ranks; whole averages
        are what `full_state_dict` and `save_weights` give within `applied`.
        """
        return {slot.name: part for slot, part in self._parts()}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take over what `state_dict` gave on this rank.

        Raises KeyError for a parameter too few or too many and ValueError for a part of
        another length, naming the parameter; then nothing has changed.
        """
        parts = {slot.name: part for slot, part in self._parts()}
        rank = f"rank {self._engine.world.rank}"
        hint = "the state is another rank's or another model's, or was saved at another partition or number of ranks"
        for name in parts.keys() ^ state.keys():
            found = "the state to load lacks it" if name in parts else "the state to load has it"
            belongs = "averages a part of it" if name in parts else "averages no part of it"
            raise KeyError(f"ema.load_state_dict: '{name}': {rank} {belongs}, {found}; {hint}")
        for name, part in parts.items():
            if state[name].shape != part.shape:
                raise ValueError(
                    f"ema.load_state_dict: '{name}' has shape {tuple(state[name].shape)} in the state to load, "
                    f"{rank}'s part has {tuple(part.shape)}; {hint}"
                )
        for name, part in parts.items():
            part.copy_(state[name])


def _refuse_lost_changes(flats: dict[Flat, torch.Tensor]) -> None:
    for flat in flats:
        written = [] if flat.divided else [index for index in flat.changed() if index not in flat.exposed]
        if written:
            raise RuntimeError(
                f"'{flat.layout.slots[written[0]].name}' was changed within ema.applied(), where changes are lost; "
                "change it outside the block"
            )
