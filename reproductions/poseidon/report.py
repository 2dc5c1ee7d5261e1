"""The report on Poseidon: claims, tables and figures, from the stored results."""

from pathlib import Path

from reproductions.poseidon.claims import (
    COST_BASED,
    DWBP,
    DWBP_SACP,
    FASTER,
    LATE_WORKERS,
    MODEL_NAMES,
    SAME,
    claims,
)
from reproductions.poseidon.figures import draw_speed_ups, draw_staleness
from reproductions.poseidon.results import NO_EXCHANGE, PoseidonResults
from reproductions.poseidon.traffic import RULES, counted_traffic, widths
from reproductions.poseidon.traffic_report import (
    TRAFFIC_HEADS,
    counted_section,
    factors_section,
    layers_section,
    traffic_row,
)
from reproductions.records import load
from reproductions.report import Report, Section, bullets, figure, plural, prose, table
from tutti.cluster import format_size, format_speed, format_time

_NOT_SLOWER = 0.98
"""Ratio of speeds below which one is slower."""


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(PoseidonResults, folder / "results.json"), folder)


def write_report(results: PoseidonResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    config = results.config
    variants = "; ".join(f"{variant.name}: `{variant.strategy}`" for variant in results.variants)
    return Report(
        name="poseidon",
        title="Poseidon: wait-free back-propagation, sufficient factors and bounded staleness (Zhang et al. 2015)",
        source="Zhang et al. (2015), as presented by Kim (2016). The text of the slides and the abstract of the paper "
        "were available, not the curves.",
        machine=f"Simulated and measured on {results.machine}.",
        links=f"Simulation: {' and '.join(config.rates)} with {results.latency} latency, one link per worker. Lab: "
        f"links shaped to {config.lab_rate}.",
        time="Virtual in the simulations, with the [assumed compute time of a K20](#assumptions). [The lab](#lab) is "
        "wall-clock.",
        quick=results.quick,
        introduction=[
            """Zhang et al. trained on 8 nodes with one K20C each, connected by 40 GbE. Poseidon has three parts.
            Distributed wait-free back-propagation (DWBP) sends a layer's gradient while the layers below are still
            being computed. The structure-aware communication protocol (SACP) sends factors of a fully connected layer's
            gradient instead of the matrix. Workers may be a bounded number of steps apart (SSP).""",
            f"""Here the strategy [`Poseidon`](../../docs/poseidon.md) is simulated by sizes alone, without computing
            gradients, for {config.workers[0]} to {config.workers[-1]} workers. Variants: {variants}. Layers that are
            sent in full are summed in a ring, or by whichever algorithm is fastest on the link, where the source used a
            server. A worker then sends as much, and no server is a bottleneck.""",
        ],
        criteria=f"""Values are the same within {SAME - 1:.0%}; faster means by at least {FASTER - 1:.0%}. Claims are
        judged at the source's link rate where it was simulated.""",
        claims=claims(results),
        sections=[
            _speed_up_section(results, folder),
            _staleness_section(results, folder),
            layers_section(results, folder),
            factors_section(),
            counted_section(results),
            _lab_section(results),
            _assumptions_section(results),
        ],
    ).write(folder)


def _speed_up_section(results: PoseidonResults, folder: Path) -> Section:
    blocks = []
    for rate in results.config.rates:
        draw_speed_ups(results, rate, folder / f"speed-up-{rate}.png")
        blocks.append(figure(f"Speed-up over workers, links of {rate}", f"speed-up-{rate}.png"))
    workers = [number for number in results.config.workers if number > 1]
    rows = []
    for model in results.config.models:
        for rate in results.config.rates:
            for variant in results.variants:
                found = results.by_workers(model, rate, variant.name)
                cells = [f"{found[number].speed_up:.2f}" if number in found else "–" for number in workers]
                sent = format_size(found[max(found)].bytes_per_worker)
                rows.append([MODEL_NAMES[model], rate, variant.name, *cells, sent])
    heads = ["model", "link", "variant", *(plural(number, "worker") for number in workers), "sent"]
    return Section(
        "Speed-up",
        [
            *blocks,
            "Images per virtual second relative to one worker; and bytes sent per step by one worker, with the most "
            "workers:",
            table(heads, rows, num_text_columns=3),
            *_slower_with_sacp(results),
        ],
    )


def _slower_with_sacp(results: PoseidonResults) -> list[str]:
    """Describe where the published rule is slower than sending everything in full, and whether costs avoid that."""
    slower = []
    for model in results.config.models:
        for rate in results.config.rates:
            full, sacp, cost_based = (results.by_workers(model, rate, name) for name in (DWBP, DWBP_SACP, COST_BASED))
            enough = {number: _NOT_SLOWER * row.speed_up for number, row in full.items()}
            worse = [number for number, row in sacp.items() if row.speed_up < enough[number]]
            if worse:
                avoided = [n for n in worse if n in cost_based and cost_based[n].speed_up >= enough[n]]
                text = f"; the cost-based rule avoids this with {', '.join(map(str, avoided))}" if avoided else ""
                numbers = ", ".join(map(str, worse))
                slower.append(f"{MODEL_NAMES[model]} at {rate}, with {numbers} workers{text}.")
    if not slower:
        return ["SACP is nowhere slower than DWBP alone."]
    return [
        prose("""SACP is slower than DWBP alone in the following cases. A broadcast makes every worker multiply the
        factors of all workers, and the published formula counts the bytes of a server, which a ring does not have."""),
        bullets(slower),
    ]


def _staleness_section(results: PoseidonResults, folder: Path) -> Section:
    draw_staleness(results, folder / "staleness.png")
    config = results.config
    rows, gains = [], []
    for cluster, text in LATE_WORKERS.items():
        seconds = results.step_seconds(cluster)
        rows.append([text, *(format_time(seconds[bound]) for bound in config.bounds)])
        gains.append(f"{seconds[0] / seconds[max(config.bounds)]:.2f} × ({text})")
    return Section(
        "Bounded staleness",
        [
            prose(f"""Workers may be s steps apart under `poseidon:ssp=s`, which by sizes alone is `ps:ssp=s` with a
            server on every worker. AlexNet on {config.stale_workers} workers, links of {config.stale_rate}; virtual
            time per step until all workers have made {config.stale_steps} steps."""),
            bullets(
                [
                    f"One slow worker: the last worker takes {results.slowdown:g} times as long.",
                    f"""Pauses at random: a worker pauses after {results.pause_every_steps} steps of computation, for
                    {results.pause_steps} steps, on average ({plural(config.stale_seeds, "seed")}).""",
                ]
            ),
            figure("Time per step over the bound of staleness", "staleness.png"),
            table(["workers", *(f"s = {bound}" for bound in config.bounds)], rows, num_text_columns=1),
            f"Speed with a bound of {max(config.bounds)} relative to BSP (s = 0): {', '.join(gains)}.",
            prose("""A bound makes up for workers that are late in turns. Behind a worker that is always late, the
            others wait at any bound; a larger bound only delays this. No step can take less than the slow worker
            computes. The cost of staleness in accuracy is in [another report](../staleness/report.md)."""),
        ],
    )


def _lab_section(results: PoseidonResults) -> Section:
    config = results.config
    if not results.lab:
        return Section("Lab", [f"The lab was not used: {results.lab_missing}"])
    speed_ups = []
    for row in results.lab:
        ratios = [row.seconds[NO_EXCHANGE] / row.seconds[variant.strategy] for variant in results.variants]
        cells = [f"{row.workers * ratio:.2f}" for ratio in ratios]
        speed_ups.append([MODEL_NAMES[row.model], str(row.workers), str(row.batch), *cells])
    shape, sent = widths(config.lab_narrowing), []
    for row in results.lab:
        for rule in RULES if row.model == "alexnet" else ():
            num_bytes = row.sent_bytes[f"poseidon:rule={rule}"]
            sent.append(traffic_row(counted_traffic(rule, num_bytes, shape, row.workers, row.batch)))
    heads = ["model", "workers", "batch size", *(variant.name for variant in results.variants)]
    return Section(
        "Lab",
        [
            prose(f"""Real hosts with links of {config.lab_rate}, and small models: of AlexNet only the fully connected
            layers, {config.lab_narrowing} times as narrow; GoogLeNet whole, on images of 64 × 64. All hosts share the
            cores of one machine. A speed-up is therefore the number of workers times the speed relative to as many
            workers that exchange nothing. Wall-clock time."""),
            table(heads, speed_ups, num_text_columns=1),
            "Bytes sent per step by one worker for AlexNet's layers:",
            table(TRAFFIC_HEADS, sent, num_text_columns=1),
        ],
    )


def _assumptions_section(results: PoseidonResults) -> Section:
    rows = []
    for model, assumed in results.compute.items():
        speeds = [f"{assumed.images_per_s:,.0f}", format_time(assumed.step_s), format_speed(assumed.flops)]
        rows.append([MODEL_NAMES[model], str(assumed.batch_size), *speeds, format_size(assumed.bucket_bytes)])
    return Section(
        "Assumptions",
        [
            prose("A worker computes as long as a K20 would with Caffe and cuDNN; forward takes a third of it."),
            bullets(
                [
                    """AlexNet: a K40 trains 5,120 images in 19.2 s with cuDNN and in 26.5 s without, a K20 in 36.0 s
                    without (BVLC 2014, "Performance and Hardware Configuration"). The K20 is taken to be 26.5 / 36.0 as
                    fast.""",
                    """GoogLeNet: 1,688.8 ms for 128 images on a K40 (readme of Caffe's model), and the same ratio.""",
                    """`cifar-quick`: as many operations per second as AlexNet, which is likely more than such small
                    layers reach.""",
                    """Batch sizes are those of Caffe's solvers, for every worker: more workers train more images per
                    step.""",
                ]
            ),
            table(
                ("model", "batch size", "images/s", "time per step", "speed", "bucket size"), rows, num_text_columns=1
            ),
            prose(f"""Gradients are reconstructed from factors at the same speed, after backward. A GPU is faster at
            large products than at the rest of a network, so SACP may lose less by this than here. Links have
            {results.latency} latency and their full rate, every worker has its own, and gradients reach the network
            without delay. Copies between GPU and host, disks and Caffe's own waiting are not included."""),
        ],
    )
