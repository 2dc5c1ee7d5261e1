"""`simulate`: run a training function on simulated ranks, in virtual time.

How it works
------------
Every rank is a thread that calls the user's function; the engine lets one run at a time (see `simulation.engine`). The
caller's thread runs the engine's loop, until all ranks have ended and all messages have arrived.

A simulation uses state of the whole process, so one runs at a time (`_one_at_a_time`), and all of it is restored at the
end: random generators (the engine), torch's number of threads, thresholds of the garbage collector, and
torch.distributed's records of process groups (`torch_worlds`).

Results are those of real processes to the bit, so each rank gets as many computing threads as a launch of so many
workers on this machine would give it: sums depend on that.

Where workers may come and go, a launcher in virtual time starts the ranks, and others in place of lost ones
(`simulation.runs.elastic`). A rank that is lost is no failure of the run then, as long as one comes to the end.

If a rank fails otherwise, the others learn it as in reality (`RankLost`), and usually fail as well.
`_raise_first_failure` looks for the rank that failed by itself first. After a deadlock it raises that rank's error
instead, if there is one: the others wait because of it.
"""

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache, partial
from typing import Any

import torch

from tutti.cluster import Cluster, Duration, Host, format_time, parse_duration
from tutti.errors import ConfigError, Deadlock, NoLink, RankLost, TrainingEnded, WorkerFailed
from tutti.events import EventLog, Strip
from tutti.launch.chaos import Chaos
from tutti.launch.elastic_run import ElasticRun, with_chaos
from tutti.launch.supervisor_pipe import Watcher, report_to
from tutti.launch.worker import describe_failure
from tutti.simulation import guard
from tutti.simulation.engine import Engine
from tutti.simulation.network import Network
from tutti.simulation.rank import Rank
from tutti.simulation.runs import torch_worlds
from tutti.simulation.runs.elastic.launcher import SimulatedLauncher
from tutti.simulation.transport import ChannelRegistry, SimulatedTransport
from tutti.transports.base import DEFAULT_TIMEOUT
from tutti.transports.hosts import levelled
from tutti.world import World, set_world

_M_MMAP_THRESHOLD = -3
"""Parameter of mallopt(3): allocations of this size or more are given back to the system when they are freed."""

_one_at_a_time = threading.Lock()
"""Held while a simulation runs in this process."""


@dataclass(frozen=True)
class RankTime:
    """The time of one simulated rank, by use. The three sums add up to the time at which it ended."""

    busy_s: float
    """Seconds of computing."""
    communicating_s: float
    """Seconds of waiting while messages to or from it travelled."""
    waiting_s: float
    """Seconds of waiting for other ranks while no message to or from it travelled."""
    strip: Strip
    """The same three uses over the course of time."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of one network card or switch, in one direction."""

    num_bytes: int
    """Bytes carried."""
    busy_s: float
    """Seconds for which it carried something."""


@dataclass(frozen=True)
class Simulation:
    """The result of a simulated run."""

    results: list[Any]
    """Return value of the function on each rank."""
    seconds: float
    """Virtual time until the last rank ended."""
    ranks: list[RankTime]
    """Time of each rank, by use."""
    links: dict[str, Traffic]
    """Traffic by name: "host3 out" is what host 3 sent to the network."""
    events: list[EventLog]
    """The newest events of each rank."""
    num_messages: int
    """Messages sent by all ranks."""
    lost: dict[int, float]
    """Ranks that were killed, by the cluster's `failures` or by chaos, and the time of each."""
    joined: dict[int, float] = field(default_factory=dict)
    """Ranks that came to a run which may change its ranks, and when each was among the others."""
    chaos: list[tuple[float, str]] = field(default_factory=list)
    """What chaos has done to ranks and hosts, and when."""


def simulate(  # noqa: PLR0913 - what runs, where, what happens to it, and who watches
    function: Callable[..., Any],
    *args: Any,
    workers: int | str | tuple[int, int] | ElasticRun,
    cluster: Cluster | None = None,
    chaos: str | Chaos | None = None,
    timeout: Duration | None = None,
    watch: Watcher | None = None,
    on_progress: Callable[[float, int], None] | None = None,
) -> Simulation:
    """Run `function(*args)` on `workers` simulated ranks of `cluster`: real gradients, modelled time.

    The function is what `tutti.launch` would run; it calls `tutti.init()` itself. Ranks are threads of this process and
    only one runs at a time, so from the same seeds the result is the same every time, to the bit. All get the very same
    arguments: they should not change them.

    Args:
        workers: how many; or the fewest and the most, such as (2, 8), if they may come and go.
        chaos: failures to cause on purpose, such as "kill any every 20s; join at 30s; seed 7", in virtual time. Workers
            may come and go then: with a plain number, from 1 to that many.
        cluster: hosts, links and speeds; `tutti.Cluster()` by default.
        timeout: how long, in virtual time, a rank waits for the others before it gives up: seconds, a text such as
            "40s" or a timedelta; 5 minutes by default.
        watch: called with a rank and what it reported, as for `tutti.launch`.
        on_progress: called about every 0.1 s of real time with the virtual seconds and messages so far.

    Raises `WorkerFailed` for the first rank that failed, and `Deadlock` if all wait for each other.
    """
    if not isinstance(cluster := cluster or Cluster(), Cluster):
        raise ConfigError(
            f"cluster must be an object such as tutti.Cluster(link=tutti.Link('1gbit', '50us')), got {cluster!r}. "
            "tutti.Cluster.load reads presets and files."
        )
    limit = DEFAULT_TIMEOUT if timeout is None else parse_duration(timeout)
    guard.refuse("tutti.simulate")
    _return_memory()
    # Before the lock is taken: what the cluster refuses must leave nothing behind.
    number = with_chaos(workers, chaos)
    elastic = number if isinstance(number, ElasticRun) else None
    hosts = cluster.place(number.maximum if isinstance(number, ElasticRun) else number)
    if elastic is not None and elastic.chaos is not None:
        check_chaos(elastic, hosts)
    if not _one_at_a_time.acquire(blocking=False):
        raise ConfigError(
            "another simulation runs in this process, and the two would share its random generators. Wait for its end."
        )
    try:
        run = _SimulatedRun(partial(function, *args), cluster, hosts, limit, watch, elastic)
        return _simulate(run, on_progress)
    finally:
        _one_at_a_time.release()


@dataclass(frozen=True)
class _SimulatedRun:
    """What is simulated."""

    function: Callable[[], Any]
    cluster: Cluster
    hosts: Sequence[Host]
    timeout: timedelta
    watch: Watcher | None
    elastic: ElasticRun | None


def _simulate(run: _SimulatedRun, on_progress: Callable[[float, int], None] | None) -> Simulation:
    guard.install()
    ranks: list[Rank] = []
    # `ranks` is filled below; the callback is first called when the engine runs.
    engine = Engine(
        None if on_progress is None else lambda now: on_progress(now, sum(rank.num_messages for rank in ranks))
    )
    network = Network(run.cluster, run.hosts)
    registry = ChannelRegistry(ranks, network)
    launcher = None
    if run.elastic is not None:
        start = partial(_run_elastic_rank, run.watch, run.function)
        launcher = SimulatedLauncher(engine, registry, run.elastic, run.hosts, start, run.timeout)
    num_threads = torch.get_num_threads()
    try:
        if launcher is not None:
            launcher.begin()
        else:
            ranks.extend(Rank(engine, number, host, run.cluster, run.timeout) for number, host in enumerate(run.hosts))
            for rank in ranks:
                rank.start(partial(_run_rank, registry, rank, run.watch, run.function))
        # No grad in the engine's thread, where collectives add tensors. Ranks have grad modes of their own.
        with torch.no_grad(), _rare_collections(), torch_worlds.torch_worlds():
            engine.run(ranks)
    except Deadlock:
        _raise_first_failure(ranks, include_knock_on=False)  # A rank that failed by itself is why the others wait.
        raise
    finally:
        engine.stop(ranks)  # Ends all threads, so that nothing below is changed under a running rank.
        torch.set_num_threads(num_threads)  # torch keeps part of it per process, not per thread.
    if launcher is None or not any(worker.has_finished for worker in launcher.workers):
        _raise_first_failure(ranks)
    elif mistakes := [rank for rank in ranks if _is_mistake(rank)]:
        _raise_first_failure(mistakes)
    done = _result(ranks, network)
    return done if launcher is None else replace(done, chaos=launcher.log, joined=launcher.joined)


def _is_mistake(rank: Rank) -> bool:
    """Whether a rank of an elastic run has failed by itself: the others went on, but the script is to be mended."""
    error = rank.thread.error
    return error is not None and not isinstance(error, RankLost | TrainingEnded)


def check_chaos(elastic: ElasticRun, hosts: Sequence[Host]) -> None:
    """Raise `ConfigError` for failures that cannot be caused among ranks on these hosts, or that would end the run."""
    assert elastic.chaos is not None
    num_hosts = len({host.name for host in hosts})
    if num_hosts == 1 and (cuts := [rule.text for rule in elastic.chaos.rules if rule.action == "cut"]):
        raise ConfigError(f"--chaos: '{cuts[0]}': all ranks are on one host, and cutting it off would end the run.")
    elastic.chaos.check(elastic.num_started, elastic.restarts, num_hosts)


def _run_elastic_rank(watch: Watcher | None, function: Callable[[], Any], rank: Rank, join: Callable[[], World]) -> Any:
    """Make this thread a simulated rank of a world that may change, and call the user's function."""
    guard.enter()
    torch_worlds.enter()
    set_world(join())
    report_to(_ignore if watch is None else partial(watch, rank.number))
    return function()


def _run_rank(registry: ChannelRegistry, rank: Rank, watch: Watcher | None, function: Callable[[], Any]) -> Any:
    """Make this thread a simulated rank, and call the user's function. The target of the rank's thread."""
    guard.enter()
    torch_worlds.enter()
    # As many computing threads as a launch of so many workers here would give each, so that sums agree to the bit.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // len(registry.ranks)))
    # Two levels (shared memory within hosts) where the cluster has several ranks on a host, as in real launches.
    transport = levelled(SimulatedTransport(registry, rank))
    # The number of ranks before this one on the same host.
    local = [host.name for host in registry.network.hosts[: rank.number]].count(rank.host.name)
    set_world(World(rank.number, len(registry.ranks), local, rank.host.name, transport))
    report_to(_ignore if watch is None else partial(watch, rank.number))
    return function()


def _ignore(values: dict[str, Any]) -> None:
    """Drop what a rank reports when nobody watches."""


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: messages are made by the million and leave no reference cycles."""
    before = gc.get_threshold()
    if before[0]:  # Zero is off.
        gc.set_threshold(max(before[0], 100_000), 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@cache
def _return_memory() -> None:
    """Make glibc give freed tensors back at once: otherwise each thread's arena keeps megabytes of them."""
    with suppress(OSError, AttributeError):  # No glibc: only memory is lost.
        ctypes.CDLL("libc.so.6").mallopt(_M_MMAP_THRESHOLD, 128 * 1024)


def _raise_first_failure(ranks: list[Rank], include_knock_on: bool = True) -> None:
    """Raise for the first rank that failed by itself; with `include_knock_on`, also for one that lost another."""
    failed = [(rank, describe_failure(rank.thread.error)) for rank in ranks if rank.thread.error is not None]
    failed = [(rank, failure) for rank, failure in failed if include_knock_on or not failure.knock_on]
    if not failed:
        return
    # Failures of a rank's own come before those that follow from another's; then the earliest counts.
    rank, failure = min(failed, key=lambda pair: (pair[1].knock_on, pair[0].clock, pair[0].number))
    if isinstance(rank.thread.error, KeyboardInterrupt | NoLink):
        raise rank.thread.error
    # All failures follow from a planned death: then the death is reported.
    dead = [rank for rank in ranks if rank.thread.died]
    if failure.knock_on and dead:
        died = f"died at {format_time(dead[0].clock)}, as the cluster's failures say"
        reason = f"{died}, and rank {rank.number} {failure.reason}"
        raise WorkerFailed(dead[0].number, reason) from rank.thread.error
    raise WorkerFailed(rank.number, failure.reason, failure.traceback) from rank.thread.error


def _result(ranks: list[Rank], network: Network) -> Simulation:
    accounts = [rank.time_account for rank in ranks]
    return Simulation(
        results=[rank.thread.result for rank in ranks],
        seconds=max(min(rank.clock, rank.dies_s) for rank in ranks),
        ranks=[
            RankTime(account.busy_s, account.communicating_s, account.waiting_s, account.strip) for account in accounts
        ],
        links={pipe.name: Traffic(pipe.num_bytes, pipe.busy_s) for pipe in network.pipes},
        events=[account.events for account in accounts],
        num_messages=sum(rank.num_messages for rank in ranks),
        lost={rank.number: min(rank.clock, rank.dies_s) for rank in ranks if rank.thread.died},
    )
