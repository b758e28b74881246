"""How long a collective takes on the links of a machine. Sizes are of the whole gathered buffer, in bytes.

A ring over n ranks takes (n - 1) a + (n - 1)/n S / B: a for each hop, and each rank passes on all but its own part
(nccl-tests, doc/PERFORMANCE.md). B is the link of a card within a node; a ring over whole nodes enters and leaves each
node once, so there B is the rate of all of a node's NICs together.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from zerostage.mistakes import InputError

if TYPE_CHECKING:
    from zerostage.planning.timing.hardware import Machine

#: Of a card's link, what collectives reach: 361 of 450 GB/s on H200, 235 of 300 on A100, 682 of 900 on B200.
LINK_REACHED = 0.79
#: Of a node's NICs, what large collectives reach: 382 of 400 GB/s at 16 GiB on 4 nodes.
NETWORK_REACHED = 0.955
#: Seconds to start a collective, and for each hop within a node.
START_S, HOP_S = 12e-6, 2.5e-6
#: Seconds for each hop of a ring over nodes of InfiniBand, mean over its hops within and between nodes. From the
#: bandwidths measured on 4 nodes of 8 B200 (64 GB/s at 16 MiB, 157 at 64 MiB, 327 at 512 MiB of 400): with 31 hops this
#: gives 56, 154 and 321. Elastic Fabric Adapter takes about twice that, TCP on Ethernet five times.
NETWORK_HOP_S, EFA_HOP_S, ETHERNET_HOP_S = 8e-6, 16e-6, 40e-6


@dataclass(frozen=True)
class Network:
    """Between nodes: bytes/s one way of a whole node, and seconds per hop of a ring."""

    bytes_per_s: float
    hop_s: float = NETWORK_HOP_S
    reached: float = NETWORK_REACHED


# bytes/s of one port, per node where it is sold per node
_NAMES = {
    "edr": ("port", 100), "hdr": ("port", 200), "ndr": ("port", 400), "xdr": ("port", 800),
    "efa": ("node", 3200), "efav1": ("node", 400), "efav2": ("node", 3200), "efav3": ("node", 3200),
}  # fmt: skip
_RATE = re.compile(r"(?:(\d+)\s*[x*]\s*)?(\d+(?:\.\d+)?)\s*([tgm])(i?)(b(?:it|yte)?s?|B(?:yte)?s?|bps|Bps|be)(?:/s|ps)?", re.I)


def parse(text: str, gpus_per_node: int = 8) -> Network:
    """What a node's network carries one way.

    '400GB/s' (bytes), '3.2Tb/s', '400Gb', '400Gbit' (bits), '8x400Gb', '100GbE', and the names 'NDR', 'HDR', 'EDR' (one
    port a card), 'EFA' (v2, 3.2 Tb/s) and 'EFA v1'. Raises InputError.
    """
    plain = re.sub(r"\s", "", text)
    name = re.sub(r"[_-]", "", plain).lower()
    if name in _NAMES:
        per, gigabits = _NAMES[name]
        hop = EFA_HOP_S if name.startswith("efa") else NETWORK_HOP_S
        reached = 0.85 if name == "efav1" else NETWORK_REACHED  # 340 of its 400 Gb/s were measured
        return Network(gigabits * 1e9 / 8 * (gpus_per_node if per == "port" else 1), hop, reached)
    match = _RATE.fullmatch(plain)
    if not match or float(match[2]) <= 0 or match[1] == "0":
        raise InputError(
            f"network {text!r} is not a rate; write bytes as 400GB/s, bits as 400Gb/s or 8x400Gb, or NDR, HDR, EDR, EFA, 100GbE"
        )
    count, number, power, binary, unit = match.groups()
    rate = int(count or 1) * float(number) * {"t": 1e12, "g": 1e9, "m": 1e6}[power.lower()]
    if binary:
        rate *= {"t": 2**40 / 1e12, "g": 2**30 / 1e9, "m": 2**20 / 1e6}[power.lower()]
    ethernet = unit.lower() == "be"
    if ethernet or "byte" not in unit.lower() and not unit.startswith("B"):
        rate /= 8
    return Network(rate, ETHERNET_HOP_S if ethernet else NETWORK_HOP_S)


@dataclass(frozen=True)
class Calibrated:
    """Measured collectives: by name, [bytes of the whole buffer, seconds], on `world` ranks."""

    world: int
    ranks_per_node: int
    points: dict[str, tuple[tuple[float, float], ...]]

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Calibrated:
        """From the file of `zerostage calibrate`. Raises InputError for a point that is not (bytes, seconds) above 0."""
        points = {}
        for name, pairs in data["collectives"].items():
            try:
                points[name] = tuple(sorted((float(size), float(seconds)) for size, seconds in pairs))
            except (TypeError, ValueError):
                raise InputError(f"calibration: {name} must be a list of [bytes, seconds]") from None
            if any(size <= 0 or seconds <= 0 for size, seconds in points[name]):
                raise InputError(f"calibration: {name} has bytes or seconds that are not above 0")
        return cls(int(data["world"]), int(data["ranks_per_node"]), {name: own for name, own in points.items() if own})

    @property
    def across(self) -> bool:
        """Whether it was measured over several nodes."""
        return self.world > self.ranks_per_node

    def network(self, across: bool) -> Network | None:
        """Hop and rate that its largest and smallest message mean, or None where it tells nothing of that level."""
        if across != self.across or self.world < 2 or not self.points:
            return None
        name = "all_gather" if "all_gather" in self.points else next(iter(self.points))
        turns = 2 if name == "all_reduce" else 1
        (small, least), (large, most) = self.points[name][0], self.points[name][-1]
        n = self.world
        rate = (
            turns * (n - 1) / n * large / most
            if small == large
            else turns * (n - 1) / n * (large - small) / max(most - least, 1e-9)
        )
        hop = max(0.0, least - turns * (n - 1) / n * small / rate) / (turns * (n - 1))
        return Network(rate, hop, 1.0)

    def seconds(self, kind: str, size: float, ranks: int) -> float | None:
        """Between the measured points on as many ranks as were measured (straight lines); None elsewhere."""
        own = self.points.get("reduce_scatter" if kind == "exchange" else kind)
        if not own or ranks != self.world or not own[0][0] <= size <= own[-1][0]:
            return None
        for (x0, y0), (x1, y1) in zip(own, own[1:]):
            if x0 <= size <= x1:
                return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
        return own[0][1]


def collective_s(machine: Machine, kind: str, size: float, ranks: int, stride: int = 1) -> float:
    """Seconds of one collective of `ranks` ranks that are `stride` ranks apart, all such groups at once.

    kind: all_gather, reduce_scatter, all_reduce, 'send' (to one neighbour), or 'exchange' (all-to-all: each
    rank hands part i of its buffer to rank i). size: of the whole buffer, in bytes.

    Groups with a stride share the node's NICs: each has the part that its own cards bring. An exchange over nodes sends
    g(n - g)/n x S out of a node of g ranks, where a ring reduce-scatter adds up within the node first and sends S: it is
    g times slower there, though each rank sends the same number of bytes.
    """
    if ranks <= 1 or size <= 0:
        return 0.0
    measured = machine.measured and stride == 1 and machine.measured.seconds(kind, size, ranks)
    if measured:
        return measured
    inside = max(1, machine.gpus_per_node // stride)  # ranks of one group in one node
    egress = size * (ranks - 1) / ranks
    within = machine.measured.network(across=False) if machine.measured else None
    link = within.bytes_per_s if within else machine.card.link_bytes_per_s * LINK_REACHED
    if machine.network is None or ranks <= inside:
        hop, rate = within.hop_s if within else HOP_S, link
    else:
        hop = machine.network.hop_s
        groups = machine.gpus_per_node // inside
        rate = min(machine.network.bytes_per_s * machine.network.reached / groups, link)
        if kind == "exchange":
            egress = max(egress, size * inside * (ranks - inside) / ranks)
    if kind == "send":
        return START_S + hop + size / rate
    if kind == "exchange":  # all at once, not hop by hop
        return START_S + hop * math.log2(ranks) + egress / rate
    if kind == "all_reduce":  # a double binary tree where hops matter more than bytes (NCCL since 2.4)
        return START_S + 2 * egress / rate + 2 * hop * min(ranks - 1, 2 * math.ceil(math.log2(ranks)))
    return START_S + hop * (ranks - 1) + egress / rate
