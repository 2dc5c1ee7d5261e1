"""The report on Malik's experiment: figures, tables and what agrees, from what was simulated and measured."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tutti.recipes.speeds import IMAGES_PER_S
from tutti.recipes.step_times import H200, PUBLISHED_AT, k80_factor, k80_ratios
from tutti.report.scaling import Panels, plot_panels

IMAGES = 1_281_167
"""In an epoch of ImageNet-1k."""
NAMES = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet50": "ResNet-50"}
ALMOST_LINEAR = 0.9
"""An efficiency that a curve over workers would show as nearly straight."""
SAME = 1.1
"""Images a second that differ by less than this factor would lie on one line."""

Rows = list[dict[str, Any]]


def write_report(result: dict[str, Any], folder: Path) -> str:
    """Draw the figures into `folder`; the report, in Markdown."""
    parts = [_head(result), _ring(result, folder), _servers(result, folder), _all(result), _lab(result), _computing()]
    parts.insert(1, _agreement(result))
    text = "\n".join(parts)
    (folder / "report.md").write_text(text)
    return text


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(json.loads((folder / "results.json").read_text()), folder)


def _head(result: dict[str, Any]) -> str:
    plan = result["plan"]
    quick = "\n**The quick form: it shows that all of it runs, and is too small to show more.**\n"
    return f"""# Ring all-reduce and parameter servers on 400 GPUs: Malik et al. (2018) again

Malik et al. (*Detailed performance analysis of distributed TensorFlow on a GPU cluster using deep learning algorithms*,
NYSDS 2018) trained AlexNet, GoogLeNet and ResNet-50 on ImageNet with Horovod, with 64 to 512 images a GPU, on up to
400 GPUs of K80 cards joined by InfiniBand EDR, and with TensorFlow's parameter server beside it.

Here the same is simulated by sizes alone: {plan["workers"][0]} to {plan["workers"][-1]} workers on the preset
`{plan["cluster"]}`, each computing as long as [one GPU of a K80 would](#computing). Compared:
{_strategies(result)}. The ring's buckets are Horovod's, 64 MiB. An epoch is {IMAGES:,} images. Smaller models are
[run for real](#a-real-run-beside-it) as well. Simulated and measured on {result["machine"]}.
`tutti reproduce horovod-scaling` does it again.
{quick if result["quick"] else ""}"""


def _strategies(result: dict[str, Any]) -> str:
    return ", ".join(f"{way['name']} (`{way['text']}`)" for way in result["ways"])


def _agreement(result: dict[str, Any]) -> str:
    lines = [
        "## Where it agrees with what they saw\n",
        "The words of their slides were at hand, not the curves: what they say is compared. That almost linear is "
        f"an efficiency of {ALMOST_LINEAR:.0%} or more, and alike within {SAME - 1:.0%}, is the reading here.\n",
        "| they say | here | |",
        "| --- | --- | --- |",
    ]
    for said, found, agrees in [*_ring_claims(result), *_server_claims(result)]:
        lines.append(f"| {said} | {found} | {'agrees' if agrees else '**differs**'} |")
    return (
        "\n".join(lines)
        + f"""

Where batch sizes differ here, they do so on one GPU already: the network adds little to it, and how much a GPU gains
from a larger batch is the H200's, which has more cores to fill than a K80.

What the simulation cannot have seen: their 400 GPUs sat in 124 hosts and shared the hosts' network cards, while here
every worker has a card of its own, has its images at once and takes exactly as long as its peers. So the efficiencies
here are the most that could be hoped for.
{_memory(result)}
Their fourth picture, the loss of AlexNet over epochs, is not drawn again: sizes have no loss.
"""
    )


def _memory(result: dict[str, Any]) -> str:
    if max(result["plan"]["batches"]) < 512 or "resnet50" not in result["plan"]["models"]:
        return ""
    return """
A GPU of a K80 has 12 GB, and what backward needs of 512 images takes 41 GiB with ResNet-50 and 23 GiB with GoogLeNet as
they are here: how they fitted them is not said.
"""


Claims = list[tuple[str, str, bool]]


def _ring_claims(result: dict[str, Any]) -> Claims:
    claims: Claims = []
    ring, most = result["ways"][0]["name"], max(result["plan"]["workers"])
    for model in result["plan"]["models"]:
        rows = _chosen(result, model=model, way=ring, workers=most)
        low, high = (pick(row["efficiency"] for row in rows) for pick in (min, max))
        found = f"efficiency of {low:.1%} to {high:.1%} with {most} workers"
        claims.append((f"{NAMES[model]}, Horovod: throughput and latency almost linear", found, low >= ALMOST_LINEAR))
        speeds = {row["batch_size"]: row["images_per_s"] for row in rows}
        if len(speeds) == 1:
            continue
        best, ratio = max(speeds, key=speeds.__getitem__), max(speeds.values()) / min(speeds.values())
        alone = [row["images_per_s"] / row["efficiency"] for row in rows]
        found = f"{best} is the fastest, {ratio:.2f} × the slowest; on one GPU {max(alone) / min(alone):.2f} ×"
        if model == "alexnet":
            said = "AlexNet, Horovod: a larger batch is best"
            claims.append((said, found, best == max(speeds) and ratio > SAME))
        else:
            said = f"{NAMES[model]}, Horovod: all batch sizes alike"
            claims.append((said, found, ratio <= SAME))
    return claims


def _server_claims(result: dict[str, Any]) -> Claims:
    """What they say of one dedicated server, where one was simulated."""
    claims: Claims = []
    names = [way["name"] for way in result["ways"] if way["servers"] == 1]
    most, batch_size = max(result["plan"]["workers"]), min(result["plan"]["batches"])
    lowest = {}
    for model in result["plan"]["models"] if names else []:
        rows = _chosen(result, model=model, way=names[0], batch_size=batch_size)
        last = next(row for row in rows if row["workers"] == most)
        lowest[model] = last["efficiency"]
        peak = next(row for row in rows if row["images_per_s"] >= 0.95 * max(it["images_per_s"] for it in rows))
        found = (
            f"{last['efficiency']:.1%} of linear with {most} workers; no more to gain beyond {peak['workers']} "
            f"({batch_size} images each)"
        )
        claims.append((f"{NAMES[model]}, one parameter server: poor", found, last["efficiency"] < 0.5))
    if "alexnet" in lowest and len(lowest) > 1:
        worst = min(lowest, key=lowest.__getitem__)
        said = "one parameter server: the many parameters of AlexNet are the bottleneck"
        claims.append((said, f"{NAMES[worst]} has the lowest efficiency", worst == "alexnet"))
    return claims


def _ring(result: dict[str, Any], folder: Path) -> str:
    ring = result["ways"][0]["name"]
    by_batch = {
        NAMES[model]: {
            f"{batch_size} images a worker": _chosen(result, model=model, way=ring, batch_size=batch_size)
            for batch_size in result["plan"]["batches"]
        }
        for model in result["plan"]["models"]
    }
    title, path = f"Throughput, {ring}", folder / "throughput.png"
    plot_panels(_points(by_batch, _speed), "images a second", title, path, scale="linear")
    plot_panels(_points(by_batch, _epoch_minutes), "minutes an epoch", f"Latency, {ring}", folder / "epoch.png")
    return """## Throughput and latency, as with Horovod

![Images a second over workers, for every batch size](throughput.png)

![Time of an epoch over workers, for every batch size](epoch.png)
"""


def _servers(result: dict[str, Any], folder: Path) -> str:
    batch_size = min(result["plan"]["batches"])
    by_way = {
        NAMES[model]: {
            way["name"]: _chosen(result, model=model, way=way["name"], batch_size=batch_size) for way in result["ways"]
        }
        for model in result["plan"]["models"]
    }
    title = f"{batch_size} images a worker"
    plot_panels(_points(by_way, _speed), "images a second", title, folder / "servers.png")
    return f"""## Ring against parameter servers

![Images a second over workers, ring and parameter servers, {batch_size} images a worker](servers.png)
{_server_words(result, batch_size)}"""


def _server_words(result: dict[str, Any], batch_size: int) -> str:
    """How much faster the ring is than each other way, at the most workers."""
    first, *others = (way["name"] for way in result["ways"])
    most, lines = max(result["plan"]["workers"]), []
    for other in others:
        ratios = []
        for model in result["plan"]["models"]:
            at = {"model": model, "batch_size": batch_size, "workers": most}
            ring, its = (_chosen(result, way=way, **at)[0]["images_per_s"] for way in (first, other))
            ratios.append(f"{ring / its:.2f} with {NAMES[model]}")
        lines.append(f"- With {most} workers, images a second of {first} over those of {other}: {', '.join(ratios)}.")
    return "\n" + "\n".join(lines) + "\n" if lines else ""


def _all(result: dict[str, Any]) -> str:
    workers = result["plan"]["workers"]
    shown = [number for number in (1, 16, 64, 128, 256, 400) if number in workers]
    heads = ["model", "batch", "way", *(f"images/s, {number}" for number in shown)]
    heads += [f"efficiency, {shown[-1]}", *(f"epoch, {number}" for number in (shown[0], shown[-1]))]
    lines = ["## All of it\n", f"| {' | '.join(heads)} |", f"| --- | ---: | --- |{' ---: |' * (len(heads) - 3)}"]
    for model in result["plan"]["models"]:
        for batch_size in result["plan"]["batches"]:
            for way in result["ways"]:
                rows = _chosen(result, model=model, batch_size=batch_size, way=way["name"])
                by_workers = {row["workers"]: row for row in rows}
                cells = [NAMES[model], str(batch_size), way["name"]]
                cells += [_cell(by_workers.get(number), lambda row: f"{row['images_per_s']:,.0f}") for number in shown]
                cells.append(_cell(by_workers.get(shown[-1]), lambda row: f"{row['efficiency']:.1%}"))
                cells += [_cell(by_workers.get(n), lambda row: _long(_epoch_s(row))) for n in (shown[0], shown[-1])]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any] | None, show: Callable[[dict[str, Any]], str]) -> str:
    """What was simulated, or a dash for what was not."""
    return "–" if row is None else show(row)


def _lab(result: dict[str, Any]) -> str:
    plan = result["plan"]
    head = "## A real run beside it\n\n"
    if result["lab_missing"] is not None:
        return f"{head}The lab was not used: {result['lab_missing']}\n"
    lines = [
        f"{head}Small models on four hosts of the lab at {plan['lab_rate']}, and the same steps simulated from a "
        f"calibration there: median milliseconds of {plan['lab_steps']} steps.\n",
        "| model | way | real | simulated | error | same bits |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for row in result["lab"]:
        times = f"{1e3 * row['real_s']:.1f} | {1e3 * row['simulated_s']:.1f} | {row['error']:+.1%}"
        lines.append(f"| {row['model']} | {row['way']} | {times} | {'yes' if row['same_bits'] else 'no'} |")
    return "\n".join(lines) + "\n"


def _computing() -> str:
    ratios = k80_ratios()
    anchors = ", ".join(
        f"{ratio:.1f} from {NAMES[model]} ({IMAGES_PER_S['k80'][model]:g} images a second, batches of "
        f"{PUBLISHED_AT[model]})"
        for model, ratio in ratios.items()
    )
    factor = k80_factor()
    lines = ["| model | batch | forward | backward | step | H200 images/s | K80 images/s |"]
    lines.append(f"| --- |{' ---: |' * 6}")
    for model, times in H200.items():
        for batch_size, time in times.items():
            speed = batch_size / time.seconds
            parts = " | ".join(f"{part:.2f}" for part in time)
            lines.append(f"| {NAMES[model]} | {batch_size} | {parts} | {speed:,.0f} | {speed / factor:,.1f} |")
    table = "\n".join(lines)
    return f"""## Computing

Measured on one NVIDIA H200 (torch 2.11, `python -m tutti.bench.gpu_step_times`): forward, backward and the step of SGD
with momentum of the same models on random images, in milliseconds, medians of 30 by the GPU's clock; float32, TF32
off, because a K80 has none. A K80 has two GPUs, and a worker is one of them: it is taken to be
**{factor:.1f} times as slow as the H200** in every part. That is the geometric mean of what published speeds of one GPU
of a K80 give (TensorFlow team 2017, "Benchmarks", synthetic data):
{anchors}.
It lies between the ratios of the peaks that NVIDIA states: 15 for float32 (67 Tflop/s against 4.4 at boost clock) and
20 for memory (4.8 TB/s against 0.24). GoogLeNet, for which no such speed was found, is scaled by the same. How the
speed grows with the batch is the H200's: a K80 has fewer cores to fill, and may gain less.

{table}
"""


def _chosen(result: dict[str, Any], **wanted: Any) -> Rows:
    return [row for row in result["rows"] if all(row[key] == value for key, value in wanted.items())]


def _points(panels: dict[str, dict[str, Rows]], value: Any) -> Panels:
    return {
        title: {name: [(row["workers"], value(row)) for row in rows] for name, rows in lines.items()}
        for title, lines in panels.items()
    }


def _speed(row: dict[str, Any]) -> float:
    return float(row["images_per_s"])


def _epoch_s(row: dict[str, Any]) -> float:
    return IMAGES / _speed(row)


def _epoch_minutes(row: dict[str, Any]) -> float:
    return _epoch_s(row) / 60


def _long(seconds: float) -> str:
    """Hours, minutes or seconds."""
    if seconds >= 2 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 120 else f"{seconds:.1f} s"
