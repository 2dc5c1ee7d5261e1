"""Results of the reproduction of Malik et al. (2018)."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SynchronisationMethod:
    """A method of synchronising the replicas, as it is simulated and as it runs in the lab."""

    name: str
    strategy: str
    """Strategy in the simulation, with buckets as large as Horovod's."""
    num_servers: int = 0
    """Dedicated servers, in addition to the workers."""
    max_workers: int = 400
    """Largest number of workers at all but the smallest batch size: slow simulations are left out at the others."""
    lab_strategy: str = ""
    """Strategy in the lab, whose models are small; that of the simulation if empty."""


@dataclass(frozen=True, kw_only=True)
class HorovodConfig:
    """What is simulated and measured."""

    models: tuple[str, ...] = ("alexnet", "googlenet", "resnet50")
    batches: tuple[int, ...] = (64, 128, 256, 512)
    """Batch sizes of one worker."""
    workers: tuple[int, ...] = (1, 4, 16, 64, 128, 256, 400)
    steps: int = 2
    cluster: str = "infiniband-edr"
    lab_models: tuple[str, ...] = ("mnist-mlp", "cifar-quick")
    lab_rate: str = "1gbit"
    lab_steps: int = 30


@dataclass(frozen=True, kw_only=True)
class SimulatedScaling:
    """Simulated training with one model, batch size, method and number of workers."""

    model: str
    batch_size: int
    method: str
    workers: int
    step_s: float
    """Virtual seconds per step."""
    images_per_s: float
    """Images per virtual second, of all workers."""
    efficiency: float
    """Images per second and worker, relative to a single worker."""
    bytes_per_worker: float
    """Bytes sent by one worker per step."""
    num_messages: int
    wall_s: float
    """Wall-clock seconds that the simulation took."""


@dataclass(frozen=True, kw_only=True)
class LabComparison:
    """Training steps on the hosts of the lab, and the same steps simulated."""

    model: str
    method: str
    strategy: str
    rate: str
    ranks_per_host: int
    real_s: float
    """Median wall-clock seconds per step."""
    simulated_s: float
    """Median virtual seconds per step."""
    same_bits: bool
    """Whether real and simulated ranks end with identical parameters."""

    @property
    def error(self) -> float:
        """Relative error of the simulation."""
        return self.simulated_s / self.real_s - 1


@dataclass(frozen=True, kw_only=True)
class HorovodResults:
    """All simulations and measurements."""

    machine: str
    quick: bool
    config: HorovodConfig
    methods: tuple[SynchronisationMethod, ...]
    """The methods compared; the first is Horovod's."""
    lab_missing: str | None
    """Why the lab was not used; None if it was."""
    lab: tuple[LabComparison, ...]
    simulated: tuple[SimulatedScaling, ...]

    def select(
        self,
        *,
        model: str | None = None,
        method: str | None = None,
        batch_size: int | None = None,
        workers: int | None = None,
    ) -> list[SimulatedScaling]:
        """Return the simulations with the given properties."""
        wanted = {"model": model, "method": method, "batch_size": batch_size, "workers": workers}
        given = {name: value for name, value in wanted.items() if value is not None}
        return [row for row in self.simulated if all(getattr(row, name) == value for name, value in given.items())]
