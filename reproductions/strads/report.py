"""The report on scheduled model parallelism: claims, tables and figures, from the stored results."""

from pathlib import Path

from reproductions.records import load
from reproductions.report import PaperClaim, Report, Section, bullets, figure, prose, table
from reproductions.strads.results import ProblemName, SolverRun, StradsResults
from tutti.cluster import format_time
from tutti.report.plots import pyplot

_COLOURS = {"round-robin": "#0072b2", "random": "#e69f00", "dynamic": "#009e73", "dynamic, greedy": "#cc79a7"}
_TITLES: dict[ProblemName, str] = {"lasso": "Lasso", "matrix": "Matrix factorisation"}
_DYNAMIC: dict[ProblemName, str] = {"lasso": "dynamic", "matrix": "dynamic, greedy"}
"""The dynamic policy that suits each problem."""


def report_only(folder: Path) -> None:
    """Rewrite the report and its figures from the results stored in `folder`."""
    write_report(load(StradsResults, folder / "results.json"), folder)


def write_report(results: StradsResults, folder: Path) -> str:
    """Write the figures and `report.md` into `folder`; return the report."""
    config = results.config
    lasso, matrix = config.lasso, config.matrix
    return Report(
        name="strads",
        title="STRADS: scheduled model parallelism (Lee et al. 2014, Kim et al. 2016)",
        source="Lee et al. (2014) and Kim et al. (2016), as presented by Kim (2016). The text of the slides was "
        "available.",
        machine=f"{results.machine}. Real runs: {config.workers} processes, median of {config.repeats}.",
        links=f"Real runs: shared memory and sockets of one host. Simulation: {results.link} for every host.",
        time=f"Wall-clock for processes; virtual for the {config.simulated_workers} simulated workers. Seconds are "
        "those of rounds, scheduling included; computing the objective is not.",
        quick=results.quick,
        introduction=[
            """STRADS divides a model by a scheduler. In every round the scheduler picks parameters that matter and do
            not depend on each other (*schedule*), workers compute their new values (*push*), and the values are
            committed (*pull*). Here the same is done with [`tutti.parallel.scheduler`](../../docs/strads.md).""",
            f"""**Lasso**: {lasso.samples} samples, {lasso.features} features, {lasso.relevant} of them relevant. Half
            of the features have a correlation of 0.9 with the previous one. The penalty is σ √(2 ln J) =
            {results.lasso_penalty:.2f}. Samples are distributed over the workers; a round updates 32 coefficients.""",
            f"""**Matrix factorisation**: {matrix.rows} by {matrix.columns} with {matrix.entries} known entries, many
            of them in popular rows and columns. Factors have rank {matrix.rank}, the penalty is {matrix.penalty:g}. A
            round updates 64 rows of either factor.""",
            f"""All policies consider the same number of candidates and refuse the same dependences. All run for the
            same number of rounds, enough for {config.passes:g} passes over all blocks if no candidate were refused.""",
        ],
        criteria="""A dynamic policy agrees with the claim if it reaches round-robin's final objective sooner than
        round-robin itself, everywhere. The slides give no numbers.""",
        claims=_claims(results),
        sections=[
            *(_problem_section(results, problem, folder) for problem in _TITLES),
            _balance_section(results),
            _assumptions_section(results),
        ],
    ).write(folder)


def _claims(results: StradsResults) -> list[PaperClaim]:
    claims = []
    for problem, title in _TITLES.items():
        runs = [run for run in results.runs if (run.problem, run.policy) == (problem, _DYNAMIC[problem])]
        ratios = {run.where: results.speed_up(run) for run in runs}
        measured = "; ".join(f"{_ratio(ratio)} ({where})" for where, ratio in ratios.items())
        agrees = all(ratio is not None and ratio > 1 for ratio in ratios.values())
        reason = "" if agrees else "in processes, choosing costs more per round than it saves in updates"
        statement = f"{title}: updating the most important blocks first is faster (policy *{_DYNAMIC[problem]}*)"
        claims.append(PaperClaim(statement, "no number", f"{measured} as fast as round-robin", agrees, reason))
    unchecked = [run for run in results.runs if "unchecked" in run.policy]
    diverged = sum(run.diverged for run in unchecked)
    measured = f"{diverged} of {len(unchecked)} Lasso runs without the check diverge"
    claims.append(PaperClaim("Dependences must be respected", "no number", measured, diverged == len(unchecked)))
    seconds = {(row.slow_worker, row.by_work): row.seconds for row in results.balance}
    gains = [seconds[slow, False] / seconds[slow, True] for slow in (False, True)]
    measured = f"{gains[0]:.2f} × as fast as by number, {gains[1]:.2f} × with one slow worker (virtual time)"
    claims.append(PaperClaim("Balancing by amount of work is faster", "no number", measured, min(gains) > 1))
    return claims


def _problem_section(results: StradsResults, problem: ProblemName, folder: Path) -> Section:
    runs = [run for run in results.runs if run.problem == problem]
    _draw(runs, _TITLES[problem], folder / f"{problem}.png")
    rows = []
    for run in runs:
        if run.diverged:
            rows.append([run.where, run.policy, "–", "diverges", "–", "–", "–"])
            continue
        last = run.points[-1]
        point = run.first_at(results.round_robin(run).points[-1].objective)
        reached = ["–", "–"] if point is None else [_passes(run, point.updates), format_time(point.seconds)]
        per_round = format_time(last.seconds / last.rounds)
        ratio = _ratio(results.speed_up(run))
        rows.append([run.where, run.policy, per_round, f"{last.objective:.3f}", *reached, ratio])
    heads = ["where", "policy", "time per round", "final objective", "updates to round-robin's objective"]
    heads += ["time to it", "speed relative to round-robin"]
    return Section(
        _TITLES[problem],
        [
            figure("Relative distance of the objective from the best, over time", f"{problem}.png"),
            table(heads, rows, num_text_columns=2),
        ],
    )


def _passes(run: SolverRun, updates: int) -> str:
    return f"{updates / run.num_blocks:.1f} passes"


def _balance_section(results: StradsResults) -> Section:
    rows = []
    for slow in (False, True):
        seconds = {row.by_work: row.seconds for row in results.balance if row.slow_worker == slow}
        name = f"one takes {results.slowdown:g} times as long" if slow else "equal"
        rows.append([name, format_time(seconds[True]), format_time(seconds[False])])
    return Section(
        "Load balance",
        [
            prose(f"""Rows of the matrix are distributed by their amount of work and by the recent speed of the workers.
            Virtual time of the same rounds on {results.config.simulated_workers} simulated workers; they are a hundred
            times slower than in the other simulations, so that computation dominates."""),
            table(("workers", "by work and speed", "by number and speed"), rows, num_text_columns=1),
        ],
    )


def _assumptions_section(results: StradsResults) -> Section:
    return Section(
        "Assumptions of the simulation",
        [
            bullets(
                [
                    f"""A worker computes {results.flops:.0e} operations per second, on a host of its own with
                    {results.link}.""",
                    """An update of a coefficient takes four operations per sample. A row of a factor takes 2 K² per
                    entry and K³.""",
                    """Drawing candidates takes two operations per block, and comparing two candidates takes 8.""",
                    """The time of the Python interpreter is not included; in real runs it is most of a round.""",
                ]
            )
        ],
    )


def _ratio(value: float | None) -> str:
    return "never" if value is None else f"{value:.1f} ×"


def _draw(runs: list[SolverRun], title: str, path: Path) -> None:
    """Draw the objective over time: a panel per place, a line per policy."""
    plt = pyplot()
    places = list(dict.fromkeys(run.where for run in runs))
    chart, axes = plt.subplots(1, len(places), figsize=(4.6 * len(places), 4.2), layout="constrained", squeeze=False)
    shown = [run for run in runs if run.policy in _COLOURS]
    best = min(point.objective for run in shown for point in run.points)
    for place, axis in zip(places, axes[0], strict=True):
        for run in shown:
            if run.where == place:
                above = [point for point in run.points if point.objective > best * (1 + 1e-9)]
                distances = [point.objective / best - 1 for point in above]
                seconds = [point.seconds for point in above]
                axis.plot(seconds, distances, color=_COLOURS[run.policy], label=run.policy)
        unit = "virtual seconds" if "simulated" in place else "seconds"
        axis.set(yscale="log", xlabel=unit, title=place)
        axis.grid(alpha=0.2)
    axes[0][0].set_ylabel("objective above the best, relative")
    axes[0][-1].legend(frameon=False, fontsize=8)
    chart.suptitle(title)
    chart.savefig(path, dpi=130)
    plt.close(chart)
