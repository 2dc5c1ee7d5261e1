"""The claims about training without a parameter server, compared with the measurements."""

from statistics import mean

from reproductions.decentralised.results import (
    ALL_REDUCE,
    EXACT,
    EXACT_SMALL_INBOX,
    NO_RESIDUAL,
    RESIDUAL,
    SERVERS,
    DecentralisedResults,
    DecentralisedRun,
    TrafficByWorkers,
)
from reproductions.report import PaperClaim, bullets
from tutti.cluster import format_size

CLOSE_POINTS = 2.0
"""Points from all-reduce's final accuracy: less is close, and a larger difference between two runs is clear."""
FRACTION = 0.5
"""Less than this part of another time is a fraction of it."""
GOSSIP_CLOSE_POINTS = 0.5
"""Largest difference in points between gossip and all-reduce that counts as the same accuracy."""
SAME_BYTES = 1.02
"""Byte counts that differ by less than this factor are the same."""

RunsByWorkers = dict[int, dict[str, DecentralisedRun]]
"""First-seed runs of the task `sites` by number of workers and method."""


def goal(runs: dict[str, DecentralisedRun]) -> float:
    """Return the accuracy that is close to all-reduce's final one."""
    return runs[ALL_REDUCE].accuracy - CLOSE_POINTS / 100


def site_runs(results: DecentralisedResults) -> RunsByWorkers:
    """Return the first-seed runs of the task `sites`."""
    return {workers: results.first_seed("sites", workers) for workers in results.task("sites").workers}


def claims(results: DecentralisedResults) -> list[PaperClaim]:
    """Return all claims."""
    sites = site_runs(results)
    return [
        _residual_claim(sites),
        *(_server_claim(sites, server) for server in SERVERS),
        _traffic_claim(sites),
        _exact_claim(sites),
        _gossip_claim(results),
        _independence_claim(results),
    ]


def _residual_claim(sites: RunsByWorkers) -> PaperClaim:
    texts, differences = [], []
    for workers, runs in sites.items():
        with_residual, without = runs[RESIDUAL].accuracy, runs[NO_RESIDUAL].accuracy
        differences.append(100 * (with_residual - without))
        texts.append(f"{with_residual:.1%} with, {without:.1%} without ({workers} workers)")
    statement = "Without the residual, accuracy is lower at the same density (Strom)"
    return PaperClaim(statement, "no number", "; ".join(texts), min(differences) > CLOSE_POINTS)


def _server_claim(sites: RunsByWorkers, server: str) -> PaperClaim:
    """Compare the virtual time until the accuracy is close to all-reduce's."""
    texts, fractions = [], []
    for workers, runs in sites.items():
        peers_s, server_s = runs[RESIDUAL].seconds_to(goal(runs)), runs[server].seconds_to(goal(runs))
        fractions.append(1.0 if peers_s is None else 0.0 if server_s is None else peers_s / server_s)
        texts.append(f"{_seconds(peers_s)} and {_seconds(server_s)} ({workers} workers)")
    statement = f"A central server is a bottleneck: peers need less than half the time of *{server}* (Dong)"
    agrees = max(fractions) < FRACTION
    reason = "" if agrees else f"peers need up to {max(fractions):.0%} of its time"
    return PaperClaim(statement, "no number", "; ".join(texts), agrees, reason)


def _seconds(seconds: float | None) -> str:
    return "never" if seconds is None else f"{seconds:.1f} s"


def _traffic_claim(sites: RunsByWorkers) -> PaperClaim:
    factors = {workers: runs[EXACT].bytes_per_step / runs[RESIDUAL].bytes_per_step for workers, runs in sites.items()}
    measured = ", ".join(f"{factor:.0f} times less ({workers} workers)" for workers, factor in factors.items())
    statement = "Compressed updates reduce the traffic by orders of magnitude (Dong)"
    return PaperClaim(statement, "orders of magnitude", measured, min(factors.values()) >= 10)


def _exact_claim(sites: RunsByWorkers) -> PaperClaim:
    texts, ratios = [], []
    for workers, runs in sites.items():
        exact, compressed = runs[EXACT], runs[RESIDUAL]
        ratios.append(exact.seconds / compressed.seconds)
        texts.append(f"{exact.step_ms:.0f} ms per step, {compressed.step_ms:.0f} ms compressed ({workers} workers)")
    statement = "Exact updates to all peers overload wide-area links"
    return PaperClaim(statement, "no number", "; ".join(texts), min(ratios) > 1 / FRACTION)


def _gossip_claim(results: DecentralisedResults) -> PaperClaim:
    points = {name: mean(results.points_from_all_reduce(name)) for name in results.gossip_methods()}
    far = [_short(name) for name, value in points.items() if abs(value) > GOSSIP_CLOSE_POINTS]
    measured = ", ".join(f"{_short(name)} {value:+.2f}" for name, value in points.items()) + " points"
    statement = "Gossip reaches the accuracy of all-reduce (Lian et al.)"
    return PaperClaim(statement, "no number", measured, not far, f"not on {', '.join(far)}" if far else "")


def _short(name: str) -> str:
    return name.removeprefix("gossip, ")


def _traffic_of_gossip(
    results: DecentralisedResults,
) -> tuple[dict[str, TrafficByWorkers], dict[str, TrafficByWorkers]]:
    """Return the gossip methods whose traffic is the same for all numbers of workers, and the others."""
    same: dict[str, TrafficByWorkers] = {}
    other: dict[str, TrafficByWorkers] = {}
    for row in results.traffic:
        if row.method in results.gossip_methods():
            constant = max(row.bytes_per_step) < SAME_BYTES * min(row.bytes_per_step)
            (same if constant else other)[_short(row.method)] = row
    return same, other


def _independence_claim(results: DecentralisedResults) -> PaperClaim:
    same, other = _traffic_of_gossip(results)
    numbers = results.traffic[0].workers
    texts = [f"the same on {', '.join(same)}"] if same else []
    texts += [f"{name} {_size_range(row)}" for name, row in other.items()]
    statement = f"Gossip's traffic per worker does not depend on N ({numbers[0]} to {numbers[-1]} workers)"
    reasons = []
    if "torus" in other:
        reasons.append("a torus has four neighbours only from 3 × 3 workers on")
    if "async pairs" in other:
        reasons.append("async pairs vary in a few steps")
    return PaperClaim(statement, "no number", "; ".join(texts), not other, "; ".join(reasons))


def _size_range(row: TrafficByWorkers) -> str:
    low, high = format_size(min(row.bytes_per_step)), format_size(max(row.bytes_per_step))
    return low if low == high else f"{low} to {high}"


def detail_blocks(results: DecentralisedResults) -> list[str]:
    """Return what else the runs show about the claims, as Markdown blocks."""
    sites = site_runs(results)
    return [bullets([_share_text(sites), *_exact_texts(sites), _gossip_text(results)])]


def _share_text(sites: RunsByWorkers) -> str:
    """Describe how unequal the workers' shares are with one server."""
    shares = []
    for runs in sites.values():
        steps = sorted(runs[SERVERS[0]].steps)
        shares.append(f"{sum(steps[-(len(steps) // 4) :]) / sum(steps):.0%}")
    return f"""With one server, the workers at its site make {" and ".join(shares)} of all steps, because their messages
        have no distance to travel. Held to equal shares, the run lasts as long as the farthest worker needs."""


def _exact_texts(sites: RunsByWorkers) -> list[str]:
    texts = []
    for workers, runs in sites.items():
        exact = runs[EXACT]
        texts.append(
            f"""{workers} workers: exact updates send {format_size(exact.bytes_per_step)} per step and worker between
            sites. From one test to the next the accuracy drops by up to {exact.largest_drop:.1f} points with exact
            updates, {runs[EXACT_SMALL_INBOX].largest_drop:.1f} with an inbox of 2, and
            {runs[RESIDUAL].largest_drop:.1f} with the threshold."""
        )
    return [
        *texts,
        """Updates that wait to be sent are late, and a rank may be ahead of the others by as much as its inbox allows.
        Where the links are full, updates are as stale as that.""",
    ]


def _gossip_text(results: DecentralisedResults) -> str:
    traffic = {row.method: row for row in results.traffic}
    seconds = [mean(run.seconds for run in results.gossip_runs(name)) for name in results.gossip_methods()]
    reference = mean(run.seconds for run in results.gossip_runs(ALL_REDUCE))
    return f"""All-reduce by the ring sends {_size_range(traffic[ALL_REDUCE])}, 2 (N − 1) / N of the model, which hardly
        grows either. Compared with it, gossip saves waiting ({min(seconds):.1f} to {max(seconds):.1f} virtual seconds
        instead of {reference:.1f}), and bytes where a step has one neighbour. The exact updates of peers grow with N:
        {_size_range(traffic[EXACT])}."""
