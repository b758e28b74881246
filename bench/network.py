"""python -m bench.network: what prefetch is worth where the network is slow.

Two ranks on two hosts, as far as they can tell: each has a Linux network namespace of its own, and
all that joins them is a pair of virtual interfaces with a limited rate. torchrun starts them as on
two machines. Otherwise ranks of one machine exchange weights through its memory, so fast that
there is little for prefetch to hide.

In each round the rate follows from what the machine computes: a step's all-gathers are to take `load`
times as long as forward and backward. Stage 3 gathers all weights twice a step, and during backward reduces
gradients, half as many bytes. So where computing takes C seconds and load is 1, with two ranks:

- without prefetch each layer first waits for its own weights: at least 2 C a step;
- with it the link, which is busy for 1.5 C, sets the pace, and only the first layer has to wait.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

INTERFACE, PORT = "link0", 29500  # nobody else is in the namespaces, so any will do
ADDRESSES = ("198.18.0.1/30", "198.18.0.2/30")  # of a range set aside for benchmarks
ROWS, LENGTH, VOCABULARY = 4, 128, 512
WARM_UP = 2
PREFETCH = {"prefetch 0": 0, "prefetch 1": 1}


def measure(layers: int = 8, rounds: int = 5, steps: int = 4, load: float = 1.0, timeout: float = 300) -> dict[str, Any]:
    """Stage 3 with and without prefetch on two ranks, in `rounds` interleaved rounds of `steps` steps. As plain values:

    - 'parameters' of the model; 'tokens' per rank and step; 'rate' of the link by round, bits a second each way;
    - 'compute', 'gather': by round, seconds of a step's forward and backward alone, and of its all-gathers alone;
    - 'prefetch 0', 'prefetch 1': 'seconds' a step by round; 'waiting', those of them in which the main thread
      was blocked in a gather or a reduction; 'share', the median of waiting / seconds;
    - 'ratio': by round, seconds with prefetch / seconds without;
    - 'ranks': each rank's 'losses' for both, and over all timed steps the bytes that zerostage 'counted' and
      'expected', by collective, and that the interface has 'sent'.

    Raises RuntimeError where namespaces cannot be made, and with both ranks' output where one fails or there
    is no result within `timeout` seconds.
    """
    options = dict(layers=layers, rounds=rounds, steps=steps, load=load, timeout=timeout)
    with tempfile.TemporaryDirectory(prefix="network-") as folder, hosts() as namespaces:
        ranks = _launch(namespaces, Path(folder), options)
    found = {key: ranks[0][key] for key in ("parameters", "tokens", "rate")}
    # a step is over when the last rank is
    found |= {key: [max(values) for values in zip(*(rank[key] for rank in ranks))] for key in ("compute", "gather")}
    for name in PREFETCH:
        pairs = [max(both) for both in zip(*(zip(rank[name]["seconds"], rank[name]["waiting"]) for rank in ranks))]
        seconds, waiting = map(list, zip(*pairs))
        found[name] = dict(seconds=seconds, waiting=waiting, share=statistics.median(w / s for s, w in pairs))
    found["ratio"] = [on / off for off, on in zip(*(found[name]["seconds"] for name in PREFETCH))]
    keys = ("losses", "counted", "expected", "sent")
    found["ranks"] = [{name: {key: rank[name][key] for key in keys} for name in PREFETCH} for rank in ranks]
    return found


# -- Two hosts ---------------------------------------------------------------------------------


@contextlib.contextmanager
def hosts() -> Iterator[list[str]]:
    """The names of two network namespaces, joined by one link. They end with the block, and so does what runs in them."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise RuntimeError(f"no command {' and '.join(missing)}: install iproute2 (Debian: apt-get install iproute2)")
    names = [f"zerostage-{os.getpid()}-{secrets.token_hex(3)}-{number}" for number in range(2)]
    link = [word for name in names for word in ("name", INTERFACE, "netns", name, "type", "veth", "peer")][:-3]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        # both ends are made where they belong: no name has to be free outside
        _run("ip", "link", "add", *link)
        for name, address in zip(names, ADDRESSES):
            _run("ip", "-n", name, "address", "add", address, "dev", INTERFACE)
            for interface in ("lo", INTERFACE):
                _run("ip", "-n", name, "link", "set", interface, "up")
            # an algorithm that builds a model of the link pauses to probe it; this one keeps it busy
            _run("ip", "-n", name, "route", "replace", "198.18.0.0/30", "dev", INTERFACE, "congctl", "reno")
        yield names
    finally:
        for name in names:
            with contextlib.suppress(RuntimeError):  # it may not have been made
                # torchrun's workers are in sessions of their own, out of the reach of a signal to its group
                for pid in _run("ip", "netns", "pids", name).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise RuntimeError(
            f"`{' '.join(command)}`: {done.stderr.strip()}. Making network namespaces and limiting a link needs root (or "
            "CAP_NET_ADMIN and CAP_SYS_ADMIN) and a Linux kernel with veth and sch_tbf"
        )
    return done.stdout


def _launch(namespaces: list[str], folder: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One torchrun on each host, and what their ranks found."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["GLOO_SOCKET_IFNAME"] = INTERFACE  # it would take the address of the host's name, which is none here
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--master-addr", ADDRESSES[0].partition("/")[0], "--master-port", str(PORT)]
    work = ["-m", "bench.network", "worker", str(folder), json.dumps(options)]
    launchers, logs = [], [folder / f"output{rank}" for rank in range(2)]
    deadline = time.monotonic() + options["timeout"]
    try:
        for rank, namespace in enumerate(namespaces):
            command = ["ip", "netns", "exec", namespace, *torchrun, "--node-rank", str(rank), *work]
            where = dict(cwd=Path(__file__).resolve().parents[1], env=environment, start_new_session=True)
            with open(logs[rank], "wb") as log:
                launchers.append(subprocess.Popen(command, stdout=log, stderr=log, **where))
        failed = False
        while any(launcher.poll() is None for launcher in launchers) and time.monotonic() < deadline:
            if not failed and any(launcher.poll() for launcher in launchers):
                failed, deadline = True, min(deadline, time.monotonic() + 5)  # for the other one to tell what it saw
            time.sleep(0.05)
        ends = [launcher.poll() for launcher in launchers]
    finally:
        for launcher in launchers:
            launcher.kill()  # and what it has started ends with its namespace
            launcher.wait(10)
    if ends != [0, 0]:
        state = ["still running" if code is None else f"exit code {code}" for code in ends]
        said = [f"---- host {i}, {state[i]} ----\n{logs[i].read_text(errors='replace')[-8000:]}" for i in range(2)]
        raise RuntimeError(f"no result over the slow network (time limit {options['timeout']:.0f} s):\n" + "\n".join(said))
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


# -- A rank ------------------------------------------------------------------------------------


def worker(folder: Path, layers: int, rounds: int, steps: int, load: float, timeout: float) -> None:
    """What torchrun runs on each host; writes this rank's figures to rank<number>.json."""
    # somewhat before the launcher loses patience, so that its error shows where this rank was
    faulthandler.dump_traceback_later(timeout - 6, exit=True)
    import torch
    import torch.distributed as dist

    import zerostage
    from bench import engines, task

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    waited = _watch_waits()

    def model() -> torch.nn.Module:
        return task.model(num_hidden_layers=layers, hidden_size=256, intermediate_size=704, vocab_size=VOCABULARY)

    def batch(number: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1 + rank + 1000 * number)
        tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens}

    def trainer(name: str) -> Callable[[int], None]:
        model = models[name]
        optimizer = torch.optim.AdamW(model.parameters(), **task.OPTIMIZER)
        zerostage.shard(model, optimizer, stage=3, precision=zerostage.Precision(), prefetch=PREFETCH[name])

        def step(number: int) -> None:
            loss = model(**batch(number)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found[name]["losses"].append(loss.item())

        return step

    def gather(number: int) -> None:
        for _ in range(2):
            with zerostage.gathered(models["prefetch 0"]):
                pass

    def seconds(run: Callable[[int], Any], times: int = steps) -> float:
        dist.barrier()
        began = time.perf_counter()
        for number in range(times):
            run(number)
        return (time.perf_counter() - began) / times

    alone = engines.compute(model())
    compute = lambda number: alone(batch(number))  # noqa: E731
    models = {name: model() for name in PREFETCH}
    found: dict[str, Any] = {name: dict(seconds=[], waiting=[], losses=[], sent=0, counted=Counter()) for name in PREFETCH}
    found |= {"compute": [], "gather": [], "rate": [], "tokens": ROWS * LENGTH}
    found["parameters"] = sum(parameter.numel() for parameter in models["prefetch 0"].parameters())
    train = {name: trainer(name) for name in models}
    traffic = {name: zerostage.traffic(models[name]) for name in models}
    for run in (*train.values(), compute):
        seconds(run, WARM_UP)  # the order of the units is learned, memory is there

    for round_ in range(rounds):
        found["compute"].append(seconds(compute))
        slowest = torch.tensor(found["compute"][-1])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        # in each round anew: the machine may have other work in one than in the next
        found["rate"].append(_limit(8 * traffic["prefetch 0"].expected()["all_gather"] / (load * slowest.item())))
        found["gather"].append(seconds(gather))
        for name in sorted(models, reverse=round_ % 2 == 1):
            dist.barrier()
            traffic[name].reset()
            waited.clear()
            before = _sent()
            found[name]["seconds"].append(seconds(train[name]))
            found[name]["waiting"].append((waited["gather"] + waited["reduction"]) / steps)
            found[name]["counted"].update(traffic[name].bytes)
            dist.barrier()  # the other rank has what this one sent, or it would not be here
            found[name]["sent"] += _sent() - before
    for name in models:
        found[name]["expected"] = {key: size * rounds * steps for key, size in traffic[name].expected().items()}
        zerostage.close(models[name])
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _watch_waits() -> Counter[str]:
    """Seconds that a caller is blocked in collectives of each kind, from now on."""
    from zerostage.collectives import Channel

    waited: Counter[str] = Counter()
    wait = Channel.wait

    def timed(channel: Channel, *args: Any) -> None:
        began = time.perf_counter()
        wait(channel, *args)
        waited[channel.kind] += time.perf_counter() - began

    Channel.wait = timed
    return waited


def _limit(rate: float) -> int:
    """Let this host send `rate` bits a second."""
    # the burst holds TCP's largest segments, the queue more than one connection leaves in it, so nothing is dropped
    limit = ("rate", f"{rate:.0f}bit", "burst", "128kb", "latency", "400ms")
    _run("tc", "qdisc", "replace", "dev", INTERFACE, "root", "tbf", *limit)
    return round(rate)


def _sent() -> int:
    """Bytes that have left this host, by its interface's own count."""
    return json.loads(_run("ip", "-s", "-j", "link", "show", "dev", INTERFACE))[0]["stats64"]["tx"]["bytes"]


def show(found: dict[str, Any]) -> None:
    if "not measured" in found:
        print(f"slow network not measured: {found['not measured']}")
        return

    def spread(values: list[float]) -> str:
        return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"

    rate = statistics.median(found["rate"]) / 1e6
    print(f"{found['parameters']:,} parameters, 2 ranks x {found['tokens']} tokens, {rate:.0f} Mbit/s each way")
    print("Seconds a step, median and range of rounds")
    for name in ("compute", "gather"):
        print(f"  {name + ' alone':<16}{spread(found[name])}")
    for name in PREFETCH:
        print(f"  {name:<16}{spread(found[name]['seconds'])}, {found[name]['share']:.0%} of it waiting for gathers and reductions")
    print(f"  {'1 / 0':<16}{spread(found['ratio'])}")


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(Path(sys.argv[2]), **json.loads(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(prog="python -m bench.network", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", type=float, default=1.0, help="seconds of gathering for each second of computing (default: 1)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the namespaces go even then
    show(measure(rounds=options.rounds, load=options.load))


if __name__ == "__main__":
    main()
