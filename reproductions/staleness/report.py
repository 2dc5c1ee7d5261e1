"""The report on staleness: claims, tables and curves, from the stored results."""

from pathlib import Path

from reproductions.records import load
from reproductions.report import Report, Section, bullets, figure, prose, table
from reproductions.staleness.claims import claims, detail_blocks
from reproductions.staleness.figures import draw_task
from reproductions.staleness.results import (
    BSP,
    MIN_CLEAR_POINTS,
    ClusterName,
    StalenessResults,
    StalenessRun,
    StalenessTask,
)
from tutti.cluster import format_time


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(StalenessResults, folder / "results.json"), folder)


def write_report(results: StalenessResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    names = dict.fromkeys(task.name for task in results.tasks)
    thresholds = ", ".join(f"{results.clear_points(name):.1f} points on {name}" for name in names)
    return Report(
        name="staleness",
        title="Staleness: BSP, SSP, soft synchronisation and asynchronous SGD (Dong, Kim 2016)",
        source="Dong's slides on distributed deep learning; Kim (2016), with bounded staleness (SSP) by Ho et al. "
        "(2013). Both give statements, not numbers.",
        machine=f"Simulated on {results.machine}.",
        links=f"{results.link} for every host. One dedicated server for every eight workers.",
        time=f"Virtual (`tutti.simulate`); gradients are real. A worker computes {format_time(results.step_s)} per "
        "step, whatever its batch. The servers' computation and testing take no virtual time.",
        quick=results.quick,
        introduction=[
            """Dong says that asynchronous SGD has the higher throughput, and that stale gradients slow down its
            convergence or prevent it. Scaling updates by their staleness, soft synchronisation and a bound on staleness
            are said to help. Kim (2016) calls BSP safe and slow, async fast and risky, and SSP the best of both.""",
            """Here all of them are trained with Tutti's parameter servers. An *epoch* is as many samples as the
            training set has, whichever worker computes them. Accuracy during training is that of rank 0's copy of the
            parameters, which may be as stale as any worker's. The last point of a curve is the servers' final state.
            One seed.""",
        ],
        criteria=f"""A *configuration* is a task, a number of workers and a cluster. *Clearly* more or less accurate
        means by as much as BSP's own accuracy falls from one test to the next, and at least {MIN_CLEAR_POINTS:g}
        points; *close* to BSP's final accuracy is within that: {thresholds}. A claim about many configurations agrees
        if it holds in more than half.""",
        claims=claims(results),
        sections=[
            Section("Details of the claims", detail_blocks(results)),
            _setup_section(results),
            _rates_section(results),
            *(_task_section(results, name, folder) for name in names),
        ],
        limits=_limits(results),
    ).write(folder)


def _setup_section(results: StalenessResults) -> Section:
    texts: dict[ClusterName, str] = {
        "even": f"*even*: the time of every step has a jitter of {results.jitter:.0%}",
        "one slow": f"*one slow*: in addition, the last worker always takes {results.slowdown:g} times as long",
        "pauses": f"*pauses*: in addition, every worker pauses at random, every {format_time(results.pause_every_s)} "
        f"for {format_time(results.pause_s)} on average",
    }
    clusters = dict.fromkeys(name for task in results.tasks for name in task.clusters)
    sizes = dict.fromkeys(
        f"{task.name}: {task.num_train:,} training samples, {task.num_test:,} test samples, {task.epochs} epochs, "
        f"{task.batch} samples per step of all workers, {task.num_train // task.batch} BSP steps per epoch"
        for task in results.tasks
    )
    return Section(
        "Clusters and data",
        [
            bullets(texts[name] for name in clusters),
            "Every task uses a random part of the recipe's data, so that everything runs in half an hour:",
            bullets(sizes),
        ],
    )


def _rates_section(results: StalenessResults) -> Section:
    rates = ", ".join(dict.fromkeys(f"{task.learning_rate:g} for {task.name}" for task in results.tasks))
    momentum = ", ".join(task.name for task in results.tasks if task.momentum)
    separate = f" The effect of momentum is shown separately: {momentum}." if momentum else ""
    return Section(
        "Learning rates",
        [
            prose("""Dong writes W ← W − Σ λ ΔW over N updates, or over S of them, and leaves λ open except for scaling
            it by staleness. On Tutti's parameter servers every step is one of the optimiser, on the mean of its
            updates. Under BSP and SSP this is one update of every worker, under soft-sync of half of them, and under
            async of one. The servers therefore make 2 and N steps where BSP makes one. One rule sets all learning
            rates:"""),
            bullets(
                [
                    f"""A step made of k of N updates has k / N of BSP's learning rate ({rates}): all of it under BSP
                    and SSP, half under *soft-sync N/2*, an N-th under *async, rate / N*.""",
                    "*async, full rate* has all of it in every step: only the name of the strategy is changed.",
                    """*async, staleness-aware* has all of it too, and every update is scaled by 1 / its staleness
                    (Zhang et al. 2016).""",
                ]
            ),
            prose(f"""SGD is plain, as in Dong's formula; weight decay is the recipe's.{separate} This was chosen after
            trying both. With the recipe's momentum of 0.9, which makes its learning rate worth ten times as much, most
            stale rules diverged on mnist-mlp; plain learning rates of 0.1 to 0.3 hurt them too. A rate of 0.05 is
            kinder to stale rules than BSP's best one: with every rule at its own best rate, BSP might do better."""),
        ],
    )


def _task_section(results: StalenessResults, name: str, folder: Path) -> Section:
    blocks = []
    for task in (task for task in results.tasks if task.name == name):
        for workers in task.workers:
            runs = [run for run in results.runs if (run.task, run.workers) == (name, workers)]
            file = f"{name.replace(', ', '-').replace(' ', '-')}-{workers}.png"
            draw_task(f"{name}, {workers} workers", task, runs, folder / file)
            description = f"Accuracy of {name} with {workers} workers over epochs and virtual seconds, and staleness"
            close = results.clear_points(name)
            blocks += [
                figure(description, file),
                prose(f"""{workers} workers. In every cell: test accuracy after {task.epochs} epochs · virtual seconds
                per epoch · virtual seconds until the accuracy first came within {close:.1f} points of BSP's final
                accuracy · mean (largest) staleness in server steps."""),
                _task_table(task, runs, close),
            ]
    return Section(name, blocks)


def _task_table(task: StalenessTask, runs: list[StalenessRun], close: float) -> str:
    by_key = {(run.cluster, run.rule): run for run in runs}
    rows = []
    for rule in task.rules:
        cells = []
        for cluster in task.clusters:
            run = by_key[cluster, rule.name]
            to_s = run.seconds_to(by_key[cluster, BSP].accuracy - close / 100)
            reached = "never" if to_s is None else f"{to_s:.2f} s"
            staleness = f"{run.mean_staleness:.1f} ({max(run.staleness)})"
            cells.append(f"{run.accuracy:.1%} · {run.epoch_s:.2f} s · {reached} · {staleness}")
        rate = by_key[task.clusters[0], rule.name].learning_rate
        rows.append([rule.name, f"{rate:.3g}", *cells])
    return table(["rule", "learning rate", *task.clusters], rows, num_text_columns=1)


def _limits(results: StalenessResults) -> list[str]:
    fewest = min(task.num_test for task in results.tasks)
    limits = [
        f"""These are the first epochs of small models on parts of their data, with one seed. They do not show where a
        recipe would end, and where curves rise and fall their end depends on chance. An accuracy measured on {fewest}
        samples has a standard error of up to {50 / fewest**0.5:.1f} points.""",
        """Under SSP a worker reads only when its copy is too old, as Kim (2016) describes it, and does not see its own
        updates before. Its parameters are therefore stale on even workers too, by up to the bound.""",
    ]
    return [*limits, omitted] if (omitted := _omitted(results)) else limits


def _omitted(results: StalenessResults) -> str:
    """Return which clusters and rules were left out for some tasks."""
    clusters = dict.fromkeys(name for task in results.tasks for name in task.clusters)
    rules = dict.fromkeys(rule.name for task in results.tasks for rule in task.rules)
    gaps = []
    for task in results.tasks:
        used = [*task.clusters, *(rule.name for rule in task.rules)]
        if missing := [name for name in (*clusters, *rules) if name not in used]:
            sizes = " and ".join(map(str, task.workers))
            gaps.append(f"{task.name} with {sizes} workers lacks {', '.join(missing)}")
    return f"To save time, {'; '.join(gaps)}." if gaps else ""
