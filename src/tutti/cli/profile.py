"""`tutti profile`: a training step on this machine, layer by layer."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.recipe_task import Options, parse_options
from tutti.cli.subject import BatchSize, InputShape, Subject, SubjectText, find_subject
from tutti.cluster import format_size, format_time
from tutti.errors import ConfigError
from tutti.plan import LayerProfile, Profile
from tutti.plan.profile import profile as measured


def profile(
    subject: SubjectText,
    batch: BatchSize = None,
    input_shape: InputShape = None,
    option: Options = None,
    device: Annotated[str, typer.Option(help="Where the model is put: cpu, cuda or cuda:1.")] = "cpu",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the profile here.")] = None,
) -> None:
    """Measure a training step: how long each layer takes, when its gradient is ready, and how parallel it is.

    As in: tutti profile mnist-mlp --batch 64, or tutti profile nets:make with a function make() in nets.py.
    """
    check_writable(json_file)
    place = _device(device)
    found = find_subject(subject, parse_options(option), batch, input_shape)
    console = Console()
    with console.status("measuring"):
        result = _measured(found, place)
    _show(found.name, device, result, console)
    about = {"subject": found.name, "device": device, "torch": torch.__version__}
    write_json(json_file, {**about, **asdict(result), "parallelism": result.parallelism})


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"--device takes cpu, cuda or cuda:1, got '{text}'.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {text}: there are {torch.cuda.device_count()} GPUs here.")
    return device


def _measured(found: Subject, device: torch.device) -> Profile:
    if device.type != "cpu":
        found.model.to(device)
    batch: Any = tree_map_only(Tensor, lambda tensor: tensor.to(device), found.batch)
    return measured(found.model, batch, loss=found.loss, optimizer=found.optimizer)


def _show(name: str, device: str, result: Profile, console: Console) -> None:
    console.print(
        f"{name}, {result.num_samples} samples on {device}, {torch.get_num_threads()} threads", highlight=False
    )
    console.print(_layers(result))
    console.print(_whole(result))


def _layers(result: Profile) -> Table:
    """A line for each layer, and one for what is none's."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold", min_width=10)
    table.add_column("kind", overflow="fold", min_width=8)
    for heading in ("forward", "backward", "gradient", "ready", "W/D"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in result.layers:
        table.add_row(escape(layer.name), layer.kind, *_numbers(layer))
    forward_s = result.forward_s - sum(layer.forward_s for layer in result.layers)
    backward_s = result.backward_s - sum(layer.backward_s for layer in result.layers)
    table.add_row("between layers", "", *(format_time(max(0.0, seconds)) for seconds in (forward_s, backward_s)))
    return table


def _numbers(layer: LayerProfile) -> list[str]:
    ready = [""] * 2 if layer.ready_s is None else [format_size(layer.gradient_bytes), format_time(layer.ready_s)]
    parallelism = f"{layer.parallelism:,.0f}" if layer.work else ""
    return [format_time(layer.forward_s), format_time(layer.backward_s), *ready, parallelism]


def _whole(result: Profile) -> Table:
    table = Table(show_header=False)
    step = format_time(result.step_s) if result.step_s else "not measured: no optimiser"
    for label, value in (
        ("forward", format_time(result.forward_s)),
        ("backward", format_time(result.backward_s)),
        ("optimiser", step),
        ("samples/s", f"{result.num_samples / result.seconds:,.0f}"),
        ("gradients", f"{format_size(result.gradient_bytes)} in {len(result.gradients)} parameters"),
        ("memory at most", format_size(result.peak_bytes)),
        ("operations, W", f"{result.work:,.0f}"),
        ("longest chain of them, D", f"{result.depth:,.0f}"),
        ("parallelism, W/D", f"{result.parallelism:,.0f}"),
    ):
        table.add_row(label, value)
    return table
