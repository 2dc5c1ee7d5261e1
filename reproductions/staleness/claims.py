"""Whether what the papers say of staleness shows, worked out from what was measured."""

from itertools import pairwise
from typing import Any

LEAST = 3.0
"""A difference in accuracy of fewer points is none."""
MOST = 0.5
"""More than this part of a gap is most of it."""
LOCKSTEP, SCALED, WHOLE, AWARE = "BSP", "async, rate / N", "async, whole rate", "async, aware"
SOFT = "soft-sync N/2"

Runs = dict[str, dict[str, Any]]
"""Of one cell, by rule."""
Cells = dict[tuple[str, int, str], Runs]
"""By part, workers and cluster."""


def seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """When a run first reached an accuracy, in virtual seconds; None if it never did."""
    return next((float(seconds) for _, seconds, reached in run["points"] if reached >= accuracy), None)


def clear_points(result: dict[str, Any], part: str) -> float:
    """From how many points on a difference is one: what BSP's accuracy falls by from one test to the next, or more."""
    falls = [LEAST]
    for run in result["runs"]:
        if (run["part"], run["rule"]) == (part, LOCKSTEP):
            reached = [100 * point[2] for point in run["points"]]
            falls += [before - after for before, after in pairwise(reached)]
    return max(falls)


def verdict(result: dict[str, Any]) -> str:
    """The section on what shows and what does not."""
    cells: Cells = {}
    points = {part["name"]: clear_points(result, part["name"]) for part in result["plan"]}
    for run in result["runs"]:
        cell = cells.setdefault((run["part"], run["workers"], run["cluster"]), {})
        cell[run["rule"]] = {**run, "clear": points[run["part"]]}
    claims = (_slowest, _fastest, _accuracy_of_async, _bounded, _soft, _repaired)
    found = [text for claim in claims if (text := claim(cells)) is not None]
    listed = ", ".join(f"{number:.1f} points on {name}" for name, number in points.items())
    meant = (
        "A cell is a recipe on so many workers of a cluster. *Clearly* more or less accurate means by as much as BSP's "
        f"own accuracy falls from one test to the next, and {LEAST:g} points at least; *close* to where BSP ended is "
        f"within that: {listed}.\n"
    )
    return "\n".join(["## What shows, and what does not\n", meant, *found])


def _has(cells: Cells, *rules: str) -> Cells:
    return {key: runs for key, runs in cells.items() if all(rule in runs for rule in rules)}


def _named(key: tuple[str, int, str]) -> str:
    return f"{key[0]} on {key[1]}, {key[2]}"


def _clear(one: dict[str, Any], other: dict[str, Any]) -> int:
    """1 if one is clearly more accurate than the other, -1 if clearly less, 0 else."""
    points = _points(one, other)
    return 0 if abs(points) < one["clear"] else 1 if points > 0 else -1


def _points(one: dict[str, Any], other: dict[str, Any]) -> float:
    return 100 * float(one["accuracy"] - other["accuracy"])


def _shown(count: int, total: int) -> str:
    """In how many of all cells a claim shows, in words."""
    if count in (0, total):
        return "It shows." if count else "It does not show."
    return "It shows in most of them." if 2 * count > total else "It does not show in most of them."


def _range(values: list[float], form: str) -> str:
    low, high = f"{min(values):{form}}", f"{max(values):{form}}"
    return low if low == high else f"{low} to {high}"


def _slowest(cells: Cells) -> str | None:
    """An epoch on uneven workers, in epochs on even ones."""
    lines = []
    for cluster in ("one slow", "pauses"):
        ratios: dict[str, list[float]] = {LOCKSTEP: [], SCALED: []}
        for (part, workers, name), runs in _has(cells, LOCKSTEP, SCALED).items():
            even = cells.get((part, workers, "even"))
            if name == cluster and even is not None:
                for rule, values in ratios.items():
                    values.append(runs[rule]["epoch_s"] / even[rule]["epoch_s"])
        if ratios[LOCKSTEP]:
            lines.append(
                f"With *{cluster}* an epoch takes BSP {_range(ratios[LOCKSTEP], '.2f')} times as long as on even "
                f"workers, and async {_range(ratios[SCALED], '.2f')} times."
            )
            shows = min(ratios[LOCKSTEP]) > 1.5 and all(
                ours > theirs for ours, theirs in zip(ratios[LOCKSTEP], ratios[SCALED], strict=True)
            )
            lines.append("It shows." if shows else "It does not show in all cells.")
    return "**BSP pays for the slowest worker.** " + " ".join(lines) + "\n" if lines else None


def _fastest(cells: Cells) -> str | None:
    """Per epoch's worth of samples, and to an accuracy."""
    cells = _has(cells, LOCKSTEP, SCALED)
    if not cells:
        return None
    gains = [runs[LOCKSTEP]["epoch_s"] / runs[SCALED]["epoch_s"] for runs in cells.values()]
    faster = {key: ahead for key, runs in cells.items() if (ahead := _ahead(runs))}
    clusters = list(dict.fromkeys(name for _, _, name in cells))
    always = [name for name in clusters if all(key[2] != name for key in faster)]
    sometimes = [name for name in clusters if name not in always]
    shows = (
        f"It shows in every cell with *{'* and *'.join(always)}*"
        if always
        else "In no cluster does it show in all cells"
    )
    if sometimes:
        rules = sorted({rule for ahead in faster.values() for rule in ahead})
        shows += f"; in {len(faster)} with *{'* and *'.join(sometimes)}* it does not: {', '.join(rules)} had faster "
        shows += "epochs, since SSP reads seldom and async after every step"
    return (
        f"**Async is fastest per second.** An epoch is {_range(gains, '.2f')} times as fast as under BSP, over "
        f"{len(cells)} cells. {shows}. " + _to_accuracy(cells)
    )


def _ahead(runs: Runs) -> list[str]:
    """Rules with epochs that are clearly faster than async's."""
    return [rule for rule, run in runs.items() if run["epoch_s"] < 0.995 * runs[SCALED]["epoch_s"]]


def _to_accuracy(cells: Cells) -> str:
    first, never = _sooner(cells, SCALED)
    return (
        f"Seconds count only with what was learnt in them: async with 1 / N of the rate came close to where BSP "
        f"ended sooner than BSP itself in {first} of {len(cells)} cells, and not at all in {never}.\n"
    )


def _sooner(cells: Cells, rule: str) -> tuple[int, int]:
    """In how many cells a rule came close to where BSP ended before BSP did, and in how many never."""
    first, never = 0, 0
    for runs in cells.values():
        goal = runs[LOCKSTEP]["accuracy"] - runs[LOCKSTEP]["clear"] / 100
        theirs, ours = seconds_to(runs[rule], goal), seconds_to(runs[LOCKSTEP], goal)
        never += theirs is None
        first += theirs is not None and ours is not None and theirs < ours
    return first, never


def _accuracy_of_async(cells: Cells) -> str | None:
    """After the same number of epochs."""
    lines = []
    for rule, rate in ((SCALED, "1 / N of the rate"), (WHOLE, "the whole rate")):
        chosen = _has(cells, LOCKSTEP, rule)
        differences = {key: _points(runs[rule], runs[LOCKSTEP]) for key, runs in chosen.items()}
        if differences:
            worse = [key for key, runs in chosen.items() if _clear(runs[rule], runs[LOCKSTEP]) < 0]
            better = [key for key, runs in chosen.items() if _clear(runs[rule], runs[LOCKSTEP]) > 0]
            lines.append(
                f"With {rate} it is clearly less accurate than BSP after the same epochs in {len(worse)} of "
                f"{len(differences)} cells and clearly more in {len(better)} "
                f"({_range(list(differences.values()), '+.1f')} points)."
            )
            lines.append(_shown(len(worse), len(differences)))
            lines += [f"Less: {_grouped(worse)}."] if worse else []
            lines += [f"More: {_grouped(better)}."] if better else []
    if not lines:
        return None
    return (
        "**Async loses accuracy per epoch.** "
        + " ".join(lines)
        + " More is no mistake: N steps are made where BSP makes "
        "one, and where they are short enough for their staleness that is worth more than fresh gradients.\n"
    )


def _grouped(keys: list[tuple[str, int, str]]) -> str:
    """Cells in words, those of one part and size together."""
    sizes: dict[tuple[str, int], list[str]] = {}
    for part, workers, cluster in keys:
        sizes.setdefault((part, workers), []).append(cluster)
    return "; ".join(f"{part} on {workers} ({', '.join(names)})" for (part, workers), names in sizes.items())


def _bounded(cells: Cells) -> str | None:
    """The part of async's gain in time that SSP has, and what it costs in accuracy."""
    lines, both = [], []
    for cluster in ("even", "one slow", "pauses"):
        for rule in ("SSP 1", "SSP 3", "SSP 10", "SSP 3, eager"):
            chosen = {key: runs for key, runs in _has(cells, LOCKSTEP, SCALED, rule).items() if key[2] == cluster}
            if not chosen:
                continue
            shares = [_share(runs, rule) for runs in chosen.values()]
            differences = [_points(runs[rule], runs[LOCKSTEP]) for runs in chosen.values()]
            lines.append(f"| {cluster} | {rule} | {_range(shares, '.0%')} | {_range(differences, '+.1f')} |")
            kept = [key for key, runs in chosen.items() if _clear(runs[rule], runs[LOCKSTEP]) >= 0]
            both += [(*key, rule) for key in kept if _share(chosen[key], rule) > MOST]
    if not lines:
        return None
    total = len([1 for runs in cells.values() for rule in runs if rule.startswith("SSP") and SCALED in runs])
    table = "\n".join(
        ["| cluster | rule | of async's gain in time | points from BSP |", "| --- | --- | ---: | ---: |", *lines]
    )
    reached = "; ".join(f"{rule} in {_named((part, workers, name))}" for part, workers, name, rule in both)
    named = f" ({reached})" if both else ""
    sooner = []
    for rule in ("SSP 1", "SSP 3", "SSP 10", "SSP 3, eager"):
        if own := _has(cells, LOCKSTEP, rule):
            first, never = _sooner(own, rule)
            sooner.append(f"{rule} in {first} of {len(own)} cells, never in {never}")
    return f"""**SSP gets most of both.** How much of the time that async saves on BSP's epoch SSP saves too, and how
far its accuracy is from BSP's after the same epochs, over all recipes and sizes:

{table}

More than half of the time, and nothing clearly lost: {len(both)} of {total} runs{named}.
{_shown(len(both), total)} Close to where BSP ended, sooner than BSP itself:
{"; ".join(sooner)}.
With a worker that is *always* slow a bound cannot help for long: once the others are as far ahead as it allows, they
wait for that worker in every step, as under BSP. What is gained is that head start, once, and fewer messages to wait
for. Pauses, which hit one worker now and another then, are what SSP is for. Its steps are whole ones, on gradients that
are whole steps old, where async's are an N-th of that: SSP's bound of 1 is about as stale as async is with N workers,
and with larger bounds it is staler than async is on average. A smaller rate for SSP was not tried.
"""


def _soft(cells: Cells) -> str | None:
    """Dong's other remedy, beside BSP and async."""
    cells = _has(cells, LOCKSTEP, SCALED, SOFT)
    if not cells:
        return None
    uneven = [_share(runs, SOFT) for key, runs in cells.items() if key[2] != "even"]
    differences = [_points(runs[SOFT], runs[LOCKSTEP]) for runs in cells.values()]
    first, never = _sooner(cells, SOFT)
    lost = sum(_clear(runs[SOFT], runs[LOCKSTEP]) < 0 for runs in cells.values())
    saved = f" On uneven workers it saves {_range(uneven, '.0%')} of what async saves." if uneven else ""
    return (
        f"**Soft synchronisation helps.**{saved} It is {_range(differences, '+.1f')} points from BSP after the same "
        f"epochs, clearly below it in {lost} of {len(cells)} cells, and came close to where BSP ended sooner than "
        f"BSP in {first}, never in {never}. "
        + ("It shows.\n" if 2 * first > len(cells) > 2 * lost else "It hardly shows.\n")
    )


def _share(runs: Runs, rule: str) -> float:
    gap = runs[LOCKSTEP]["epoch_s"] - runs[SCALED]["epoch_s"]
    return float((runs[LOCKSTEP]["epoch_s"] - runs[rule]["epoch_s"]) / gap)


def _repaired(cells: Cells) -> str | None:
    """What the scaling gives back of what async at the whole rate lost."""
    cells = _has(cells, LOCKSTEP, SCALED, WHOLE, AWARE)
    lost = {key: runs for key, runs in cells.items() if _clear(runs[WHOLE], runs[LOCKSTEP]) < 0}
    if not cells:
        return None
    text = "**Scaling by 1 / staleness repairs much of it.** "
    text += f"At the whole rate async lost in {len(lost)} of {len(cells)} cells. "
    if lost:
        given = {
            key: _points(runs[AWARE], runs[WHOLE]) / _points(runs[LOCKSTEP], runs[WHOLE]) for key, runs in lost.items()
        }
        much = [key for key, share in given.items() if share > MOST]
        little = [key for key in given if key not in much]
        text += f"There the scaling gives back {_range(list(given.values()), '.0%')} of what was lost. "
        text += f"More than half: {_grouped(much)}. " if much else ""
        text += f"Less: {_grouped(little)}. " if little else ""
        text += f"{_shown(len(much), len(given))} "
    unneeded = {key: runs for key, runs in cells.items() if _clear(runs[AWARE], runs[WHOLE]) < 0}
    if unneeded:
        text += f"Where nothing was broken it costs: clearly less than the whole rate in {_grouped(list(unneeded))}. "
    beyond = [_points(runs[AWARE], runs[SCALED]) for runs in cells.values()]
    clear = sum(_clear(runs[AWARE], runs[SCALED]) > 0 for runs in cells.values())
    worse = sum(_clear(runs[AWARE], runs[SCALED]) < 0 for runs in cells.values())
    return (
        text
        + "Beside 1 / N of the rate for all updates, which looks at no staleness, the scaling is clearly better in "
        f"{clear} cells, clearly worse in {worse}, and the same in {len(cells) - clear - worse} "
        f"({_range(beyond, '+.1f')} points). Async's staleness is N - 1 on average, so the two nearly agree, but for "
        "what is fresher: the first N updates add up to 1 + 1 + 1/2 + 1/3 ... whole steps when they are scaled, and to "
        "one at 1 / N of the rate. Whether that is what hurts was not tested.\n"
    )
