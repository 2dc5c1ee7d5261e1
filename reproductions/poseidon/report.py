"""The report on Poseidon: figures, tables and a verdict, from what was simulated and measured."""

import json
from pathlib import Path
from typing import Any

from reproductions.poseidon.claims import AWARE, NAMES, PRICED, WAIT_FREE, step_seconds, verdict
from reproductions.poseidon.figures import draw_speed_ups, draw_staleness, draw_traffic
from reproductions.poseidon.lab import NOTHING
from reproductions.poseidon.traffic import (
    RULES,
    TIMES_FULL,
    TIMES_OWNERS,
    beside_formula,
    factors,
    shapes,
    solved,
    widths,
)
from tutti.cluster import format_size, format_speed, format_time

_WORKERS, _ROWS = (2, 4, 8, 16, 32), (32, 64, 128, 256)


def write_report(result: dict[str, Any], folder: Path) -> str:
    """Draw the figures into `folder`; the report, in Markdown."""
    parts = [_head(result), verdict(result), _speed_ups(result, folder), _stale(result, folder)]
    parts += [_traffic(result, folder), _published(), _counted(result), _lab(result), _assumed(result)]
    text = "\n".join(parts)
    (folder / "report.md").write_text(text)
    return text


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(json.loads((folder / "results.json").read_text()), folder)


def _head(result: dict[str, Any]) -> str:
    plan = result["plan"]
    quick = "\n**The quick form: it shows that all of it runs, and is too small to show more.**\n"
    ways = "\n".join(f"- {way['name']}: `{way['text']}`" for way in result["ways"])
    return f"""# Poseidon: exchange while computing, and factors for matrices

Zhang et al. (2015), as Kim (2016) shows them, trained on 8 nodes with a K20C each and 40 GbE between them. Three things
make Poseidon: distributed wait-free back-propagation (DWBP) sends a layer's gradient while those below are still
computed; the structure-aware communication protocol (SACP) sends factors of a fully connected layer's gradient, not the
matrix; and workers may be a bounded number of steps apart (SSP).

Here the same with the strategy [`Poseidon`](../../docs/poseidon.md):

{ways}

Layers that go in full are summed in a ring or whatever is fastest on the link, where theirs went through a server: a
worker then sends as much, and no server has more to do than another. What takes virtual time is
[assumed](#what-is-assumed). {plan["workers"][0]} to {plan["workers"][-1]} workers, simulated by sizes alone on
{result["machine"]}. `tutti reproduce poseidon` does it again.
{quick if result["quick"] else ""}"""


def _speed_ups(result: dict[str, Any], folder: Path) -> str:
    lines = ["## Speed-up\n"]
    for rate in result["plan"]["rates"]:
        draw_speed_ups(result, rate, folder / f"speed-up-{rate}.png")
        lines.append(f"![Speed-up over workers, links of {rate}](speed-up-{rate}.png)\n")
    workers = [number for number in result["plan"]["workers"] if number > 1]
    lines += [
        "Images a second of so many workers, in those of one; and what a worker sends in a step with the most:\n",
        f"| model | link | | {' | '.join(str(number) for number in workers)} | sent |",
        f"| --- | --- | --- |{' ---: |' * (len(workers) + 1)}",
    ]
    for model in result["plan"]["models"]:
        for rate in result["plan"]["rates"]:
            for way in result["ways"]:
                found = _found(result, model, rate, way["name"])
                cells = [f"{found[number]['speed_up']:.2f}" if number in found else "–" for number in workers]
                sent = format_size(found[max(found)]["bytes_per_worker"])
                lines.append(f"| {NAMES[model]} | {rate} | {way['name']} | {' | '.join(cells)} | {sent} |")
    return "\n".join(lines) + "\n" + _words(result)


def _found(result: dict[str, Any], model: str, rate: str, way: str) -> dict[int, dict[str, Any]]:
    """By number of workers."""
    return {
        row["workers"]: row for row in result["rows"] if (row["model"], row["rate"], row["way"]) == (model, rate, way)
    }


def _words(result: dict[str, Any]) -> str:
    """Where the published rule takes longer than to send all in full, and whether a price would have known."""
    slower = []
    for model in result["plan"]["models"]:
        for rate in result["plan"]["rates"]:
            full, aware, priced = (_found(result, model, rate, way) for way in (WAIT_FREE, AWARE, PRICED))
            worse = [number for number in aware if aware[number]["speed_up"] < 0.98 * full[number]["speed_up"]]
            if worse:
                here = ", ".join(str(number) for number in worse)
                kept = [n for n in worse if n in priced and priced[n]["speed_up"] >= 0.98 * full[n]["speed_up"]]
                known = f"; the price avoids it with {', '.join(map(str, kept))}" if kept else ""
                slower.append(f"- {NAMES[model]} at {rate}, with {here} workers{known}.")
    if not slower:
        return "\nSACP is nowhere slower than DWBP alone.\n"
    return (
        "\nSACP is slower than DWBP alone, because a broadcast makes every worker multiply what all have sent, or "
        "because the published formula counts bytes of a server, and a ring has none:\n\n" + "\n".join(slower) + "\n"
    )


def _stale(result: dict[str, Any], folder: Path) -> str:
    draw_staleness(result, folder / "staleness.png")
    plan, (every, length) = result["plan"], result["pauses"]
    bounds = plan["bounds"]
    lines = [f"| | {' | '.join(f's = {bound}' for bound in bounds)} |", f"| --- |{' ---: |' * len(bounds)}"]
    for late, words in (("even", "all alike"), ("one slow", "one slow worker"), ("pauses", "pauses at random")):
        seconds = step_seconds(result, late)
        lines.append(f"| {words} | {' | '.join(format_time(seconds[bound]) for bound in bounds)} |")
    return f"""## Staleness

Workers may be s steps apart under `poseidon:ssp=s`, which by sizes alone is `ps:ssp=s`, servers on every worker. Here
with AlexNet on {plan["stale_workers"]} workers and links of {plan["stale_rate"]}, by sizes alone: the time of a step,
until all workers have made {plan["stale_steps"]}. *One slow*: the last worker takes {result["slow"]:g} times as long.
*Pauses*: a worker stops after {every} steps of computing, for {length}, on average, at random
({plan["stale_seeds"]} {"seed" if plan["stale_seeds"] == 1 else "seeds"}).

![Time of a step over the bound of staleness](staleness.png)

{chr(10).join(lines)}

{_gained(result)}
A bound makes up for workers that are late by turns. Behind one that is always late, the others come to wait at any
bound: it only takes them longer to get there, and no step can take less than the slow one computes.
What staleness costs in accuracy is in [another report](../staleness/report.md).
"""


def _gained(result: dict[str, Any]) -> str:
    most, gains = max(result["plan"]["bounds"]), []
    for late, words in (("even", "all alike"), ("one slow", "one slow"), ("pauses", "pauses")):
        seconds = step_seconds(result, late)
        gains.append(f"{seconds[0] / seconds[most]:.2f} ({words})")
    return f"A bound of {most} makes steps shorter than lockstep by a factor of {', '.join(gains)}."


def _traffic(result: dict[str, Any], folder: Path) -> str:
    draw_traffic(result, folder / "traffic.png")
    lines = ["| | convolutions, published | here | fully connected, published | here |", "| --- |" + " ---: |" * 4]
    for row in result["parameters"]:
        cells = []
        for place in (0, 1):
            for numbers in (row["published"], row["here"]):
                cells.append(f"{numbers[place] / 1e6:.2f} M, {numbers[place] / sum(numbers):.2%}")
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    first = result["layers"][0]
    lines += [
        "",
        "AlexNet here has one tower, so its convolutions are wider than Caffe's, which are split in two groups. VGG-16 "
        "is Simonyan and Zisserman's D; its convolutions have twice the parameters that the slides give, and which "
        "network those are of is not said.\n",
        "![Numbers on the wire of every protocol, layer by layer](traffic.png)\n",
        f"Million numbers on the wire in a step of all {first['workers']} workers with {first['layer']['rows']} "
        "samples each, by the published formulas; and MiB that a worker sends as `Poseidon` does it:\n",
        "| | layer | 2PMN | PK(M+N) + PMN | (P-1)²K(M+N) | SACP takes | full | owners | broadcast |",
        "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for row in result["layers"]:
        layer, ways = row["layer"], ("full", "owners", "broadcast")
        numbers = " | ".join(f"{row['published_floats'][way] / 1e6:,.1f}" for way in ways)
        sent = " | ".join(f"{row['sent_bytes'][way] / 2**20:,.1f}" for way in ways)
        name = f"{layer['name']}, {layer['num_out']} × {layer['num_in']}"
        lines.append(f"| {row['model']} | {name} | {numbers} | {row['sacp']} | {sent} |")
    return "## Traffic, layer by layer\n\n" + "\n".join(lines) + "\n"


def _published() -> str:
    """For which workers and batches the published factors come out."""
    workers, ratio = solved()
    by_name = {shape.name: shape for shape in shapes("AlexNet", 256)}
    fc7 = by_name["fc7"]
    rows = fc7.num_out * fc7.num_in / (fc7.num_out + fc7.num_in) / ratio
    lines = [f"| workers | {' | '.join(f'K = {number}' for number in _ROWS)} | all three, K = 256 |"]
    lines.append(f"| ---: |{' ---: |' * (len(_ROWS) + 1)}")
    for number in _WORKERS:
        cells = []
        for num_rows in _ROWS:
            (shape,) = (each for each in shapes("AlexNet", num_rows) if each.name == "fc7")
            cells.append("{:.1f}, {:.1f}".format(*factors([shape], number)))
        cells.append("{:.1f}, {:.1f}".format(*factors(list(by_name.values()), number)))
        lines.append(f"| {number} | {' | '.join(cells)} |")
    return f"""## {TIMES_FULL:g} times, and {TIMES_OWNERS:g} times

Factors to all are said to be {TIMES_FULL:g} times faster than server and clients, and {TIMES_OWNERS:g} times than
Microsoft's Adam; for which P and K is not said. Two factors and two formulas leave P = {workers:.2f} and
MN / K(M+N) = {ratio:.2f}: for a layer of 4096 × 4096, K = {rows:.0f}. Both come out, in all the digits there are, as
**numbers sent for fc7 by 4 workers with batches of 256**, and neither does for the 8 nodes that they trained on. How
many times less a broadcast sends than server and clients, and than Adam's scheme, for fc7:

{chr(10).join(lines)}

A broadcast grows with the square of P, the others with P: it loses to Adam's scheme from some P on, as SACP knows.
"""


def _counted(result: dict[str, Any]) -> str:
    lines = [
        "## Counted beside the formula\n",
        "AlexNet's fully connected layers alone: what a worker sends in a step, simulated by sizes alone and counted, "
        "and what the formulas of [docs/poseidon.md](../../docs/poseidon.md) say, with biases in a ring.\n",
        "| rule | workers | K | counted | formula | |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["bytes"]:
        lines.append(_byte_row(row))
    worst = max(abs(row["error"]) for row in result["bytes"])
    lines.append(f"\nThe largest difference is {worst:.2%}.")
    return "\n".join(lines) + "\n"


def _byte_row(row: dict[str, Any]) -> str:
    sizes = f"{format_size(row['sent_bytes'])} | {format_size(row['formula_bytes'])}"
    return f"| {row['rule']} | {row['workers']} | {row['rows']} | {sizes} | {row['error']:+.2%} |"


def _lab(result: dict[str, Any]) -> str:
    plan, head = result["plan"], "## In the lab\n"
    if not result["lab"]:
        return f"{head}\nThe lab was not used: {result['lab_missing']}\n"
    names = {way["text"]: way["name"] for way in result["ways"]}
    lines = [
        head,
        f"Real hosts at {plan['lab_rate']}, small stand-ins: of AlexNet the fully connected layers alone, "
        f"{plan['lab_narrower']} times as narrow; GoogLeNet whole, on images of 64 × 64; few samples a worker. All "
        "hosts share the cores of one machine, so a speed-up is the number of workers times what is left of the speed "
        "that as many have when they exchange nothing.\n",
        f"| model | workers | batch | {' | '.join(names.values())} |",
        f"| --- | ---: | ---: |{' ---: |' * len(names)}",
    ]
    for row in result["lab"]:
        ups = [f"{row['workers'] * row['seconds'][NOTHING] / row['seconds'][text]:.2f}" for text in names]
        lines.append(f"| {NAMES[row['model']]} | {row['workers']} | {row['batch']} | {' | '.join(ups)} |")
    lines += ["\nWhat a worker sent in a step of AlexNet's layers, beside the formula:\n"]
    lines += ["| rule | workers | K | sent | formula | |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    shape = widths(plan["lab_narrower"])
    for row in result["lab"]:
        if row["model"] != "alexnet":
            continue
        for rule in RULES:
            sent = row["sent_bytes"][f"poseidon:rule={rule}"]
            lines.append(_byte_row(beside_formula(rule, sent, shape, row["workers"], row["batch"])))
    return "\n".join(lines) + "\n"


def _assumed(result: dict[str, Any]) -> str:
    lines = ["| model | batch | images/s | a step | reached | buckets |", "| --- |" + " ---: |" * 5]
    for model, made in result["computing"].items():
        cells = f"{int(made['batch_size'])} | {made['images_per_s']:,.0f} | {format_time(made['step_s'])}"
        reached, bucket = format_speed(made["flops"]), format_size(made["bucket_bytes"])
        lines.append(f"| {NAMES[model]} | {cells} | {reached} | {bucket} |")
    return f"""## What is assumed

A worker computes as long as a K20 would with Caffe and cuDNN, forward a third of it. AlexNet: a K40 trains 5,120 images
in 19.2 s with cuDNN and 26.5 s without, a K20 in 36.0 s without (BVLC 2014, "Performance and Hardware Configuration"),
so it is taken to be 26.5 / 36.0 as fast. GoogLeNet: 1,688.8 ms for 128 images on a K40 (readme of Caffe's model), and
the same ratio. `cifar-quick`: as many operations a second as AlexNet, which is likely more than such small layers
reach. Batches are those of Caffe's solvers, each worker's own: more workers train more images in a step.

{chr(10).join(lines)}

Products of others' factors are made at the same speed, when backward is over; a GPU is faster at large products than at
what else there is in a network, so SACP may lose less by them than here. Links have {result["latency"]} of latency and
their whole rate; every worker has its own, and its gradients are in the network at once: what a step of theirs spent on
copies between GPU and host, on disks and on Caffe's own waiting is in none of these numbers.
"""
