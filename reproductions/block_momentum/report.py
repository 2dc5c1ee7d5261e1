"""The report on block momentum: claims, tables as in Kim (2016) and curves, from the stored results."""

from pathlib import Path
from statistics import mean

from reproductions.block_momentum.results import (
    SINGLE,
    BlockMomentumResults,
    BlockMomentumRun,
    BlockMomentumTask,
)
from reproductions.records import load
from reproductions.report import PaperClaim, Report, Section, bullets, figure, prose, table
from tutti.cluster import format_size, format_time
from tutti.report.plots import pyplot

PUBLISHED_SINGLE = 11.08
"""Word error rate of a single GPU in percent (Kim 2016)."""
PUBLISHED = {
    "1-bit": {4: 10.79, 8: 10.59, 16: 11.02},
    "BMUF": {4: 10.82, 8: 10.82, 16: 10.85, 32: 10.92, 64: 11.08},
}
"""Word error rates in percent by method and number of GPUs (Kim 2016)."""
PERPLEXITY_TOLERANCE = 0.05
"""Relative increase in perplexity that counts as no loss."""
ACCURACY_TOLERANCE = 0.01
"""Decrease in accuracy that counts as no loss."""
DIVERGED = 4.0
"""A perplexity this many times a single worker's counts as diverged."""
_COLOURS = {
    SINGLE: "#000000", "averaging": "#e69f00", "BMUF": "#0072b2", "1-bit": "#d55e00", "BMUF and 1-bit": "#009e73",
}  # fmt: skip


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(BlockMomentumResults, folder / "results.json"), folder)


def write_report(results: BlockMomentumResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    sections = []
    for number, task in enumerate(results.tasks):
        runs = results.runs_of(task)
        if task.target is not None:
            sections.append(_target_section(task, runs))
        elif task.seeds > 1:
            sections.append(_seeds_section(task, runs))
        else:
            sections.append(_comparison_section(task, runs, folder if number == 0 else None))
    links = ", ".join(dict.fromkeys(task.link for task in results.tasks))
    return Report(
        name="block-momentum",
        title="Block momentum, model averaging and 1-bit SGD (Chen & Huo 2016, in Kim 2016)",
        source="Chen & Huo, *Scalable training of deep learning machines by incremental block training with "
        "intra-block parallel optimization and blockwise model-update filtering*, ICASSP 2016; results as presented by "
        "Kim (2016), from Seide's talk on CNTK. Averaging: Dong's slides on distributed deep learning.",
        machine=f"Simulated on {results.machine}.",
        links=f"{links} with {results.latency} latency, for every worker's host.",
        time=f"Virtual (`tutti.simulate`); gradients are real. A worker computes {format_time(results.step_s)} per "
        "step of its own batch.",
        quick=results.quick,
        introduction=[
            """Kim (2016) shows how CNTK trains an LSTM for speech on 4 to 64 GPUs. 1-bit SGD communicates less per step
            (Seide et al. 2014). Blockwise model-update filtering (BMUF) communicates less often. Dong's slides say that
            plain averaging gives worse models the less often it averages.""",
            """Here all methods train on the same number of samples, so that more workers make fewer steps each. The
            optimiser is plain SGD with a learning rate that decreases linearly to 0, and gradients are clipped to a
            norm of 1. Only 1-bit SGD has another learning rate: it grows with the square root of the number of workers,
            as its batch grows with their number. BMUF has Nesterov momentum of 1 − 1/N for N workers and a block
            learning rate of 1.""",
        ],
        criteria=f"""The published numbers are word error rates; in brackets the relative change from a single GPU
        ({PUBLISHED_SINGLE} %). A method keeps the quality if perplexity grows by at most {PERPLEXITY_TOLERANCE:.0%}, or
        accuracy falls by at most {100 * ACCURACY_TOLERANCE:g} point. These thresholds were set after the results had
        been seen.""",
        claims=_claims(results.tasks[0], results.runs_of(results.tasks[0])),
        sections=sections,
        limits=[] if results.quick else _limits(),
    ).write(folder)


def _claims(task: BlockMomentumTask, runs: list[BlockMomentumRun]) -> list[PaperClaim]:
    by_key = {(run.method, run.workers): run for run in runs}
    single = by_key[SINGLE, 1]
    claims = []
    for method, published in PUBLISHED.items():
        for workers, error_rate in published.items():
            if (run := by_key.get((method, workers))) is None:
                continue
            change = error_rate / PUBLISHED_SINGLE - 1
            agrees = _keeps_quality(run, single)
            reason = "" if agrees else _reason(method)
            statement = f"{method} on {workers} workers keeps the quality of a single worker"
            text = f"{error_rate:.2f} % ({change:+.1%})"
            claims.append(
                PaperClaim(statement, text, f"{run.metric} {run.value_text} ({_change(run, single)})", agrees, reason)
            )
    averaged = [run for run in runs if run.method == "averaging"]
    if averaged:
        measured = ", ".join(f"{_change(run, single)} on {run.workers}" for run in averaged)
        worse = not any(_keeps_quality(run, single) for run in averaged)
        claims.append(PaperClaim("Infrequent averaging gives a poor model (Dong)", "no number", measured, worse))
    return claims


def _reason(method: str) -> str:
    if method == "1-bit":
        return "not investigated; its batch grows with the workers, so it makes few steps on this small dataset"
    return "few blocks per epoch here; momentum needs about as many blocks as there are workers"


def _keeps_quality(run: BlockMomentumRun, single: BlockMomentumRun) -> bool:
    if run.metric == "accuracy":
        return run.value >= single.value - ACCURACY_TOLERANCE
    return run.value <= (1 + PERPLEXITY_TOLERANCE) * single.value


def _change(run: BlockMomentumRun, single: BlockMomentumRun) -> str:
    """Return the change of the final value from a single worker's, in percent or percentage points."""
    if run.metric == "accuracy":
        return f"{100 * (run.value - single.value):+.2f} points"
    ratio = run.value / single.value
    return f"{ratio - 1:+.1%}" if ratio < DIVERGED else "diverged"


def _comparison_section(task: BlockMomentumTask, runs: list[BlockMomentumRun], folder: Path | None) -> Section:
    """Compare every method and number of workers with a single worker; with a figure if there is a folder."""
    by_key = {(run.method, run.workers): run for run in runs}
    single, most = by_key[SINGLE, 1], task.workers[-1]
    rows = [[SINGLE, _entry(single), *[""] * (len(task.workers) - 1)]]
    for method in task.methods[1:]:
        found = [by_key.get((method, workers)) for workers in task.workers]
        rows.append([method, *("" if run is None else _entry(run) for run in found)])
    bytes_sent = ", ".join(
        f"{method} {format_size(by_key[method, most].bytes_per_step)}"
        for method in task.methods[1:]
        if (method, most) in by_key
    )
    changes = []
    for workers in task.workers:
        values = [f"{run.method} {_change(run, single)}" for run in runs if run.workers == workers]
        changes.append(f"{workers} workers: {', '.join(values)}.")
    blocks = [
        prose(f"""{task.epochs} epochs, batches of {task.batch} samples per worker, blocks of {task.block_steps} steps,
        learning rate {task.learning_rate:g}, links of {task.link}. Final test {single.metric}, and virtual time:"""),
        table(["", *(f"{workers} workers" for workers in task.workers)], rows),
        f"Bytes sent per step by one of {most} workers, on average: {bytes_sent}.",
        f"Change of the final {single.metric} from a single worker:",
        bullets(changes),
    ]
    if folder is not None:
        _draw(task, runs, folder / f"{task.name}.png")
        description = f"Test {single.metric} of {task.name} over epochs and virtual time"
        blocks.append(figure(description, f"{task.name}.png"))
    return Section(task.name, blocks)


def _entry(run: BlockMomentumRun) -> str:
    return f"{run.value_text}, {format_time(run.seconds)}"


def _seeds_section(task: BlockMomentumTask, runs: list[BlockMomentumRun]) -> Section:
    rows, means = [], {}
    for method in task.methods:
        own = [run for run in runs if run.method == method]
        means[method] = mean(run.value for run in own)
        seconds = format_time(mean(run.seconds for run in own))
        values = [run.value_text for run in own]
        rows.append([method, f"`{own[0].strategy}`", *values, f"{means[method]:.2%}", seconds])
    first, *others = task.methods
    differences = "; ".join(f"{method} {100 * (means[method] - means[first]):+.2f}" for method in others)
    seeds = [f"seed {seed}" for seed in range(task.seeds)]
    return Section(
        f"{task.name}, {task.workers[0]} workers",
        [
            prose(f"""{task.epochs} epochs of all 60,000 training images, batches of {task.batch} samples per worker,
            learning rate {task.learning_rate:g}, links of {task.link}. Final test accuracy, and virtual time:"""),
            table(["method", "strategy", *seeds, "mean", "time"], rows, num_text_columns=2),
            f"Mean difference from {first}, which computes what DDP computes, in points: {differences}.",
        ],
    )


def _target_section(task: BlockMomentumTask, runs: list[BlockMomentumRun]) -> Section:
    """Return the virtual time until the test accuracy first reached the target."""
    assert task.target is not None
    rows, times = [], []
    for run in runs:
        reached = next((point for point in run.points if point.value >= task.target), None)
        if reached is None:
            rows.append([run.method, f"`{run.strategy}`", f"not in {task.epochs} epochs", ""])
            continue
        steps = round(reached.epochs / task.epochs * run.steps)
        times.append(reached.seconds)
        rows.append([run.method, f"`{run.strategy}`", str(steps), format_time(reached.seconds)])
    both = len(times) == len(runs) == 2
    return Section(
        f"Time to {task.target:.0%} accuracy, {task.workers[0]} workers, links of {task.link}",
        [
            prose(f"""The same model, batches of {task.batch} samples per worker, {task.tests_per_epoch} tests per
            epoch. Virtual time:"""),
            table(("method", "strategy", "steps", "time"), rows, num_text_columns=2),
            f"{runs[1].method} is {times[0] / times[1]:.0f} times as fast as {runs[0].method}." if both else "",
        ],
    )


def _draw(task: BlockMomentumTask, runs: list[BlockMomentumRun], path: Path) -> None:
    """Draw the test value over epochs (top) and over virtual time (bottom): a column per number of workers."""
    plt = pyplot()
    sizes = task.workers
    chart, axes = plt.subplots(
        2, len(sizes), figsize=(3.4 * len(sizes) + 1, 7), sharey=True, layout="constrained", squeeze=False
    )
    for column, workers in enumerate(sizes):
        for method in task.methods:
            run = next((run for run in runs if run.method == method and run.workers in (workers, 1)), None)
            if run is None:
                continue
            epochs, seconds, values = zip(*run.points, strict=True)
            style = {"color": _COLOURS[method], "marker": "o", "markersize": 3, "linewidth": 1.5, "label": method}
            axes[0][column].plot(epochs, values, **style)
            axes[1][column].plot(seconds, values, **style)
        axes[0][column].set(title=f"{workers} workers", xlabel="epochs", xticks=range(1, task.epochs + 1))
        axes[1][column].set(xlabel="virtual seconds", xscale="log")
        axes[1][column].set_xticks([30, 100, 300, 1000, 3000], labels=["30", "100", "300", "1000", "3000"])
        axes[1][column].minorticks_off()
    for row in axes:
        row[0].set_ylabel(f"test {runs[0].metric}")
        if runs[0].metric == "perplexity":
            row[0].set(yscale="log", ylim=(4.7, 20))  # Runs that diverge leave the figure.
            row[0].set_yticks([5, 6, 8, 10, 15], labels=["5", "6", "8", "10", "15"])
            row[0].minorticks_off()
    handles = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    chart.legend(handles.values(), handles, loc="outside lower center", ncols=len(handles), frameon=False)
    chart.savefig(path, dpi=110)
    plt.close(chart)


def _limits() -> list[str]:
    return [
        """CNTK's LSTM was trained on hours of speech, far more than a megabyte of Shakespeare. Here 64 workers share so
        little text that an epoch is a few dozen blocks, and momentum needs about as many blocks as there are workers
        to take effect.""",
        """The model is small, and so are its gradients; on these links they still take longer than a step. There is one
        seed, except where a table shows more.""",
    ]
