"""`tutti bench hostile`: training steps while hostile connections come to every listening port.

How it works. Ranks train over sockets on this machine. Rank 0 starts an attacker (`hostile_connections`), with the
ports and secrets of all of them, and times three kinds of rounds, in turn: without connections, with connections to a
decoy, and with connections to the run. The decoy shows what the attacker itself and the kernel cost on this machine.
"""

import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from tutti.bench.hostile_connections import Target
from tutti.bench.models import make_benchmark_model
from tutti.bench.training_steps import tutti_step
from tutti.collectives import all_gather_json
from tutti.coordination.link import ConnectedMember
from tutti.launch import init, launch
from tutti.launch.interpreter import main_of
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.transports import SocketTransport

ROUNDS = {"quiet": "stop", "decoy": "decoy", "attacked": "attack"}
"""Kinds of rounds, and the command for each."""

_ROUND_S = 0.5
"""Approximate time of one round."""
_WARM_UP_STEPS = 64
_LAST_S = 1200.0
"""No round begins later than this after the first."""


def resources() -> tuple[int, int]:
    """Open files of this process, and its resident KiB."""
    status = Path("/proc/self/status").read_text()
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    return len(os.listdir("/proc/self/fd")), resident


def measure(
    model: str, connections: int, rate: float, show: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Any]:
    """Train under attack until each port had so many `connections`; return times, and how resources have grown.

    Args:
        rate: connections a second, to all ports together.
        show: called with the number of connections so far, and of all.
    """
    launcher: list[tuple[int, int]] = []

    def watch(rank: int, values: dict[str, Any]) -> None:
        if "done" in values:
            launcher.append(resources())
            show(values["done"], values["total"])

    row = dict(launch(train, model, connections, rate, workers=2, transport="sockets", watch=watch)[0])
    # After the first rounds, in which what is needed once is allocated.
    first, last = launcher[min(2, len(launcher) - 1)], launcher[-1]
    row["growth"]["launcher"] = [after - before for before, after in zip(first, last, strict=True)]
    return row


def train(model: str, connections: int, rate: float) -> dict[str, Any]:
    """Time the rounds; the same on every rank. Collective."""
    torch.set_num_threads(1)
    world, supervisor = init(), SupervisorPipe()
    transport = world.transport
    assert isinstance(transport, SocketTransport)
    torch.manual_seed(world.rank)
    step, job = tutti_step(make_benchmark_model(model, world.size), world, "ring")
    started = time.monotonic()
    for _ in range(_WARM_UP_STEPS):
        step()
    slowest_s = max(all_gather_json(time.monotonic() - started, transport)) / _WARM_UP_STEPS
    num_steps = max(4, int(_ROUND_S / slowest_s))
    targets = _targets(transport)
    samples: dict[str, list[float]] = {name: [] for name in ROUNDS}
    grown: list[tuple[int, int]] = []
    count, deadline, total = 0, time.monotonic() + _LAST_S, connections * len(targets)
    with _attacker(targets, rate, runs=world.rank == 0) as command:
        while count < total and time.monotonic() < deadline:
            supervisor.progress(done=count, total=total)
            grown.append(resources())
            for name in sorted(samples, reverse=bool(len(grown) % 2)):
                command(ROUNDS[name])
                all_gather_json(0, transport)  # A barrier: all ranks start together.
                start = time.perf_counter()
                for _ in range(num_steps):
                    step()
                seconds = max(all_gather_json(time.perf_counter() - start, transport))
                samples[name].append(seconds / num_steps)
                count = max(all_gather_json(command("stop"), transport))
        supervisor.progress(done=count, total=total)
    growth = [after - before for before, after in zip(grown[min(2, len(grown) - 1)], resources(), strict=True)]
    by_rank = all_gather_json(growth, transport)
    job.finish()
    ratios = {
        name: statistics.median(attacked / other for attacked, other in zip(samples["attacked"], times, strict=True))
        for name, times in samples.items()
    }
    return {
        "model": model,
        "ports": len(targets),
        "connections": count,
        "rounds": len(grown),
        "seconds": {name: statistics.median(times) for name, times in samples.items()},
        "to_quiet": ratios["quiet"],
        "to_decoy": ratios["decoy"],
        "growth": {f"rank {rank}": each for rank, each in enumerate(by_rank)},
    }


def _targets(transport: SocketTransport) -> list[Target]:
    """All listening ports of the run, and their secrets. Collective."""
    member = transport.membership.member
    assert isinstance(member, ConnectedMember)
    assert member.secret is not None
    own = [
        (int(location.split()[1]), location.split()[2])
        for location in (channel.location for channel in transport.listening())
    ]
    found = [Target(member.endpoint.port, member.secret.text, True)]
    found += [Target(port, key, False) for ports in all_gather_json(own, transport) for port, key in ports]
    return found


@contextmanager
def _attacker(targets: list[Target], rate: float, runs: bool) -> Iterator[Callable[[str], int]]:
    """Start the attacker in a process of its own, if this rank does; give a function that commands it."""
    if not runs:
        yield lambda command: 0
        return
    arguments = [json.dumps([asdict(target) for target in targets]), str(rate)]
    with subprocess.Popen(
        [*main_of("tutti.bench.hostile_connections"), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"

        def command(text: str) -> int:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{text}\n")
            process.stdin.flush()
            return int(process.stdout.readline())

        try:
            yield command
        finally:
            process.kill()
