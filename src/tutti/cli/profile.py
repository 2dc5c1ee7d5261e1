"""`tutti profile`: the time of a training step on this machine, layer by layer."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tutti.cli.json_file import check_writable, write_json
from tutti.cli.options import InputShape, JsonFile, ModelText, RecipeOptions, parse_recipe_options
from tutti.cluster import format_size, format_time
from tutti.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from tutti.cli.model_argument import LoadedModel
    from tutti.plan import LayerProfile, Profile


def profile(
    model: ModelText,
    batch: Annotated[
        int | None, typer.Option("--batch", help="Samples per step. Default: the recipe's or the factory's own.")
    ] = None,
    input_shape: InputShape = None,
    option: RecipeOptions = None,
    device: Annotated[str, typer.Option(help="Device to train on: cpu, cuda or cuda:1.")] = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Measure a training step: the time of each layer, when its gradient is ready, and its parallelism.

    Examples: tutti profile mnist-mlp --batch 64; tutti profile nets:make, with a function make() in nets.py.
    """
    import torch

    from tutti.cli.model_argument import load_model

    check_writable(json_file)
    torch_device = _parse_device(device)
    loaded = load_model(model, parse_recipe_options(option), batch, input_shape)
    console = Console()
    with console.status(f"measuring a step of {loaded.name}"):
        result = _measure(loaded, torch_device)
    _show(loaded.name, device, result, console)
    about = {"subject": loaded.name, "device": device, "torch": torch.__version__}
    write_json(json_file, {**about, **asdict(result), "parallelism": result.parallelism})


def _parse_device(text: str) -> "torch.device":
    """The device of `--device`, which must exist here."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError:
        raise ConfigError(f"--device takes cpu, cuda or cuda:1, got '{text}'.") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {text} does not exist: there are {torch.cuda.device_count()} GPUs here.")
    return device


def _measure(loaded: "LoadedModel", device: "torch.device") -> "Profile":
    """Move model and batch to the device, and measure a step there."""
    from torch import Tensor
    from torch.utils._pytree import tree_map_only

    from tutti.plan.profile import profile as profile_model

    if device.type != "cpu":
        loaded.model.to(device)
    batch: Any = tree_map_only(Tensor, lambda tensor: tensor.to(device), loaded.batch)
    return profile_model(loaded.model, batch, loss=loaded.loss, optimizer=loaded.optimizer)


def _show(name: str, device: str, result: "Profile", console: Console) -> None:
    """Print the tables, and a doubt about the measurement if its repetitions differ too much."""
    import torch

    console.print(
        f"{name}, {result.num_samples} samples on {device}, {torch.get_num_threads()} threads", highlight=False
    )
    console.print(_layer_table(result))
    console.print(_step_table(result))
    if result.spread is not None and result.spread.doubt:
        console.print(f"[yellow]{result.spread.doubt}[/]", highlight=False)


def _layer_table(result: "Profile") -> Table:
    """A row per layer, and one for the time between layers."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.caption = (
        "gradient: its bytes; ready: when it is complete, from the start of backward; W/D: parallelism, the work (all "
        "operations) divided by the depth (their longest chain)"
    )
    table.add_column("layer", overflow="fold", min_width=10)
    table.add_column("kind", overflow="fold", min_width=8)
    for heading in ("forward", "backward", "gradient", "ready", "W/D"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in result.layers:
        table.add_row(escape(layer.name), layer.kind, *_cells(layer))
    # What no layer accounts for: functions between modules, and the overhead of the hooks.
    forward_s = result.forward_s - sum(layer.forward_s for layer in result.layers)
    backward_s = result.backward_s - sum(layer.backward_s for layer in result.layers)
    table.add_row("between layers", "", *(format_time(max(0.0, seconds)) for seconds in (forward_s, backward_s)))
    return table


def _cells(layer: "LayerProfile") -> list[str]:
    ready = [""] * 2 if layer.ready_s is None else [format_size(layer.gradient_bytes), format_time(layer.ready_s)]
    parallelism = f"{layer.parallelism:,.0f}" if layer.work else ""
    return [format_time(layer.forward_s), format_time(layer.backward_s), *ready, parallelism]


def _step_table(result: "Profile") -> Table:
    """The whole step: times, memory, work and depth."""
    table = Table(show_header=False)
    step = format_time(result.step_s) if result.step_s else "not measured: the factory has no optimiser"
    for label, value in (
        ("forward", format_time(result.forward_s)),
        ("backward", format_time(result.backward_s)),
        ("optimiser", step),
        ("forward and backward", str(result.spread)),
        ("samples/s", f"{result.num_samples / result.seconds:,.0f}"),
        ("gradients", f"{format_size(result.gradient_bytes)} in {len(result.gradients)} parameters"),
        ("peak memory", format_size(result.peak_bytes)),
        ("work W, operations", f"{result.work:,.0f}"),
        ("depth D, longest chain of operations", f"{result.depth:,.0f}"),
        ("parallelism, W/D", f"{result.parallelism:,.0f}"),
    ):
        table.add_row(label, value)
    return table
