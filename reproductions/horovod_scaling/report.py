"""The report on the reproduction of Malik et al. (2018): claims, tables and figures, from the stored results."""

from collections.abc import Callable
from pathlib import Path

from reproductions.horovod_scaling.claims import ALMOST_LINEAR, MODEL_NAMES, POOR, SAME_SPEED, claims
from reproductions.horovod_scaling.results import HorovodResults, SimulatedScaling
from reproductions.records import load
from reproductions.report import Report, Section, bullets, figure, plural, prose, table
from tutti.recipes.speeds import IMAGES_PER_S
from tutti.recipes.step_times import H200, PUBLISHED_AT, k80_factor, k80_ratios
from tutti.report.scaling import Panels, plot_panels

EPOCH_IMAGES = 1_281_167
"""Images in an epoch of ImageNet-1k."""
_SHOWN_WORKERS = (1, 16, 64, 128, 256, 400)


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(HorovodResults, folder / "results.json"), folder)


def write_report(results: HorovodResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    config = results.config
    methods = ", ".join(f"{method.name} (`{method.strategy}`)" for method in results.methods)
    return Report(
        name="horovod-scaling",
        title="Ring all-reduce and parameter servers on 400 GPUs (Malik et al. 2018)",
        source="Malik et al., *Detailed performance analysis of distributed TensorFlow on a GPU cluster using deep "
        "learning algorithms*, NYSDS 2018. The text of the slides was available, not the curves.",
        machine=results.machine,
        links=f"Simulation: the preset `{config.cluster}`, one network card per worker. Lab: four hosts, links shaped "
        f"to {config.lab_rate}.",
        time="Virtual in the simulation, with the compute time of [one GPU of a K80](#compute-times). "
        "[The lab](#check-against-real-runs) is wall-clock.",
        quick=results.quick,
        introduction=[
            """Malik et al. trained AlexNet, GoogLeNet and ResNet-50 on ImageNet with Horovod, with 64 to 512 images
            per GPU, on up to 400 GPUs of K80 cards connected by InfiniBand EDR. For comparison they used TensorFlow's
            parameter server.""",
            f"""Here the same training is simulated by sizes alone, without computing gradients, for
            {config.workers[0]} to {config.workers[-1]} workers: {methods}. Buckets are 64 MiB, as in Horovod. An epoch
            has {EPOCH_IMAGES:,} images. Small models are also trained on real hosts.""",
        ],
        criteria=f"""The slides give statements, not numbers. Here "almost linear" means an efficiency of at least
        {ALMOST_LINEAR:.0%}, "equally fast" within {SAME_SPEED - 1:.0%}, and "poor" an efficiency below {POOR:.0%}.""",
        claims=claims(results),
        sections=[
            _all_reduce_section(results, folder),
            _servers_section(results, folder),
            _numbers_section(results),
            _lab_section(results),
            _compute_section(),
        ],
        limits=_limits(results),
    ).write(folder)


def _limits(results: HorovodResults) -> list[str]:
    limits = [
        """Their 400 GPUs were in 124 hosts and shared the hosts' network cards. Here every worker has a card of its
        own, receives its images without delay and computes exactly as long as the others. The efficiencies here are
        therefore upper bounds.""",
        """Where batch sizes differ in speed, they do so on one GPU already. The gain from a larger batch is the
        H200's, which has more cores to fill than a K80.""",
    ]
    if max(results.config.batches) >= 512 and "resnet50" in results.config.models:
        limits.append(
            """A GPU of a K80 has 12 GB. The activations of 512 images take 41 GiB with ResNet-50 and 23 GiB with
            GoogLeNet as implemented here. The slides do not say how they were made to fit."""
        )
    return [*limits, "Their figure of AlexNet's loss over epochs is not reproduced: this simulation has no loss."]


def _all_reduce_section(results: HorovodResults, folder: Path) -> Section:
    ring = results.methods[0].name
    panels = {
        MODEL_NAMES[model]: {
            f"{batch_size} images per worker": results.select(model=model, method=ring, batch_size=batch_size)
            for batch_size in results.config.batches
        }
        for model in results.config.models
    }
    speeds, minutes = _points(panels, _images_per_s), _points(panels, _epoch_minutes)
    plot_panels(speeds, "images per second", f"Throughput, {ring}", folder / "throughput.png", scale="linear")
    plot_panels(minutes, "minutes per epoch", f"Time per epoch, {ring}", folder / "epoch.png")
    return Section(
        "Throughput and latency of ring all-reduce",
        [
            figure("Images per second over workers, for every batch size", "throughput.png"),
            figure("Time per epoch over workers, for every batch size", "epoch.png"),
        ],
    )


def _servers_section(results: HorovodResults, folder: Path) -> Section:
    batch_size = min(results.config.batches)
    panels = {
        MODEL_NAMES[model]: {
            method.name: results.select(model=model, method=method.name, batch_size=batch_size)
            for method in results.methods
        }
        for model in results.config.models
    }
    title = f"{batch_size} images per worker"
    plot_panels(_points(panels, _images_per_s), "images per second", title, folder / "servers.png")
    description = f"Images per second over workers, ring and parameter servers, {batch_size} images per worker"
    return Section(
        "Ring all-reduce and parameter servers",
        [figure(description, "servers.png"), bullets(_speed_ratios(results, batch_size))],
    )


def _speed_ratios(results: HorovodResults, batch_size: int) -> list[str]:
    """Return how much faster the ring is than every other method, at the largest number of workers."""
    first, *others = (method.name for method in results.methods)
    most, lines = max(results.config.workers), []
    for other in others:
        ratios = []
        for model in results.config.models:
            ring, row = (
                results.select(model=model, method=name, batch_size=batch_size, workers=most)[0]
                for name in (first, other)
            )
            ratios.append(f"{ring.images_per_s / row.images_per_s:.2f} × with {MODEL_NAMES[model]}")
        lines.append(f"With {most} workers, throughput of {first} relative to {other}: {', '.join(ratios)}.")
    return lines


def _numbers_section(results: HorovodResults) -> Section:
    shown = [number for number in _SHOWN_WORKERS if number in results.config.workers]
    first, last = shown[0], shown[-1]
    heads = ["model", "method", "batch size", *(f"images/s, {plural(number, 'worker')}" for number in shown)]
    heads += [f"efficiency, {last} workers", f"epoch, {first} worker", f"epoch, {last} workers"]
    rows = []
    for model in results.config.models:
        for batch_size in results.config.batches:
            for method in results.methods:
                found = results.select(model=model, batch_size=batch_size, method=method.name)
                by_workers = {row.workers: row for row in found}
                cells = [MODEL_NAMES[model], method.name, str(batch_size)]
                cells += [_cell(by_workers.get(number), lambda row: f"{row.images_per_s:,.0f}") for number in shown]
                cells.append(_cell(by_workers.get(last), lambda row: f"{row.efficiency:.1%}"))
                cells += [_cell(by_workers.get(number), _epoch_text) for number in (first, last)]
                rows.append(cells)
    note = "Virtual time. A dash marks combinations that were not simulated."
    return Section("All simulations", [note, table(heads, rows, num_text_columns=2)])


def _cell(row: SimulatedScaling | None, show: Callable[[SimulatedScaling], str]) -> str:
    return "–" if row is None else show(row)


def _lab_section(results: HorovodResults) -> Section:
    config, title = results.config, "Check against real runs"
    if results.lab_missing is not None:
        return Section(title, [f"The lab was not used: {results.lab_missing}"])
    rows = []
    for row in results.lab:
        times = [f"{1e3 * row.real_s:.1f}", f"{1e3 * row.simulated_s:.1f}", f"{row.error:+.1%}"]
        rows.append([row.model, row.method, *times, "yes" if row.same_bits else "no"])
    return Section(
        title,
        [
            prose(f"""Small models on four hosts of the lab at {config.lab_rate}, and the same steps simulated with
            links and compute times measured there. Milliseconds, median of {config.lab_steps} steps."""),
            table(("model", "method", "real", "simulated", "error", "identical parameters"), rows, num_text_columns=2),
        ],
    )


def _compute_section() -> Section:
    factor = k80_factor()
    anchors = ", ".join(
        f"{ratio:.1f} from {MODEL_NAMES[model]} ({IMAGES_PER_S['k80'][model]:g} images per second, batch size "
        f"{PUBLISHED_AT[model]})"
        for model, ratio in k80_ratios().items()
    )
    rows = []
    for model, times in H200.items():
        for batch_size, time in times.items():
            speed = batch_size / time.seconds
            parts = [f"{part:.2f}" for part in time]
            rows.append([MODEL_NAMES[model], str(batch_size), *parts, f"{speed:,.0f}", f"{speed / factor:,.1f}"])
    heads = ("model", "batch size", "forward", "backward", "optimiser", "H200 images/s", "K80 images/s")
    return Section(
        "Compute times",
        [
            prose("""Forward, backward and SGD with momentum of the same models were measured on one NVIDIA H200 with
            random images (torch 2.11; `python -m tutti.bench.gpu_step_times`). Milliseconds, median of 30 by the GPU's
            clock. Precision is float32 without TF32, which a K80 lacks."""),
            prose(f"""A K80 card has two GPUs, and a worker is one of them. It is taken to be **{factor:.1f} times as
            slow as the H200** in every part. This is the geometric mean of the ratios that published speeds of one K80
            GPU give (TensorFlow team 2017, "Benchmarks", synthetic data): {anchors}."""),
            prose("""The factor lies between the ratios of NVIDIA's stated peaks: 15 for float32 (67 and 4.4 Tflop/s at
            boost clock) and 20 for memory bandwidth (4.8 and 0.24 TB/s). No published speed was found for GoogLeNet,
            which is scaled by the same factor. How the speed grows with the batch size is the H200's: a K80 has fewer
            cores to fill, and may gain less."""),
            table(heads, rows, num_text_columns=1),
        ],
    )


def _points(panels: dict[str, dict[str, list[SimulatedScaling]]], value: Callable[[SimulatedScaling], float]) -> Panels:
    return {
        title: {name: [(row.workers, value(row)) for row in rows] for name, rows in lines.items()}
        for title, lines in panels.items()
    }


def _images_per_s(row: SimulatedScaling) -> float:
    return row.images_per_s


def _epoch_minutes(row: SimulatedScaling) -> float:
    return EPOCH_IMAGES / row.images_per_s / 60


def _epoch_text(row: SimulatedScaling) -> str:
    """Return the time of an epoch in hours, minutes or seconds."""
    seconds = EPOCH_IMAGES / row.images_per_s
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
