"""The report on the reproduction of Fourie (2019): claims, tables and figures, from the stored results."""

import statistics
from pathlib import Path

from reproductions.allreduce_mnist.crossover import crossover_section
from reproductions.allreduce_mnist.results import AlgorithmStepTimes, AllReduceResults, Network
from reproductions.records import load
from reproductions.report import PaperClaim, Report, Section, bullets, figure, plural, prose, table
from tutti.cluster import format_size
from tutti.report.plots import plot_lines, plot_spread

LABELS = {
    "butterfly": "butterfly", "tree": "tree", "ring_blocking": "ring, blocking", "ring": "ring, non-blocking",
    "mpi": "Open MPI",
}  # fmt: skip
MIN_SEEDS = 3
"""Fewer seeds allow no statement about accuracy."""


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(AllReduceResults, folder / "results.json"), folder)


def write_report(results: AllReduceResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    config = results.config
    sections = [_times_section(results, folder), _accuracy_section(results, folder), _rounding_section(results)]
    if results.collectives is not None:
        sections.append(crossover_section(results.collectives, results.rate, folder))
    recipe = config.accuracy_recipe
    model = "h = 100" if recipe == "mnist-mlp" else f"the recipe {recipe}"
    return Report(
        name="allreduce-mnist",
        title="All-reduce algorithms on MNIST (Fourie 2019)",
        source="Chris Fourie, *Distributed Deep Learning*, University of the Witwatersrand, 2019. Its text was "
        "available, not the data behind its figures.",
        machine=f"{results.machine}. All workers share these cores.",
        links="Loopback of one host (sockets)"
        + (
            f"; lab: one host per worker, links shaped to {results.rate}."
            if results.lab_missing is None
            else f". The lab was not used: {results.lab_missing}"
        ),
        time="Wall-clock throughout. Computation is slowed down by the other workers on the same cores.",
        quick=results.quick,
        introduction=[
            """Fourie trained a four-layer perceptron on MNIST over MPI, on 10 machines with 80 processes. The width h
            of the second hidden layer sets the message size. Open MPI's tree/butterfly all-reduce was compared with
            rings of blocking and of non-blocking calls. The rings scaled better but were 7 to 10 % less accurate; the
            cause remained open.""",
            f"""Here a 784-300-h-10 perceptron is trained on all of MNIST. Batches of 128 are divided among the workers,
            and the gradients of the whole model are one message. The optimiser is SGD with momentum and a learning rate
            of 0.05; training takes {plural(config.epochs, "epoch")} with seeds
            {", ".join(map(str, config.seeds))}. Accuracy is measured with {model}.""",
        ],
        criteria=f"""A speed agrees if the ratio is above 1. Accuracies differ if the means of two algorithms are
        further apart than the seeds of one; this needs {MIN_SEEDS} seeds.""",
        claims=[*_speed_claims(results), _accuracy_claim(results), _rounding_claim(results)],
        sections=[*sections, _open_questions_section()],
    ).write(folder)


def _ratios_to_tree(row: AlgorithmStepTimes) -> dict[str, float]:
    return {name: row.seconds["tree"] / row.seconds[name] for name in ("ring_blocking", "ring", "butterfly")}


def _largest_message(results: AllReduceResults, network: Network, workers: int) -> AlgorithmStepTimes:
    rows = [row for row in results.step_times if (row.network, row.workers) == (network, workers)]
    return max(rows, key=lambda row: row.num_bytes)


def _speed_claims(results: AllReduceResults) -> list[PaperClaim]:
    network: Network = "lab" if results.lab_missing is None else "loopback"
    few, many = min(results.config.workers), max(results.config.workers)
    row = _largest_message(results, network, many)
    at = f"{many} workers, {format_size(row.num_bytes)}, {network}"
    ratios = _ratios_to_tree(row)
    claims = [
        PaperClaim(
            f"The ring with {calls} calls scales better than the tree",
            "no number",
            f"{ratios[name]:.1f} × as fast as the tree ({at})",
            ratios[name] > 1,
        )
        for name, calls in (("ring_blocking", "blocking"), ("ring", "non-blocking"))
    ]
    if many > few:
        before = _ratios_to_tree(_largest_message(results, network, few))["ring"]
        measured = f"{ratios['ring']:.1f} × with {many} workers, {before:.1f} × with {few}"
        claims.append(
            PaperClaim(
                "The advantage of the rings shrinks with fewer processes",
                "no number",
                measured,
                before < ratios["ring"],
            )
        )
    return claims


def _accuracies(results: AllReduceResults) -> dict[str, list[float]]:
    """Return the test accuracies in percent, by algorithm."""
    values: dict[str, list[float]] = {}
    for row in results.accuracy:
        values.setdefault(row.algorithm, []).append(100 * row.accuracy)
    return values


def _spreads(results: AllReduceResults) -> tuple[float, float]:
    """Return how far the algorithms' means are apart, and how far at most the seeds of one, in points."""
    values = _accuracies(results).values()
    means = [statistics.fmean(accuracies) for accuracies in values]
    return max(means) - min(means), max(max(accuracies) - min(accuracies) for accuracies in values)


def _accuracy_claim(results: AllReduceResults) -> PaperClaim:
    between_algorithms, between_seeds = _spreads(results)
    num_seeds = len(results.config.seeds)
    measured = f"means within {between_algorithms:.2f} points; seeds of one algorithm up to {between_seeds:.2f} apart"
    if num_seeds < MIN_SEEDS:
        reason = f"{plural(num_seeds, 'seed')} allow no conclusion" if num_seeds > 1 else "1 seed allows no conclusion"
        return PaperClaim("Rings are less accurate", "7 to 10 %", measured, False, reason)
    differ = between_algorithms > between_seeds
    reason = (
        "the algorithms differ by more than the seeds" if differ else "the algorithms differ by less than the seeds"
    )
    return PaperClaim("Rings are less accurate", "7 to 10 %", measured, differ, reason)


def _rounding_claim(results: AllReduceResults) -> PaperClaim:
    largest = max(results.rounding.values(), key=lambda error: abs(error.bias))
    measured = f"mean error at most {max(error.mean for error in results.rounding.values()):.2f} float32 roundings"
    return PaperClaim(
        "The order of summation may be the cause",
        "a conjecture",
        f"{measured}, mean signed error at most {abs(largest.bias):.4f}",
        False,
        "the errors have no preferred sign, and are far too small",
    )


def _times_section(results: AllReduceResults, folder: Path) -> Section:
    blocks = []
    for network in dict.fromkeys(row.network for row in results.step_times):
        rows = [row for row in results.step_times if row.network == network]
        where = "loopback" if network == "loopback" else f"lab, {results.rate}"
        file = f"time-{network}.png"
        panels = {
            f"{workers} workers": {
                name: [(row.num_bytes, row.seconds[name]) for row in rows if row.workers == workers]
                for name in rows[0].seconds
            }
            for workers in sorted({row.workers for row in rows})
        }
        plot_lines(panels, ("message size", "time per step"), f"Training step, {where}", folder / file)
        blocks += [
            figure(f"Time per training step over message size, {where}", file),
            f"Milliseconds per training step, {where}; the fastest in bold:",
            _times_table(rows),
            _times_summary(rows, network),
        ]
    return Section("Time over message size", blocks)


def _times_summary(rows: list[AlgorithmStepTimes], network: Network) -> str:
    """Return how the algorithms compare with the tree, at the largest number of workers and message size."""
    row = max(rows, key=lambda row: (row.workers, row.num_bytes))
    ratios = "; ".join(f"{LABELS[name]}: {ratio:.1f} ×" for name, ratio in _ratios_to_tree(row).items())
    why = (
        "On loopback the cost of a message is memory copies and waiting for a core, not link time."
        if network == "loopback"
        else "In the lab the links dominate, and the ratios follow the cost formulas."
    )
    return f"Speed relative to the tree with {row.workers} workers and {format_size(row.num_bytes)}: {ratios}. {why}"


def _times_table(rows: list[AlgorithmStepTimes]) -> str:
    names = list(rows[0].seconds)
    cells = []
    for row in rows:
        fastest = min(row.seconds.values())
        times = [f"**{_ms(time)}**" if time == fastest else _ms(time) for time in map(row.seconds.__getitem__, names)]
        cells.append([str(row.workers), str(row.width), format_size(row.num_bytes), *times])
    return table(["workers", "h", "message", *(LABELS[name] for name in names)], cells, num_text_columns=0)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}" if seconds < 0.1 else f"{1e3 * seconds:.0f}"


def _accuracy_section(results: AllReduceResults, folder: Path) -> Section:
    config, values = results.config, _accuracies(results)
    title = f"Test accuracy, {config.accuracy_workers} workers, {plural(config.epochs, 'epoch')}, one dot per seed"
    plot_spread(values, "test accuracy, %", title, folder / "accuracy.png")
    between_algorithms, between_seeds = _spreads(results)
    rows = []
    for name, accuracies in values.items():
        distance = max(row.distance for row in results.accuracy if row.algorithm == name)
        spread = max(accuracies) - min(accuracies)
        rows.append([LABELS[name], f"{statistics.fmean(accuracies):.2f} %", f"{spread:.2f}", f"{distance:.1e}"])
    heads = ["algorithm", "mean test accuracy", "largest − smallest over seeds", "parameter distance from butterfly"]
    return Section(
        "Accuracy",
        [
            prose(f"""{config.accuracy_workers} workers, loopback. The means over the seeds are within
            {between_algorithms:.2f} points of each other; the seeds of one algorithm are up to {between_seeds:.2f}
            points apart."""),
            table(heads, rows, num_text_columns=1),
            prose("""The distance is the relative norm of the difference of the final parameters at the same seed. The
            algorithms add in different orders, so the sums differ in their last bits. Training amplifies such
            differences, but in no particular direction. Algorithms with equal rows add in the same order and end with
            identical bits."""),
            figure("Test accuracy with every algorithm", "accuracy.png"),
        ],
    )


def _rounding_section(results: AllReduceResults) -> Section:
    rows = [
        [
            LABELS[name],
            f"{error.mean:.2f}",
            f"{error.largest:.1f}",
            f"{error.bias:+.4f}",
            f"{error.fraction_differing:.0%}",
        ]
        for name, error in results.rounding.items()
    ]
    heads = ["algorithm", "mean error", "largest error", "mean signed error", "elements that differ from butterfly's"]
    conclusion = """On average every order of summation is wrong by a fraction of one rounding, as often upwards as
        downwards. A loss of 7 to 10 % cannot come from that; its cause must be elsewhere in the original program."""
    if not any(error.fraction_differing for error in results.rounding.values()):
        conclusion = "Two numbers can be added in one order only: the algorithms differ from three workers on."
    return Section(
        "Effect of the order of summation",
        [
            prose(f"""A million normally distributed numbers per worker, {results.config.accuracy_workers} workers,
            summed in float32 and compared with the sum in float64. The unit is the float32 rounding of an average sum
            (1.2e-7 of it)."""),
            table(heads, rows, num_text_columns=1),
            prose(conclusion),
        ],
    )


def _open_questions_section() -> Section:
    return Section(
        "Other open questions of the source",
        [
            bullets(
                [
                    """*Which algorithm does Open MPI use?* In version 5.0, `coll_tuned` chooses by ranks and bytes. For
                    4 ranks it uses recursive doubling for small messages and Rabenseifner's algorithm from 8 KiB. The
                    latter is a butterfly that starts with neighbours: its order of summation is the tree's, and its
                    accuracy equals the tree's to the last bit. With several ranks on several hosts, `coll_han` works on
                    two levels. `docs/transports.md` has the table.""",
                    """*Why did the CUDA version not learn* (10 %, chance level)? That program was not available. Here
                    training on a GPU matches one worker to the same tolerance as on a CPU
                    (`TUTTI_TEST_DEVICE=cuda pytest tests/equivalence`).""",
                ]
            )
        ],
    )
