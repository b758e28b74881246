"""The cards and machines that a plan is made for. Facts only: no torch, nothing is looked up on this machine.

Peaks are dense bf16 (fp16 on cards without bf16). `reached` is the best matrix product measured on the card, by the
accelerator chapter of S. Bekman's ml-engineering ("maximum achievable matmul FLOPS"); memory sizes that torch can have
are `torch.cuda.get_device_properties(0).total_memory` as training logs print them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zerostage.mistakes import InputError, closest
from zerostage.planning.timing.network import Calibrated, Network, parse

GIB = 2**30
#: How much of the card a plan fills. torch's allocator cannot use all of it: blocks that were cut for one size stay where
#: they are while a neighbour lives, and it takes memory from the driver in pieces of 2 MiB to 20 MiB and more.
FILL = 0.95
#: Of a card's memory bandwidth, what streaming kernels reach (BabelStream's triad: 1.8 of 2.0 TB/s on A100, 3.0 of
#: 3.35 on H100; PyTorch's elementwise kernels are a little below it).
MEMORY_REACHED = 0.85


@dataclass(frozen=True)
class Card:
    """One accelerator. Rates are per second, sizes in bytes; a link is one way."""

    name: str
    flops_peak: float
    flops_reached: float | None
    memory_bytes: int  # as its name says: GB = 1e9 bytes
    usable_bytes: int  # what torch reports in all
    bandwidth: float
    link_bytes_per_s: float
    processors: int  # streaming multiprocessors (AMD: compute units)
    attention: float  # share of the peak that a flash-attention forward reaches
    bf16: bool = True

    @property
    def context_bytes(self) -> int:
        """What CUDA's context and NCCL take outside torch: 0.5 GiB, and as much again for NCCL's channels on NVLink."""
        return GIB if self.link_bytes_per_s >= 100e9 else GIB // 2

    def left(self, allocated: int) -> int:
        """Bytes of what a plan fills that are left beside the context and so many allocated ones; negative: they do not fit."""
        return int(FILL * self.usable_bytes) - allocated - self.context_bytes

    @property
    def flops(self) -> float:
        """FLOP/s that a plan counts on for large products: the measured best, but at most 80% of the peak.

        The best of a sweep over shapes is more than the shapes of a model get; 80% is also what is assumed where nobody
        has measured (the cards that were measured lie between 51% and 87%).
        """
        return min(self.flops_reached or self.flops_peak, 0.8 * self.flops_peak)


# Flash attention's share of the peak, forward, causal, head size 128. FlashAttention-2 (Dao 2023, figures 4 and 5)
# reaches 180 to 200 of 312 TFLOP/s on an A100; on Hopper the same kernels, which torch's SDPA runs, reach 35% of the
# peak (Shah et al. 2024, "FlashAttention-3", section 1); the kernels for Blackwell in use are no closer to its peak.
_AMPERE, _HOPPER = 0.6, 0.35


def _card(
    name: str,
    peak: float,
    reached: float | None,
    memory: float,
    usable: float,
    bandwidth: float,
    link: float,
    processors: int,
    attention: float = _AMPERE,
    bf16: bool = True,
) -> Card:
    """From the units of data sheets: TFLOP/s, GB, GiB, TB/s, GB/s."""
    return Card(
        name, peak * 1e12, reached and reached * 1e12, round(memory * 1e9), round(usable * GIB), bandwidth * 1e12,
        link * 1e9, processors, attention, bf16,
    )  # fmt: skip


# Name, TFLOP/s peak and reached, memory GB and usable GiB, TB/s, link GB/s one way, processors.
#
# H100-96 is the 500 W version with HBM2e (2.4 TB/s) that torchtitan's published runs used. Products on a 700 W H100
# are limited by power, not by its clock (795 of 989 TFLOP/s is a clock of 1.4 of 1.75 GHz). About 200 W of a busy card
# do not depend on the clock of the tensor cores (leakage, HBM, links), and below 1.4 GHz the voltage is at its
# floor, so that the rest is proportional to the clock: 795 x (500 - 200) / (700 - 200) = 477 TFLOP/s.
# A check that is not a step time: torchtitan gains 0.36 s of 1.23 s a step by fp8 products (its paper's 6,674 and 9,409
# tokens/s/GPU), which puts its bf16 products between 420 and 480 TFLOP/s.
CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        _card("A100-80", 312, 271, 80, 79.15, 2.0, 300, 108),
        _card("A100-40", 312, 271, 40, 39.4, 1.56, 300, 108),
        _card("A100-PCIe-80", 312, 253, 80, 79.15, 1.94, 31, 108),
        _card("A100-PCIe-40", 312, 253, 40, 39.4, 1.56, 31, 108),
        _card("H100-80", 989, 795, 80, 79.1, 3.35, 450, 132, _HOPPER),
        _card("H100-96", 989, 477, 96, 95.0, 2.4, 450, 132, _HOPPER),
        _card("H100-PCIe-80", 756, None, 80, 79.1, 2.0, 63, 114, _HOPPER),
        _card("H100-NVL-94", 835, None, 94, 93.0, 3.9, 63, 132, _HOPPER),
        _card("H200-141", 989, 795, 141, 139.8, 4.8, 450, 132, _HOPPER),
        _card("GH200-96", 989, 795, 96, 94.5, 4.0, 450, 132, _HOPPER),
        _card("B200-180", 2250, 1745, 180, 178.3, 8.0, 900, 148, _HOPPER),
        _card("GB200-186", 2500, 1822, 186, 184.3, 8.0, 900, 148, _HOPPER),
        _card("H800-80", 989, None, 80, 79.1, 3.35, 200, 132, _HOPPER),
        _card("A800-80", 312, None, 80, 79.15, 2.0, 200, 108),
        _card("H20-96", 148, None, 96, 95.0, 4.0, 450, 78),
        _card("MI300X-192", 1300, 668, 192, 191.5, 5.3, 448, 304, 0.25),
        _card("V100-32", 125, None, 32, 31.7, 0.9, 150, 80, 0.4, bf16=False),
        _card("V100-16", 125, None, 16, 15.8, 0.9, 150, 80, 0.4, bf16=False),
        _card("L40S-48", 362, None, 48, 44.4, 0.86, 31, 142),
        _card("A10G-24", 70, None, 24, 22.0, 0.6, 31, 80),
        _card("L40-48", 181, None, 48, 44.4, 0.86, 31, 142),
        _card("A10-24", 125, None, 24, 22.0, 0.6, 31, 72),
        _card("A40-48", 150, None, 48, 44.4, 0.7, 31, 84),
        _card("L4-24", 121, None, 24, 22.0, 0.3, 31, 58),
        _card("A6000-48", 155, None, 48, 47.5, 0.77, 31, 84),
        _card("T4-16", 65, None, 16, 14.6, 0.32, 15, 40, 0.4, bf16=False),
        _card("RTX6000-Ada-48", 364, None, 48, 47.4, 0.96, 31, 142),
        _card("RTX3090-24", 71, None, 24, 23.5, 0.94, 31, 82),
        _card("RTX4090-24", 165, None, 24, 23.5, 1.0, 31, 128),
        _card("RTX5090-32", 210, None, 32, 31.3, 1.79, 63, 170),
    )
}

_VENDORS = re.compile(r"nvidia|amd|instinct|geforce|rtx|tesla|quadro|generation")
_BASES = sorted({re.sub("^rtx", "", name.lower().split("-")[0]) for name in CARDS}, key=len, reverse=True)
_REST = re.compile(r"sxm\d?|dgxs|hbm\d?e?|nvl\d*|oam|vram|\d+w|pcie|ada|\d+(gb|gib|g)?")


def card(name: str) -> Card:
    """The card that `name` means: 'h100', 'H100-SXM', 'a100-40', 'NVIDIA A100-SXM4-80GB', 'rtx4090', '4090'.

    Without a memory size the largest that is common is taken (A100: 80 GB, H100: 80 GB). Raises InputError with the
    nearest known name.
    """
    if not isinstance(name, str):
        raise InputError(f"{name!r} is no card: give its name, for example h100")
    text = re.sub(r"[^a-z0-9.]+", " ", _VENDORS.sub(" ", name.lower())).strip()
    base = next((base for base in _BASES if re.match(rf"{re.escape(base)}(?!\d)", text)), None)
    parts = text[len(base) :].split() if base else []
    if base is None or not all(re.fullmatch(f"(?:{_REST.pattern})+", part) for part in parts):
        raise InputError(f"unknown card {name!r}{closest(name.upper(), CARDS)}; known: {', '.join(CARDS)}")
    variant = {word for word in ("pcie", "nvl") if any(re.search(rf"{word}(?!\d)", part) for part in parts)}
    sizes = [
        int(size) for part in parts for size in re.findall(r"(?<![a-z0-9])(\d+)(?!\d*w)", re.sub(r"sxm\d?|hbm\d?e?", " ", part))
    ]
    sizes = [] if base == "gh200" else sizes  # its driver's name counts the memory of the CPU: 'GH200 480GB'
    same = [known for known in CARDS.values() if re.sub("^rtx", "", known.name.lower().split("-")[0]) == base]
    same = [known for known in same if {word for word in ("pcie", "nvl") if word in known.name.lower()} == variant] or same
    if not sizes:
        return same[0]
    match = [known for known in same if abs(known.memory_bytes / 1e9 - sizes[0]) <= 0.05 * sizes[0]]
    if not match:
        raise InputError(f"no {base.upper()} with {sizes[0]} GB is known; known: {', '.join(known.name for known in same)}")
    return match[0]


@dataclass(frozen=True)
class Machine:
    """`nodes` equal nodes of `gpus_per_node` cards. The network is one way and of a whole node (all its NICs)."""

    card: Card
    nodes: int = 1
    gpus_per_node: int = 8
    network: Network | None = None  # None: one node
    measured: Calibrated | None = None
    assumed: tuple[str, ...] = field(default=())

    @property
    def ranks(self) -> int:
        return self.nodes * self.gpus_per_node

    def with_ranks(self, ranks: int) -> Machine:
        """As many of the same nodes as `ranks` cards need, or a part of one; a network is assumed where there was none."""
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise InputError(f"ranks is {ranks!r}; it must be a whole number, 1 or more")
        each = next(n for n in range(min(ranks, self.gpus_per_node), 0, -1) if ranks % n == 0)
        assumed, network = list(self.assumed), self.network
        if ranks > each and network is None:
            network = usual_network(self.card, self.gpus_per_node, assumed)
        return replace(self, nodes=ranks // each, gpus_per_node=each, network=network, assumed=tuple(assumed))

    def describe(self) -> dict[str, Any]:
        """For the answer: GB/s are 1e9 bytes per second one way, a network's of a whole node."""
        return {
            "gpu": self.card.name, "nodes": self.nodes, "gpus_per_node": self.gpus_per_node, "ranks": self.ranks,
            "usable_bytes": self.card.usable_bytes,
            "context_bytes": self.card.context_bytes, "peak_tflops": self.card.flops_peak / 1e12,
            "planned_tflops": self.card.flops / 1e12, "memory_gb_s": self.card.bandwidth / 1e9,
            "link_gb_s": self.card.link_bytes_per_s / 1e9,
            "network_gb_s": self.network.bytes_per_s / 1e9 if self.network else None,
            "measured": self.measured is not None,
        }  # fmt: skip

    @property
    def critical_tokens(self) -> float | None:
        """Tokens of one rank's micro-batch below which stage 3 waits for the network, without recomputation.

        Compute takes 6 N T / F, three model sizes of bf16 take 6 N / B: they are equal at T = F / B, whatever N is.
        With full recomputation compute is 8 N T / F and T is 0.75 F / B. None on one node.
        """
        return self.card.flops / self.network.bytes_per_s if self.network and self.nodes > 1 else None

    def check(self, dtype: str) -> Machine:
        """Return self, or raise InputError where the card cannot compute in `dtype` ('bf16', 'fp16' or 'fp32')."""
        if dtype == "bf16" and not self.card.bf16:
            raise InputError(f"{self.card.name} has no bf16: compute in fp16 (with loss scaling) or fp32")
        return self

    @classmethod
    def from_calibration(cls, path: str | Path, nodes: int | None = None, network: str | None = None) -> Machine:
        """The machine that `zerostage calibrate` measured; see `network.Calibrated` for the collectives in the file.

        Keys: version (1), device, memory_bytes, flops_reached, world, ranks_per_node, collectives, and, where measured,
        memory_bytes_per_s. nodes, network: other than were measured. Raises InputError for a file that is not one.
        """
        try:
            data = json.loads(Path(path).read_text())
            missing = {"version", "device", "memory_bytes", "flops_reached", "world", "ranks_per_node", "collectives"} - set(data)
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"{path} cannot be read as a calibration: {error}; write one with `zerostage calibrate`") from None
        if missing or data["version"] != 1:
            what = f"lacks {', '.join(sorted(missing))}" if missing else f"has version {data['version']}, not 1"
            raise InputError(f"{path} {what}; write it again with `zerostage calibrate`")
        numbers = ("flops_reached", "memory_bytes", "ranks_per_node", "world")
        if not all(isinstance(data[key], (int, float)) and data[key] > 0 for key in numbers):
            raise InputError(f"{path}: {', '.join(numbers)} must be numbers above 0; write it again with `zerostage calibrate`")
        flops, memory, per_node = float(data["flops_reached"]), int(data["memory_bytes"]), int(data["ranks_per_node"])
        assumed = [f"speeds measured in {path}"]
        bandwidth = float(data.get("memory_bytes_per_s") or 0) / MEMORY_REACHED
        try:
            known = card(data["device"])
        except InputError:  # a CPU, or a card that is not in the table
            assumed.append(f"{data['device']} is not in the table of cards: its peak is taken as 1.25 times the measured FLOP/s")
            known = Card(data["device"], 1.25 * flops, flops, memory, memory, bandwidth or flops / 150, 10e9, 1, 0.5)
        known = replace(
            known, flops_reached=flops, flops_peak=max(1.25 * flops, known.flops_peak), usable_bytes=memory,
            bandwidth=bandwidth or known.bandwidth,
        )  # fmt: skip
        measured = Calibrated.from_data(data)
        count = nodes or max(1, int(data["world"]) // per_node)
        link = None
        if count > 1:
            link = (
                parse(network, per_node) if network else measured.network(across=True) or usual_network(known, per_node, assumed)
            )
        return cls(known, count, per_node, link, measured, tuple(assumed))


def usual_network(known: Card, gpus_per_node: int, assumed: list[str]) -> Network:
    """What nodes of such cards are usually sold with: one 400 or 200 Gb port a card, or 100 GbE a node. Notes that."""
    port = "400Gb" if known.link_bytes_per_s >= 400e9 else "200Gb" if known.link_bytes_per_s >= 150e9 else None
    link = parse(f"{gpus_per_node}x{port}" if port else "100GbE", gpus_per_node)
    assumed.append(f"network: {link.bytes_per_s / 1e9:g} GB/s a node one way, usual for {known.name} (give --network)")
    return link


def machine(gpu: str, nodes: int = 1, gpus_per_node: int = 8, network: str | None = None) -> Machine:
    """A machine from what a command line says. `network` as `network.parse` reads it. Raises InputError."""
    known, notes = card(gpu), []
    for what, count in (("nodes", nodes), ("GPUs per node", gpus_per_node)):
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InputError(f"{what} is {count!r}; it must be a whole number, 1 or more")
    link = parse(network, gpus_per_node) if network else None
    if link is None and nodes > 1:
        link = usual_network(known, gpus_per_node, notes)
    return Machine(known, nodes, gpus_per_node, link, None, tuple(notes))
