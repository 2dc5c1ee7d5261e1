"""Whether what the papers say of staleness shows, worked out from what was measured."""

from typing import Any

CLEAR = 3
"""A difference in accuracy is one from so many points on."""
MOST = 0.5
"""More than this part of a gap is most of it."""
LOCKSTEP, SCALED, WHOLE, AWARE = "BSP", "async, rate / N", "async, whole rate", "async, aware"

Runs = dict[str, dict[str, Any]]
"""Of one cell, by rule."""
Cells = dict[tuple[str, int, str], Runs]
"""By part, workers and cluster."""


def seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """When a run first reached an accuracy, in virtual seconds; None if it never did."""
    return next((float(seconds) for _, seconds, reached in run["points"] if reached >= accuracy), None)


def verdict(result: dict[str, Any]) -> str:
    """The section on what shows and what does not."""
    cells: Cells = {}
    for run in result["runs"]:
        cells.setdefault((run["part"], run["workers"], run["cluster"]), {})[run["rule"]] = run
    claims = (_slowest, _fastest, _accuracy_of_async, _bounded, _repaired)
    found = [text for claim in claims if (text := claim(cells)) is not None]
    return "\n".join(["## What shows, and what does not\n", *found])


def _has(cells: Cells, *rules: str) -> Cells:
    return {key: runs for key, runs in cells.items() if all(rule in runs for rule in rules)}


def _named(key: tuple[str, int, str]) -> str:
    return f"{key[0]} on {key[1]}, {key[2]}"


def _points(one: dict[str, Any], other: dict[str, Any]) -> float:
    return 100 * float(one["accuracy"] - other["accuracy"])


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
    first, never = 0, 0
    for runs in cells.values():
        goal = runs[LOCKSTEP]["accuracy"] - CLEAR / 100
        theirs, ours = seconds_to(runs[SCALED], goal), seconds_to(runs[LOCKSTEP], goal)
        never += theirs is None
        first += theirs is not None and ours is not None and theirs < ours
    return (
        f"Seconds count only with what was learnt in them: async with 1 / N of the rate came within {CLEAR} points of "
        f"where BSP ended sooner than BSP itself in {first} of {len(cells)} cells, and not at all in {never}.\n"
    )


def _accuracy_of_async(cells: Cells) -> str | None:
    """After the same number of epochs."""
    lines = []
    for rule, rate in ((SCALED, "1 / N of the rate"), (WHOLE, "the whole rate")):
        differences = {key: _points(runs[rule], runs[LOCKSTEP]) for key, runs in _has(cells, LOCKSTEP, rule).items()}
        if differences:
            worse = [key for key, points in differences.items() if points <= -CLEAR]
            better = [key for key, points in differences.items() if points >= CLEAR]
            lines.append(
                f"With {rate} it is clearly less accurate than BSP after the same epochs in {len(worse)} of "
                f"{len(differences)} cells and clearly more in {len(better)} "
                f"({_range(list(differences.values()), '+.1f')} points)."
            )
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
        for rule in ("SSP 1", "SSP 3", "SSP 10"):
            chosen = {key: runs for key, runs in _has(cells, LOCKSTEP, SCALED, rule).items() if key[2] == cluster}
            if not chosen:
                continue
            shares = [_share(runs, rule) for runs in chosen.values()]
            differences = [_points(runs[rule], runs[LOCKSTEP]) for runs in chosen.values()]
            lines.append(f"| {cluster} | {rule} | {_range(shares, '.0%')} | {_range(differences, '+.1f')} |")
            good = zip(chosen, shares, differences, strict=True)
            both += [(*key, rule) for key, share, points in good if share > MOST and points > -CLEAR]
    if not lines:
        return None
    total = len([1 for runs in cells.values() for rule in runs if rule.startswith("SSP") and SCALED in runs])
    table = "\n".join(
        ["| cluster | rule | of async's gain in time | points from BSP |", "| --- | --- | ---: | ---: |", *lines]
    )
    reached = "; ".join(f"{rule} in {_named((part, workers, name))}" for part, workers, name, rule in both)
    named = f" ({reached})" if both else ""
    return f"""**SSP gets most of both.** How much of the time that async saves on BSP's epoch SSP saves too, and how
far its accuracy is from BSP's after the same epochs, over all recipes and sizes:

{table}

More than half of the time, and less than {CLEAR} points lost: {len(both)} of {total} runs{named}.
With a worker that is *always* slow a bound cannot help for long: once the others are as far ahead as it allows, they
wait for that worker in every step, as under BSP. What is gained is that head start, once, and fewer messages to wait
for. Pauses, which hit one worker now and another then, are what SSP is for. Its steps are whole ones, on gradients that
are whole steps old, where async's are an N-th of that: SSP's bound of 1 is about as stale as async is with N workers.
"""


def _share(runs: Runs, rule: str) -> float:
    gap = runs[LOCKSTEP]["epoch_s"] - runs[SCALED]["epoch_s"]
    return float((runs[LOCKSTEP]["epoch_s"] - runs[rule]["epoch_s"]) / gap)


def _repaired(cells: Cells) -> str | None:
    """What the scaling gives back of what async at the whole rate lost."""
    cells = _has(cells, LOCKSTEP, SCALED, WHOLE, AWARE)
    lost = {key: runs for key, runs in cells.items() if _points(runs[WHOLE], runs[LOCKSTEP]) <= -CLEAR}
    if not cells:
        return None
    text = "**Scaling by 1 / staleness repairs much of it.** "
    text += f"At the whole rate async lost in {len(lost)} of {len(cells)} cells. "
    if lost:
        given = {
            key: _points(runs[AWARE], runs[WHOLE]) / _points(runs[LOCKSTEP], runs[WHOLE]) for key, runs in lost.items()
        }
        much = [key for key, share in given.items() if share > MOST]
        text += (
            f"There the scaling gives back {_range(list(given.values()), '.0%')} of what was lost, more than half in "
            f"{len(much)} ({_grouped(much)}). "
            if much
            else f"There it gives back {_range(list(given.values()), '.0%')}. "
        )
    unneeded = {key: runs for key, runs in cells.items() if _points(runs[AWARE], runs[WHOLE]) <= -CLEAR}
    if unneeded:
        text += f"Where nothing was broken it costs: clearly less than the whole rate in {_grouped(list(unneeded))}. "
    beyond = [_points(runs[AWARE], runs[SCALED]) for runs in cells.values()]
    clear = sum(points >= CLEAR for points in beyond)
    worse = sum(points <= -CLEAR for points in beyond)
    return (
        text
        + "Beside 1 / N of the rate for all updates, which looks at no staleness, the scaling is clearly better in "
        f"{clear} cells, clearly worse in {worse}, and the same in {len(cells) - clear - worse} "
        f"({_range(beyond, '+.1f')} points): async's staleness is N - 1 on average, so the two nearly agree.\n"
    )
