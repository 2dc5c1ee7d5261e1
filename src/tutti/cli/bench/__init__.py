"""`tutti bench`: benchmarks of Tutti beside DDP, Gloo and Open MPI. One module per command."""

import typer

from tutti.cli.bench.allreduce import allreduce
from tutti.cli.bench.auto import auto
from tutti.cli.bench.backend import backend
from tutti.cli.bench.checkpoints import checkpoints
from tutti.cli.bench.checks import checks
from tutti.cli.bench.codecs import codecs
from tutti.cli.bench.collectives import collectives
from tutti.cli.bench.compression import compression
from tutti.cli.bench.control import control
from tutti.cli.bench.elastic import elastic
from tutti.cli.bench.encryption import encryption
from tutti.cli.bench.faults import faults
from tutti.cli.bench.fidelity import fidelity
from tutti.cli.bench.hostile import hostile
from tutti.cli.bench.meshes import meshes
from tutti.cli.bench.overhead import overhead
from tutti.cli.bench.overlap import overlap
from tutti.cli.bench.pipeline import pipeline
from tutti.cli.bench.plan import plan
from tutti.cli.bench.rates import rates
from tutti.cli.bench.startup import startup
from tutti.cli.bench.step import step
from tutti.cli.bench.strategies import strategies

app = typer.Typer(
    help="Benchmark Tutti and its parts on this machine, beside DDP, Gloo and Open MPI.", no_args_is_help=True
)
for _command in (
    step,
    allreduce,
    collectives,
    overhead,
    checks,
    codecs,
    fidelity,
    control,
    faults,
    checkpoints,
    elastic,
    hostile,
    encryption,
    compression,
    strategies,
    plan,
    meshes,
    auto,
    overlap,
    backend,
    pipeline,
    startup,
    rates,
):
    # A command has the name of its function, which is also that of its module.
    app.command(_command.__name__)(_command)
