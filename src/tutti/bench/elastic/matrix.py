"""The matrix of strategies, transports and faults: does each run keep what `promises` says?

How it works. Each cell is a launch of its own, in real processes: on this machine, or on the hosts of a lab, which is
made once for all cells. The victims cause the fault in themselves, in a step that is drawn from the cell's name. The
launcher replaces nobody, unless the fault is about that. A link that was cut is put up again after the run.

Under the one fault that ends the launcher, it is a child process of this one (`main`).
"""

import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tutti.bench.elastic.promises import (
    COUNTED,
    ENDS,
    EXACT,
    EXACT_OR_CHECKPOINT,
    FAULTS,
    LAB,
    LAB_SPEC,
    NOTHING,
    WORKERS,
    Cell,
    Fault,
)
from tutti.bench.elastic.records import misused
from tutti.bench.elastic.training import ElasticResult, ElasticSettings, train
from tutti.coordination.description import start_time
from tutti.errors import WorkerFailed
from tutti.launch.chaos import Chaos
from tutti.launch.diagnosis_line import DiagnosisLine
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.interpreter import main_of
from tutti.launch.lab import namespaces
from tutti.launch.lab.lab import Lab, LabSpec
from tutti.launch.lab.ownership import remove_orphans
from tutti.launch.local import supervise

PATIENCE_S = 2.0
TOLERANCE = 1e-10
"""Largest difference of parameters under an exact strategy, relative to the largest."""

_EPOCHS, _PAUSE_S, _STEPS_PER_EPOCH = 2, 0.005, 15
_END_S = 15.0
"""Processes of a run whose launcher was killed end within this time."""


@dataclass
class CellOutcome:
    """What became of a cell."""

    cell: Cell
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)
    """What it did not keep of its promise."""
    said: str = ""
    """What was printed in a run that did not."""


@dataclass
class SeenRun:
    """What was seen of a run."""

    results: list[ElasticResult | None] = field(default_factory=list)
    epochs: int = 0
    missing: int = 0
    """Samples that were not used."""
    repeated: int = 0
    """Samples that were used more than once."""
    error: str = ""
    said: str = ""
    """What the launcher and the workers have printed."""
    pids: list[int] = field(default_factory=list)

    @property
    def ends(self) -> list[ElasticResult]:
        """The results of the workers that came to the end."""
        return [each for each in self.results if each is not None]


class Matrix:
    """Runs of cells, and the undisturbed run that they are compared with."""

    def __init__(self, lab: Lab | None = None) -> None:
        """Run on `lab` what needs several hosts."""
        self._lab = lab
        self._undisturbed: list[float] = []

    def run(self, cell: Cell) -> CellOutcome:
        """Run a cell, and judge it."""
        outcome, started = CellOutcome(cell), time.monotonic()
        if cell.promise == ENDS:
            outcome.problems = _without_launcher(cell)
        else:
            seen = self._observe(cell)
            is_exact = cell.promise in (EXACT, EXACT_OR_CHECKPOINT)
            fault, wanted = FAULTS[cell.fault], self._reference() if is_exact else []
            outcome.problems = judge(cell, seen, wanted, fault.num_lost)
            outcome.problems += _wrong_size(fault, seen.ends) if seen.ends else []
            outcome.said = seen.said if outcome.problems else ""
        outcome.seconds = time.monotonic() - started
        return outcome

    def _reference(self) -> list[float]:
        if not self._undisturbed:
            seen = launch_run(Cell("ring", "sockets", NOTHING), None)
            assert not seen.error, seen.error
            self._undisturbed = seen.ends[0].parameters
        return self._undisturbed

    def _observe(self, cell: Cell) -> SeenRun:
        lab = self._lab if cell.transport == LAB else None
        try:
            return launch_run(cell, lab)
        finally:
            if lab is not None and FAULTS[cell.fault].event == "cut":
                namespaces.batch("ip", ["link set eth0 up"], lab.placement.namespace(FAULTS[cell.fault].victims[0]))


def measure(cells: Sequence[Cell], done: Callable[[CellOutcome], None] = lambda outcome: None) -> list[CellOutcome]:
    """Run cells, those of the lab in one lab; `done` is called with each outcome."""
    outcomes = []
    with lab_for([cell for cell in cells if cell.promise != ENDS]) as lab:
        matrix = Matrix(lab)
        for cell in cells:
            outcomes.append(matrix.run(cell))
            done(outcomes[-1])
    return outcomes


@contextmanager
def lab_for(cells: Sequence[Cell]) -> Iterator[Lab | None]:
    """Make the lab, if one of these cells runs in it."""
    if any(cell.transport == LAB for cell in cells):
        with Lab(LabSpec.parse(LAB_SPEC)) as lab:
            yield lab
    else:
        yield None


def launch_run(
    cell: Cell,
    lab: Lab | None,
    epochs: int = _EPOCHS,
    pause_s: float = _PAUSE_S,
    elastic: ElasticRun | None = None,
    watch: Callable[[int, dict[str, Any]], None] = lambda rank, values: None,
) -> SeenRun:
    """Launch the run of a cell.

    Args:
        cell: its strategy, transport and fault.
        lab: on whose hosts; None for this machine.
        epochs: number of epochs.
        pause_s: how long a worker pauses in every step.
        elastic: limits and restarts of the workers; None for those of the fault.
        watch: called with a rank and what it has reported.
    """
    fault, draw, seen, said = FAULTS[cell.fault], random.Random(str(cell)), SeenRun(), io.StringIO()

    def take_in(rank: int, values: dict[str, Any]) -> None:
        seen.pids.append(values["pid"])
        watch(rank, values)

    environment = {
        "TUTTI_TRANSPORT": "auto" if cell.transport == LAB else cell.transport,
        "TUTTI_PATIENCE": f"{PATIENCE_S:g}s",
    }
    with tempfile.TemporaryDirectory(prefix="tutti-elastic-") as folder:
        settings = ElasticSettings(
            cell.strategy,
            folder,
            epochs,
            # What comes by the clock has to come before the end.
            4 * pause_s if fault.chaos else pause_s,
            fault.event,
            fault.victims,
            step=draw.randrange(1, _STEPS_PER_EPOCH),
            in_step=draw.random() < 0.5,
            newcomers=fault.newcomers,
        )
        supervisor = supervise(train, (settings,), elastic or _elastic(fault), environment, take_in, lab)
        supervisor.diagnosis = DiagnosisLine(said)
        try:
            with redirect_stderr(said):
                seen.results = supervisor.run()
        except WorkerFailed as failed:
            seen.error = str(failed)
        seen.said, seen.epochs = said.getvalue(), epochs
        if seen.ends:
            ended = {number for number, result in enumerate(seen.results) if result is not None}
            seen.missing, seen.repeated = misused(Path(folder), epochs, seen.ends[0].kind, ended)
    return seen


def _elastic(fault: Fault) -> ElasticRun:
    """Return how the workers of a run may come and go under a fault: nobody is replaced but where that is the fault."""
    return ElasticRun(
        minimum=1,
        maximum=WORKERS + 1,
        start=WORKERS,
        restarts=fault.num_lost if fault.newcomers else 0,
        chaos=Chaos.parse(fault.chaos) if fault.chaos else None,
    )


def judge(cell: Cell, seen: SeenRun, wanted: list[float], num_lost: int) -> list[str]:
    """Return what a run has not kept of its promise.

    Args:
        cell: its strategy and transport.
        seen: what was seen of it.
        wanted: the parameters of the undisturbed run, if that is promised.
        num_lost: number of workers that were lost.
    """
    ends = seen.ends
    if cell.promise == EXACT_OR_CHECKPOINT and seen.error and "StateLost" in seen.said:
        return []
    if seen.error or not ends:
        return [seen.error or "no worker has come to the end"]
    problems = []
    if any(each.parameters != ends[0].parameters for each in ends):
        problems.append("workers end with different parameters")
    most_missing = max(each.lost_samples for each in ends) if cell.promise == COUNTED else 0
    if seen.missing > most_missing or seen.repeated:
        problems.append(f"{seen.missing} samples are missing ({most_missing} counted), {seen.repeated} used again")
    if wanted:
        difference = max(abs(got - want) for got, want in zip(ends[0].parameters, wanted, strict=True))
        if difference > TOLERANCE * max(map(abs, wanted)):
            problems.append(f"parameters differ by {difference:.1e} from those of the undisturbed run")
        if any(each.steps != seen.epochs * _STEPS_PER_EPOCH for each in ends):
            problems.append(f"{[each.steps for each in ends]} steps, not {seen.epochs * _STEPS_PER_EPOCH}")
        if any(each.voided_steps > num_lost for each in ends):
            problems.append(f"{[each.voided_steps for each in ends]} void steps, with {num_lost} losses")
    if left := [pid for pid in seen.pids if start_time(pid) != -1]:
        problems.append(f"{len(left)} processes are left")
    return problems


def _wrong_size(fault: Fault, ends: list[ElasticResult]) -> list[str]:
    """Return what is wrong with the number of workers at the end, under a fault whose victims are known."""
    gone = max(len(fault.victims), fault.num_lost)
    size = WORKERS - gone + fault.newcomers
    if (len(ends), ends[0].size) == (size, size):
        return []
    return [f"{len(ends)} workers have come to the end, in a world of {ends[0].size}, of {size}"]


def _without_launcher(cell: Cell) -> list[str]:
    """Start a run in a child process, kill that, and look whether its workers end."""
    with subprocess.Popen(
        [*main_of("tutti.bench.elastic.matrix"), json.dumps(asdict(cell))], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        try:
            pids = [int(launcher.stdout.readline()) for _ in range(WORKERS)]
        finally:
            launcher.kill()
        launcher.wait(_END_S)
    deadline = time.monotonic() + _END_S
    while (left := [pid for pid in pids if start_time(pid) != -1]) and time.monotonic() < deadline:
        time.sleep(0.02)
    remove_orphans()  # The hosts of its lab.
    return [f"{len(left)} processes are left after {_END_S:g} s"] if left else []


def main() -> None:
    """Run the cell in the argument, and write the number of each worker's process. This process is killed then."""
    cell = Cell(**json.loads(sys.argv[1]))
    with lab_for([cell]) as lab:
        launch_run(cell, lab, watch=lambda _, values: print(values["pid"], flush=True))


if __name__ == "__main__":
    main()
