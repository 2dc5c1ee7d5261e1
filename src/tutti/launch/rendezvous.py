"""`init`: rendezvous with the other ranks, and the choice of a transport to them.

How it works. Ranks find each other through the run's coordinator (`tutti.coordination`), which the launcher serves, or
rank 0 if the launcher does not. Each world of a process is a scope of its own there, with the attempt of the job and
the number of the world in its name, so that nothing of an earlier one is read.

1. The process connects to the coordinator, and proves that it knows the run's secret.
2. It joins the scope as its rank. The coordinator refuses a second process with the same rank.
3. It waits for the roster, which all ranks get when all have joined. The wait ends also at the deadline (the error
   names the missing ranks). Every few seconds a line says who is missing.
4. All have the same list now, and build the transport together: a collective step, in which each rank listens on the
   address that faces rank 0, and connects.

A rank that fails or ends announces it (`Membership.leave`), by an exception hook and an exit handler: the others may
still wait for it while its process lives on. A rank that is killed cannot; the coordinator sees that its connection
ended.
"""

import atexit
import os
import sys
import weakref
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from tutti.cluster import Duration, parse_duration
from tutti.coordination.member import confirm
from tutti.errors import ConfigError
from tutti.launch import mpi
from tutti.launch.connect import connect
from tutti.launch.control_plane import member_of_run, wait_for_ranks
from tutti.launch.control_settings import find_worker_range
from tutti.launch.default_group import make_default_group
from tutti.launch.elastic import join_elastic, refuse_mpi
from tutti.launch.environment import RankEnvironment, read_environment
from tutti.launch.host import host_name, listen_address
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.launch.undistributed import UndistributedCheck
from tutti.simulation import guard
from tutti.strategies import parse
from tutti.transports import SingleRankTransport, Transport
from tutti.transports.base import DEFAULT_TIMEOUT, NO_LIMIT
from tutti.world import CheckpointSettings, World, current_world, set_world

world_numbers = count()
"""Numbers of the worlds that this process opens one after the other."""

TRANSPORTS = ("auto", "sockets", "shared_memory", "mpi")
"""Names of transports; "mpi:ring" also selects the all-reduce algorithm of Open MPI."""


def init(*, timeout: Duration | None = None, transport: str | None = None, torch_distributed: bool = False) -> World:
    """Join the world of this run, as torchrun, mpirun, srun or `tutti run` describe it; a world of one otherwise.

    Collective: waits until every rank has called it. Called again, it returns the same world.

    Args:
        timeout: how long to wait for ranks to come: seconds, a text such as "40s" or a timedelta; $TUTTI_TIMEOUT, or
            5 minutes, by default. Later, a rank that is slow is waited for, and one that is lost is noticed
            ($TUTTI_PATIENCE).
        transport: "auto" takes shared memory when all ranks are on one host; "mpi" sends everything over MPI, and
            "mpi:ring", say, has Open MPI use its ring; $TUTTI_TRANSPORT by default.
        torch_distributed: also make torch's default process group, of backend "tutti", so that code which calls
            `torch.distributed` works; unless there is one already. It is destroyed with the world. Collective.
    """
    # A script may call it in several places, as may a library beside it.
    if (world := current_world()) is None:
        world = _join(timeout, transport)
    if torch_distributed:
        make_default_group(world)
    return world


def init_numbered(described: RankEnvironment) -> World:
    """Join the world of ranks that a framework has started and numbered itself, with torch's default group over it.

    For `tutti.integrations`. If a launcher that Tutti knows has started this process, its numbers count, and have to
    be those of the framework. Collective. Called again, it returns the same world.
    """
    if (world := current_world()) is None:
        world = _join(None, None, None if "RANK" in os.environ else described)
    if (world.rank, world.size) != (described.rank, described.size):
        raise ConfigError(
            f"rank {world.rank}: {described.launcher} takes this process for rank {described.rank} of "
            f"{described.size}, and the launcher has made it rank {world.rank} of {world.size}. Give "
            f"{described.launcher} as many devices as workers were started."
        )
    make_default_group(world)
    return world


def _join(timeout: Duration | None, transport: str | None, environment: RankEnvironment | None = None) -> World:
    """Meet the other ranks, and make the world of this thread."""
    guard.refuse("tutti.init after the world was closed")
    limit = _timeout_from_environment() if timeout is None else parse_duration(timeout)
    kind = transport or os.environ.get("TUTTI_TRANSPORT", "auto")
    limits = find_worker_range()
    if limits is not None:
        refuse_mpi(kind)
    if mpi.is_mpi(kind):
        mpi.prepare(kind)  # Before `read_environment`, which may start MPI.
    elif kind not in TRANSPORTS:
        raise ConfigError(f"transport '{kind}' is not one of {', '.join(TRANSPORTS)}.")
    # 1. Who this process is, by the variables of its launcher.
    if environment is None:
        environment = read_environment()
    if mpi.is_mpi(kind):
        mpi.check(environment, kind)
    if environment.size == 1 and limits is None:
        world = World(0, 1, environment.local_rank, host_name(), SingleRankTransport(limit))
    elif limits is not None:
        world = join_elastic(environment, limits, kind, limit)
        _leave_at_exit(world)
    else:
        # All ranks open worlds in the same order, so the n-th world has the same name on all of them.
        scope = f"world/{environment.attempt}/{next(world_numbers)}"
        # 2. Who the others are.
        member = member_of_run(environment, limit)
        membership = wait_for_ranks(member, scope, environment.rank, environment.size, limit)
        membership.address = listen_address(environment, membership)
        # All are here. From now on a rank may be slow for as long as it lives: the coordinator knows when it does not.
        membership.timeout = NO_LIMIT
        if mpi.is_mpi(kind):
            joined: Transport = mpi.connect(membership)
        else:
            joined = connect(membership, kind)
        me = membership.peers[membership.rank]
        numbers = (membership.rank, membership.size, environment.local_rank, me.host)
        tolerate_loss = SupervisorPipe().tolerate_loss
        world = World(
            *numbers,
            joined,
            leave=membership.leave,
            tolerate_loss=tolerate_loss,
            confirm=partial(confirm, member),
            status=member.table,
        )
        _leave_at_exit(world)
    world = replace(world, checkpoints=_checkpoint_settings())
    # `tutti run --strategy` overrules what the script asks for, without a change to the script.
    if "TUTTI_STRATEGY" in os.environ:
        world = replace(world, strategy=parse(os.environ["TUTTI_STRATEGY"]))
    return set_world(world)


def _leave_at_exit(world: World) -> None:
    """Tell the others when this rank's script fails or ends, even if its process lives on for a while.

    It may live on because mpi4py's exit waits for the other ranks, or Python for the user's threads. The world is
    closed too: groups that are open when Python ends make torch abort the process.
    """
    # The hook runs before exit handlers, and before Python waits for threads: others learn of a failure at once.
    before = sys.excepthook
    check, reference = UndistributedCheck(world), weakref.ref(world)
    world.at_close.append(lambda: atexit.unregister(world.close))
    world.at_close.append(lambda: _end.mistakes.extend(filter(None, [check.closed()])))

    def failed(*error: Any) -> None:
        _end.failed = True
        # Weak: other hooks may be on top of this one, so it stays, and must not keep a world that was closed.
        if (still_there := reference()) is not None:
            still_there.leave()
        before(*error)

    sys.excepthook = failed
    atexit.register(world.close)


@dataclass
class _ScriptEnd:
    """How the script of this process ends."""

    failed: bool = False
    """Whether it has an error to report already."""
    mistakes: list[str] = field(default_factory=list)
    """What it did wrong with the worlds that it has closed."""


_end = _ScriptEnd()


def _exit_status() -> None:
    """End the process with status 1 if it has trained without the others. It runs after other exit handlers."""
    if _end.mistakes and not _end.failed:
        print(f"ConfigError: {_end.mistakes[0]}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(1)  # A handler cannot set the status in another way.


# Here, and not in `init`: handlers run in the reverse order, and those of the user must not be left out.
atexit.register(_exit_status)


def _checkpoint_settings() -> CheckpointSettings:
    """Return what `tutti run --checkpoint-every` and `--grace` say."""
    grace = parse_duration(os.environ.get("TUTTI_GRACE", "30s"), "TUTTI_GRACE").total_seconds()
    every = os.environ.get("TUTTI_CHECKPOINT_EVERY")
    return CheckpointSettings(every, grace, SupervisorPipe().saves_when_stopped)


def _timeout_from_environment() -> timedelta:
    text = os.environ.get("TUTTI_TIMEOUT")
    return DEFAULT_TIMEOUT if text is None else parse_duration(text, "TUTTI_TIMEOUT")
