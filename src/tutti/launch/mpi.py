"""MPI as a transport: its settings before it starts, checks of its ranks, and the end of all ranks when one fails.

Open MPI reads its settings from the environment when it starts, which importing `mpi4py.MPI` does. So `prepare` comes
first, then `check`, which imports it, then `connect`. MPI has no way to lose a rank: a rank whose script fails aborts
all of them.
"""

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
    """Set the all-reduce algorithm of Open MPI in the environment, before MPI starts.

    Raises `ConfigError` if mpi4py is missing or MPI has started with other settings, `EnvironmentConflict` if a
    variable contradicts the algorithm.
    """
    if find_spec("mpi4py") is None:
        raise ConfigError(f"transport '{kind}' needs MPI: pip install 'tutti-train[mpi]'.")
    algorithm = kind.partition(":")[2]
    if not algorithm:
        return
    # The component "han" sums in two levels where ranks share hosts, whatever algorithm is set: so it is turned off.
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
    # Importing it has started MPI, which has read its settings for good.
    if "mpi4py.MPI" in sys.modules:
        options = " ".join(f"--mca {name.removeprefix('OMPI_MCA_')} {value}" for name, value in settings.items())
        raise ConfigError(
            f"transport '{kind}': MPI has started already and takes no more settings. Call tutti.init() before "
            f"anything imports mpi4py.MPI, or give them to mpirun: {options}."
        )
    os.environ.update(settings)


def check(environment: RankEnvironment, kind: str) -> None:
    """Start MPI, and refuse ranks that it does not know or numbers otherwise, and algorithms that it does not have."""
    if environment.launcher not in ("Open MPI", "MPICH"):
        by = "by nobody" if environment.launcher == "none" else f"as {environment.launcher} says"
        raise ConfigError(
            f"rank {environment.rank}: transport '{kind}' needs ranks that mpirun started, and this one was started "
            f"{by}. Run mpirun -n {max(2, environment.size)} python SCRIPT, or choose another transport."
        )
    if environment.launcher != "Open MPI" and ":" in kind:
        raise ConfigError(
            f"transport '{kind}': only Open MPI lets its algorithms be chosen, and this is {environment.launcher}."
        )
    from mpi4py import MPI  # Starts it.

    everyone = MPI.COMM_WORLD
    # With another MPI's mpirun, every process is a world of one for mpi4py.
    if (everyone.rank, everyone.size) != (environment.rank, environment.size):
        raise EnvironmentConflict(
            f"mpirun says this is rank {environment.rank} of {environment.size}, mpi4py says {everyone.rank} of "
            f"{everyone.size}: they belong to different MPIs. Use the mpirun of the MPI that mpi4py was built for."
        )


def connect(membership: Membership) -> "MpiTransport":
    """Open a transport over MPI to all ranks in `membership`, which are all ranks of MPI's world. Collective."""
    from mpi4py import MPI

    from tutti.transports.mpi.transport import MpiTransport

    # A communicator of its own: messages of the user's MPI calls never match those of the transport.
    transport = MpiTransport(membership, MPI.COMM_WORLD.Dup(), rules=rules_in(os.environ))
    _abort_on_failure(transport)
    return transport


def _abort_on_failure(transport: "MpiTransport") -> None:
    """Abort all ranks when this one's script fails: MPI's own exit waits for them, and they may wait for this one."""
    # The hook of before still prints the error, and then all ranks are ended.
    before = sys.excepthook

    def failed(*error: Any) -> None:
        before(*error)
        _abort()

    def ended() -> None:
        transport.close()
        # A transport that failed has requests which MPI will never complete, and MPI's own exit would wait for them.
        if transport.broken:
            _abort()

    sys.excepthook = failed
    atexit.register(ended)


def _abort() -> None:
    """End all processes of the MPI job. Output that is still buffered would be lost with this one."""
    from mpi4py import MPI

    sys.stdout.flush()
    sys.stderr.flush()
    MPI.COMM_WORLD.Abort(1)


def rules_in(environment: Mapping[str, str]) -> Rules:
    """Read which algorithm Open MPI was told to use, by Tutti or by mpirun's `--mca`."""
    algorithm = None
    if environment.get(_RULES, "").lower() in ("1", "true", "yes", "t", "y"):
        value = environment.get(_ALGORITHM, "")
        numbers = {str(number): name for name, number in ALLREDUCE_ALGORITHMS.items()}
        algorithm = numbers.get(value, value if value in ALLREDUCE_ALGORITHMS else None)
    components = environment.get(_COMPONENTS, "^")
    # A list with ^ before it names components that are excluded, one without it those that are allowed.
    named = "han" in components.removeprefix("^").split(",")
    return Rules(algorithm=algorithm, han=named != components.startswith("^"))
