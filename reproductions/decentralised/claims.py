"""Whether what is said of training without a server shows, worked out from what was measured."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import mean
from typing import Any

from tutti.cluster import format_size

CLOSE = 2.0
"""Points from where all-reduce ended: closer is close, and a larger difference between two is a clear one."""
FRACTION = 0.5
"""Less of the time than this is a fraction of it."""
GOSSIP_CLOSE = 0.5
"""Points between gossip and all-reduce, at the end."""
ALIKE = 1.02
"""Bytes that differ by less than this factor are alike."""
EXACT, LOCKSTEP = "peers, exact", "all-reduce"
RESIDUAL, NO_RESIDUAL = "peers, threshold with residual", "peers, threshold without residual"
SERVERS = ("1 server", "1 server, equal shares", "N servers")

Runs = dict[str, dict[str, Any]]
"""Of one size, by way."""


def part_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    return next(part for part in result["plan"] if part["name"] == name)


def of_size(result: dict[str, Any], part: str, workers: int) -> Runs:
    """The first seed's."""
    found: Runs = {}
    for run in result["runs"]:
        if (run["part"], run["workers"]) == (part, workers):
            found.setdefault(run["way"], run)
    return found


def of_seeds(result: dict[str, Any], way: str) -> list[dict[str, Any]]:
    """Of the part on gossip."""
    return [run for run in result["runs"] if (run["part"], run["way"]) == ("gossip", way)]


def seconds_to(run: dict[str, Any], accuracy: float) -> float | None:
    """When a run first reached an accuracy, in virtual seconds; None if it never did."""
    return next((float(seconds) for _, seconds, reached in run["points"] if reached >= accuracy), None)


def goal(runs: Runs) -> float:
    """Close to where all-reduce ended."""
    return float(runs[LOCKSTEP]["accuracy"]) - CLOSE / 100


def from_all_reduce(result: dict[str, Any], way: str) -> list[float]:
    """How many points gossip is above all-reduce at the end, by seed."""
    pairs = zip(of_seeds(result, way), of_seeds(result, LOCKSTEP), strict=True)
    return [round(100 * (ours["accuracy"] - theirs["accuracy"]), 3) for ours, theirs in pairs]


def verdict(result: dict[str, Any]) -> str:
    """The section on what shows and what does not."""
    sizes = {workers: of_size(result, "sites", workers) for workers in part_of(result, "sites")["workers"]}
    claims = [_residual(sizes), _faster(sizes), _exact(sizes), _gossip(result), _independent(result)]
    return "\n".join(["## What shows, and what does not\n", *claims])


def _residual(sizes: dict[int, Runs]) -> str:
    lines, differences = [], []
    for workers, runs in sizes.items():
        ours, theirs = runs[RESIDUAL], runs[NO_RESIDUAL]
        differences.append(100 * (ours["accuracy"] - theirs["accuracy"]))
        lines.append(f"on {workers} workers {ours['accuracy']:.1%} with it and {theirs['accuracy']:.1%} without")
    shows = min(differences) > CLOSE
    return (
        "**Without the residual, accuracy is worse at the same density.** After the same samples: "
        f"{'; '.join(lines)}. {'It shows.' if shows else 'It does not show clearly on every size.'}\n"
    )


def _faster(sizes: dict[int, Runs]) -> str:
    lines = []
    shares: dict[str, list[float]] = {way: [] for way in SERVERS}
    for workers, runs in sizes.items():
        ours = seconds_to(runs[RESIDUAL], goal(runs))
        told = []
        for way, known in shares.items():
            theirs = seconds_to(runs[way], goal(runs))
            known.append(1.0 if ours is None else 0.0 if theirs is None else ours / theirs)
            told.append(f"{way} {'never' if theirs is None else f'{theirs:.1f} s'}")
        lines.append(f"On {workers} workers peers {'never' if ours is None else f'{ours:.1f} s'}; {', '.join(told)}.")
    clear = [way for way, known in shares.items() if max(known) < FRACTION]
    other = [f"{way} ({max(known):.0%})" for way, known in shares.items() if way not in clear]
    shows = f"It shows against {' and '.join(f'*{way}*' for way in clear)}. " if clear else ""
    shows += f"It does not show against {', '.join(other)}. " if other else ""
    return (
        "**Peers with the residual are there in a fraction of the servers' time.** Virtual seconds until accuracy "
        f"first came within {CLOSE:g} points of where all-reduce ended: {' '.join(lines)} A fraction is less than "
        f"half. {shows}{_neighbour(sizes)}\n"
    )


def _neighbour(sizes: dict[int, Runs]) -> str:
    """How uneven the shares of workers are with one server."""
    parts = [run["steps"] for run in (runs["1 server"] for runs in sizes.values())]
    most = [sum(sorted(steps)[-(len(steps) // 4) :]) / sum(steps) for steps in parts]
    return (
        "With one server, the workers at its site, whose messages have no way to go, take "
        f"{' and '.join(f'{share:.0%}' for share in most)} of all steps; held to equal shares, it is done when the "
        "farthest is."
    )


def _exact(sizes: dict[int, Runs]) -> str:
    lines, longer = [], []
    for workers, runs in sizes.items():
        exact, sparse = runs[EXACT], runs[RESIDUAL]
        longer.append(exact["seconds"] / sparse["seconds"])
        lines.append(
            f"on {workers} workers a step sends {format_size(exact['step_bytes'])} a worker between sites, "
            f"{exact['step_bytes'] / sparse['step_bytes']:.0f} times what the threshold does, and takes "
            f"{_step_ms(exact):.0f} ms instead of {_step_ms(sparse):.0f}; from one test to the next accuracy falls by "
            f"up to {_largest_fall(exact):.1f} points, with an inbox of 2 by up to "
            f"{_largest_fall(runs[f'{EXACT}, inbox of 2']):.1f}, and by up to {_largest_fall(sparse):.1f} with the "
            "threshold"
        )
    shows = "It shows." if min(longer) > 1 / FRACTION else "It does not show on every size."
    return (
        f"**Exact updates are too much for these links.** Every step's change goes to every peer: {'; '.join(lines)}. "
        "What waits to be sent is late, and a rank may be as far ahead of the others as its inbox allows: so where "
        f"links are full, updates are as stale as that. {shows}\n"
    )


def _step_ms(run: dict[str, Any]) -> float:
    return float(1000 * run["seconds"] / mean(run["steps"]))


def _largest_fall(run: dict[str, Any]) -> float:
    reached = [100 * point[2] for point in run["points"]]
    return max([0.0, *(before - after for before, after in pairwise(reached))])


def _gossip(result: dict[str, Any]) -> str:
    (workers,) = part_of(result, "gossip")["workers"]
    base = mean(run["accuracy"] for run in of_seeds(result, LOCKSTEP))
    ways = {way: from_all_reduce(result, way) for way in _gossip_ways(result)}
    told = ", ".join(f"{way.removeprefix('gossip, ')} {mean(points):+.2f}" for way, points in ways.items())
    outside = [way for way, points in ways.items() if abs(mean(points)) > GOSSIP_CLOSE]
    number = len(of_seeds(result, LOCKSTEP))
    alone = [
        f"{way} ({max(points, key=abs):+.2f})"
        for way, points in ways.items()
        if abs(max(points, key=abs)) > GOSSIP_CLOSE
    ]
    by_seed = "" if number == 1 else f" With a single seed: {', '.join(alone) or 'none'} beyond that."
    shows = "It shows, on every graph." if not outside else f"It does not show for {', '.join(outside)}."
    return (
        f"**Gossip on {workers} workers ends within {GOSSIP_CLOSE:g} points of all-reduce.** All-reduce ends at "
        f"{base:.2%}; from it, in points{'' if number == 1 else f' and on average over {number} seeds'}: {told}. "
        f"{shows}{by_seed}\n"
    )


def _gossip_ways(result: dict[str, Any]) -> Iterator[str]:
    return (way["name"] for way in part_of(result, "gossip")["ways"] if way["name"] != LOCKSTEP)


def _independent(result: dict[str, Any]) -> str:
    sizes = {row["name"]: row for row in result["sizes"]}
    alike: list[str] = []
    other: list[str] = []
    for name in _gossip_ways(result):
        sent = sizes[name]["step_bytes"]
        short = name.removeprefix("gossip, ")
        (alike if max(sent) < ALIKE * min(sent) else other).append(f"{short} {_range(sent)}")
    numbers = sizes[LOCKSTEP]["workers"]
    text = f"**What a worker sends in a step does not depend on N.** From {numbers[0]} to {numbers[-1]} workers: "
    text += f"alike on {', '.join(alike)}. " if alike else ""
    text += f"Not alike on {', '.join(other)}. " if other else ""
    if any(name.startswith("torus") for name in other):
        text += "A torus has four neighbours from 3 x 3 on, and fewer on less: from there on it is alike, too. "
    if any(name.startswith("async") for name in other):
        text += "Pairs that meet at any time ask when their last question is answered: in a few steps, that varies. "
    return text + (
        f"All-reduce by the ring sends {_range(sizes[LOCKSTEP]['step_bytes'])}, 2 (N - 1) / N of the model, which does "
        f"not grow for long either: beside it gossip saves waiting, {_range_of_seconds(result)} virtual seconds, not "
        f"{mean(run['seconds'] for run in of_seeds(result, LOCKSTEP)):.1f}, and bytes where a step has one "
        f"neighbour. Peers' exact updates grow with N: {_range(sizes[EXACT]['step_bytes'])}.\n"
    )


def _range_of_seconds(result: dict[str, Any]) -> str:
    seconds = [mean(run["seconds"] for run in of_seeds(result, way)) for way in _gossip_ways(result)]
    return f"{min(seconds):.1f} to {max(seconds):.1f}"


def _range(sent: list[int]) -> str:
    low, high = format_size(min(sent)), format_size(max(sent))
    return low if low == high else f"{low} to {high}"
