"""Start MPI as asked for, and make a transport of it."""

import atexit
import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from tutti.errors import ConfigError, EnvironmentConflict
from tutti.launch.environment import RankEnvironment
from tutti.transports.membership import Membership
from tutti.transports.mpi.algorithms import ALLREDUCE_ALGORITHMS, Rules

if TYPE_CHECKING:
    from tutti.transports.mpi.transport import MpiTransport

_RULES = "OMPI_MCA_coll_tuned_use_dynamic_rules"
_ALGORITHM = "OMPI_MCA_coll_tuned_allreduce_algorithm"
_COMPONENTS = "OMPI_MCA_coll"


def is_mpi(kind: str) -> bool:
    """Whether a transport's name means MPI: "mpi", or "mpi:" and an all-reduce algorithm of Open MPI's."""
    return kind.partition(":")[0] == "mpi"


def prepare(kind: str) -> None:
    """Tell Open MPI which algorithm to use, while it can still be told: it reads the environment when it starts."""
    if find_spec("mpi4py") is None:
        raise ConfigError(f"transport '{kind}' needs MPI: pip install 'tutti[mpi]'.")
    algorithm = kind.partition(":")[2]
    if not algorithm:
        return
    wanted = Rules(algorithm=algorithm, han=False)
    if rules_in(os.environ) == wanted:
        return
    number = str(ALLREDUCE_ALGORITHMS[algorithm])
    settings = {_RULES: "1", _ALGORITHM: number, _COMPONENTS: "^han"}
    if os.environ.get(_COMPONENTS, "^han") != "^han":
        raise EnvironmentConflict(
            f"transport '{kind}' needs {_COMPONENTS}=^han, or Open MPI's component han may reduce instead, but it is "
            f"'{os.environ[_COMPONENTS]}'. Unset it, or use transport 'mpi'."
        )
    if "mpi4py.MPI" in sys.modules:
        options = " ".join(f"--mca {name.removeprefix('OMPI_MCA_')} {value}" for name, value in settings.items())
        raise ConfigError(
            f"transport '{kind}': MPI has started already and takes no more settings. Call tutti.init() before "
            f"anything imports mpi4py.MPI, or give them to mpirun: {options}."
        )
    os.environ.update(settings)


def check(place: RankEnvironment, kind: str) -> None:
    """Refuse ranks that MPI does not know, or knows by other numbers, or whose MPI has other algorithms."""
    if place.launcher not in ("Open MPI", "MPICH"):
        by = "by nobody" if place.launcher == "none" else f"as {place.launcher} says"
        raise ConfigError(
            f"rank {place.rank}: transport '{kind}' needs ranks that mpirun started, and this one was started {by}. "
            f"Run mpirun -n {max(2, place.size)} python SCRIPT, or choose another transport."
        )
    if place.launcher != "Open MPI" and ":" in kind:
        raise ConfigError(
            f"transport '{kind}': only Open MPI lets its algorithms be chosen, and this is {place.launcher}."
        )
    from mpi4py import MPI  # Starts it.

    everyone = MPI.COMM_WORLD
    if (everyone.rank, everyone.size) != (place.rank, place.size):
        raise EnvironmentConflict(
            f"mpirun says this is rank {place.rank} of {place.size}, mpi4py says {everyone.rank} of {everyone.size}: "
            "they belong to different MPIs. Use the mpirun of the MPI that mpi4py was built for."
        )


def connect(membership: Membership) -> "MpiTransport":
    """A transport over MPI to everyone in `membership`, that is to all of MPI's world. Collective."""
    from mpi4py import MPI

    from tutti.transports.mpi.transport import MpiTransport

    link = MpiTransport(membership, MPI.COMM_WORLD.Dup(), rules=rules_in(os.environ))
    _end_together(link)
    return link


def _end_together(link: "MpiTransport") -> None:
    """End all ranks when this one's script fails: MPI's own end waits for them, and they may wait for this one."""
    before = sys.excepthook

    def failed(*error: Any) -> None:
        before(*error)
        _abort()

    def ended() -> None:
        link.close()
        if link.broken:
            _abort()

    sys.excepthook = failed
    atexit.register(ended)


def _abort() -> None:
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


def rules_in(environment: Mapping[str, str]) -> Rules:
    """What Open MPI was told, by Tutti or by mpirun's `--mca`."""
    algorithm = None
    if environment.get(_RULES, "").lower() in ("1", "true", "yes", "t", "y"):
        given = environment.get(_ALGORITHM, "")
        numbers = {str(number): name for name, number in ALLREDUCE_ALGORITHMS.items()}
        algorithm = numbers.get(given, given if given in ALLREDUCE_ALGORITHMS else None)
    components = environment.get(_COMPONENTS, "^")
    named = "han" in components.removeprefix("^").split(",")
    return Rules(algorithm=algorithm, han=named != components.startswith("^"))
