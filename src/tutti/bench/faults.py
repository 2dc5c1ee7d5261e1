"""`tutti bench faults`: inject faults into one rank of a training job; look whether the right rank and cause are named.

How it works. Each case is a launch of its own, in real processes: on this machine, or on the hosts of a lab. All
launches are made by one child process (`main`), because one kind of fault stops the launcher. The child writes one line
of JSON per case. A lab is made once for all cases; links that a fault has cut are put up again after it.
"""

import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import groupby

from tutti.bench.fault_kinds import FaultCase, train
from tutti.bench.fault_outcomes import FaultRecord, Outcome, judge
from tutti.coordination.description import start_time
from tutti.errors import WorkerFailed
from tutti.launch.diagnosis_line import DiagnosisLine
from tutti.launch.interpreter import main_of
from tutti.launch.lab import namespaces
from tutti.launch.lab.lab import Lab, LabSpec
from tutti.launch.local import supervise

STRATEGIES = {
    "native": "shared_memory",
    "ring": "sockets",
    "bmuf:every=4": "shared_memory",
    "ps:ssp=2": "shared_memory",
    "gossip": "sockets",
}
"""Strategies and the transport that each runs over."""

LAB_STRATEGIES = ("ring", "bmuf:every=4", "gossip")
"""Strategies for the hosts of a lab, over sockets."""

PATIENCE_S = 3.0


def cases(
    kinds: Sequence[str], strategies: Sequence[str], repeats: int, seed: int = 0, lab: str | None = None
) -> list[FaultCase]:
    """The faults to inject, in random order; victims and steps are drawn from `seed`."""
    draw = random.Random(seed)
    workers = 3 if lab is None else LabSpec.parse(lab).num_workers
    found = [
        FaultCase(
            kind,
            strategy,
            STRATEGIES[strategy] if lab is None else "sockets",
            draw.randrange(workers),
            draw.randrange(15, 30),
            workers=workers,
            lab=lab,
        )
        for kind in kinds
        for strategy in strategies
        for _ in range(repeats)
    ]
    draw.shuffle(found)
    return found


def measure(chosen: Sequence[FaultCase], done: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    """Run all cases; `done` is called with each outcome."""
    outcomes = []
    with subprocess.Popen(
        [*main_of("tutti.bench.faults"), json.dumps([asdict(case) for case in chosen])],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        # So that a shell does not take the child that stops itself for a job that was stopped.
        start_new_session=True,
        env={**os.environ, "TUTTI_PATIENCE": f"{PATIENCE_S:g}s"},
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:  # Ended by the child, all of whose waits end.
                outcome = Outcome(**json.loads(line))
                outcomes.append(outcome)
                done(outcome)
        except BaseException:
            process.kill()
            raise
    return outcomes


def main() -> None:
    """Run the cases in the argument, and write an outcome per line."""
    os.environ["TUTTI_BENCH_LAUNCHER"] = str(os.getpid())
    chosen = [FaultCase(**fields) for fields in json.loads(sys.argv[1])]
    for spec, group in groupby(chosen, lambda case: case.lab):
        with ExitStack() as stack:
            lab = None if spec is None else stack.enter_context(Lab(LabSpec.parse(spec)))
            for case in group:
                print(json.dumps(asdict(_run(case, lab))), flush=True)


def _run(case: FaultCase, lab: Lab | None = None) -> Outcome:
    record = _observe(case, lab)
    outcome = judge(record)
    outcome.left = sum(start_time(pid) != -1 for pid in record.pids)
    if case.kind == "link cut" and lab is not None:
        namespaces.batch("ip", ["link set eth0 up"], lab.placement.namespace(case.victim))
    return outcome


def _observe(case: FaultCase, lab: Lab | None = None) -> FaultRecord:
    """Train with a fault, and write down all that is seen of it."""
    record = FaultRecord(case)
    workers = case.workers if lab is None else None
    supervisor = supervise(train, (case,), workers, {"TUTTI_TRANSPORT": case.transport}, record.watch, lab)
    supervisor.diagnosis = DiagnosisLine(io.StringIO(), record.found)
    try:
        record.results = supervisor.run()
    except WorkerFailed as failed:
        record.error, record.failed_rank = str(failed), failed.rank
    record.ended_s, record.losses = time.monotonic(), supervisor.losses
    return record


@dataclass(frozen=True)
class Control:
    """A run in which nothing goes wrong."""

    strategy: str
    steps: int
    false_alarms: int
    said: list[str]
    """What was reported all the same."""


def undisturbed(strategy: str, steps: int) -> Control:
    """Train without a fault, and count what is reported all the same."""
    record = _observe(FaultCase("none", strategy, STRATEGIES[strategy], 0, 0, steps))
    said = [str(each) for _, each in record.findings] + ([record.error] if record.error else [])
    return Control(strategy, steps, len(said), said[:10])


@contextmanager
def busy_processes(number: int) -> Iterator[None]:
    """Keep processors busy with other programs, as many as there are processes here."""
    with ExitStack() as stack:
        for _ in range(number):
            process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"])
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
        yield


if __name__ == "__main__":
    main()
