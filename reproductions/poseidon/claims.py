"""Whether what Zhang et al. (2015) and Kim (2016) say of Poseidon shows, worked out from what was simulated."""

from statistics import mean
from typing import Any

from reproductions.poseidon.traffic import TIMES_FULL, TIMES_OWNERS, factors, shapes

NAMES = {"cifar-quick": "cifar-quick", "alexnet": "AlexNet", "googlenet": "GoogLeNet"}
PLAIN, WAIT_FREE, AWARE, PRICED = "plain back-propagation", "DWBP", "DWBP + SACP", "DWBP, rule by price"
PUBLISHED_SPEED_UPS = {"cifar-quick": 4.0, "alexnet": 4.5, "googlenet": 4.0}
"""With 8 nodes, in the abstract of Zhang et al. (2015)."""
NODES = 8
SAME = 1.1
"""Values that differ by less than this factor are alike."""
CLEAR = 1.02
"""A speed-up is larger than another by this factor or more."""

Claim = tuple[str, str, bool]


def speed_up(result: dict[str, Any], model: str, rate: str, way: str, workers: int) -> float:
    """Of so many workers over one."""
    return next(
        row["speed_up"]
        for row in result["rows"]
        if (row["model"], row["rate"], row["way"], row["workers"]) == (model, rate, way, workers)
    )


def verdict(result: dict[str, Any]) -> str:
    """The section on what shows and what does not."""
    lines = [
        "## Where it agrees with what they say\n",
        "The slides' words and the abstract were at hand, not the curves. Alike is within "
        f"{SAME - 1:.0%}, and faster is by {CLEAR - 1:.0%} or more: that is the reading here.\n",
        "| they say | here | |",
        "| --- | --- | --- |",
    ]
    nodes = min(NODES, max(result["plan"]["workers"]))
    claims = [*_speed(result, nodes), *_gains(result, nodes), *_loss(result), *_counts(result), *_stale(result)]
    for said, found, agrees in claims:
        lines.append(f"| {said} | {found} | {'agrees' if agrees else '**differs**'} |")
    return "\n".join(lines) + "\n"


def _speed(result: dict[str, Any], nodes: int) -> list[Claim]:
    """What is said of 8 nodes, if there were as many."""
    claims: list[Claim] = []
    for model in result["plan"]["models"] if nodes == NODES else []:
        said = PUBLISHED_SPEED_UPS[model]
        rates = result["plan"]["rates"]
        found = {rate: speed_up(result, model, rate, AWARE, nodes) for rate in rates}
        words = ", ".join(f"{value:.1f} at {rate}" for rate, value in found.items())
        alike = max(said, found[rates[0]]) <= SAME * min(said, found[rates[0]])
        claims.append((f"{NAMES[model]}: {said:g} times as fast with 8 nodes of 40 GbE", words, alike))
    return claims


def _gains(result: dict[str, Any], nodes: int) -> list[Claim]:
    """Each against what it is added to; they had the first link."""
    claims: list[Claim] = []
    for better, worse in ((WAIT_FREE, PLAIN), (AWARE, WAIT_FREE)):
        for model in result["plan"]["models"]:
            gains = {
                rate: speed_up(result, model, rate, better, nodes) / speed_up(result, model, rate, worse, nodes)
                for rate in result["plan"]["rates"]
            }
            words = ", ".join(f"{gain:.2f} × at {rate}" for rate, gain in gains.items())
            said = f"{NAMES[model]}: {better} is faster than {worse}"
            claims.append((said, f"{words}, with {nodes} workers", next(iter(gains.values())) >= CLEAR))
    return claims


def _loss(result: dict[str, Any]) -> list[Claim]:
    workers = [number for number in result["plan"]["workers"] if number > 1]
    few, many, rate = min(workers), max(workers), result["plan"]["rates"][-1]
    words, all_lose = [], True
    for model in result["plan"]["models"]:
        shares = [speed_up(result, model, rate, PLAIN, number) / number for number in (few, many)]
        words.append(f"{shares[0]:.0%} to {shares[1]:.0%} of linear with {NAMES[model]}")
        all_lose &= shares[1] < shares[0]
    said = f"without them, more is lost with more nodes ({rate}, {few} and {many} workers)"
    return [(said, ", ".join(words), all_lose)]


def _counts(result: dict[str, Any]) -> list[Claim]:
    claims: list[Claim] = []
    for row in result["parameters"]:
        said, here = (connected / (others + connected) for others, connected in (row["published"], row["here"]))
        claims.append(
            (f"{row['model']}: fully connected layers hold {said:.2%}", f"{here:.2%}", abs(here - said) < 0.01)
        )
    (fc7,) = (shape for shape in shapes("AlexNet", 256) if shape.name == "fc7")
    at = {number: factors([fc7], number) for number in (4, NODES)}
    for said, place, wanted in (("server and clients", 0, TIMES_FULL), ("Microsoft's Adam", 1, TIMES_OWNERS)):
        words = ", ".join(f"{pair[place]:.1f} times with {number} workers" for number, pair in at.items())
        found = abs(at[4][place] - wanted) < 0.05
        claims.append((f"factors send {wanted:g} times less than {said}", f"fc7, batches of 256: {words}", found))
    return claims


def step_seconds(result: dict[str, Any], late: str) -> dict[int, float]:
    """By bound of staleness."""
    return {row["bound"]: mean(row["step_s"]) for row in result["staleness"] if row["late"] == late}


def _stale(result: dict[str, Any]) -> list[Claim]:
    claims: list[Claim] = []
    for late, said in (("pauses", "workers that pause at random"), ("one slow", "one slow worker")):
        seconds = step_seconds(result, late)
        most = max(seconds)
        gain = seconds[0] / seconds[most]
        claims.append(
            (f"staleness keeps workers from waiting ({said})", f"{gain:.2f} × with a bound of {most}", gain >= CLEAR)
        )
    return claims
