"""The statements of Zhang et al. (2015) and Kim (2016) about Poseidon, compared with the results."""

from collections.abc import Iterator

from reproductions.poseidon.results import LateWorkers, PoseidonResults
from reproductions.poseidon.traffic import TIMES_FULL, TIMES_OWNERS, layer_shapes, published_factors
from reproductions.report import PaperClaim

MODEL_NAMES = {"cifar-quick": "cifar-quick", "alexnet": "AlexNet", "googlenet": "GoogLeNet"}
PLAIN, DWBP, DWBP_SACP, COST_BASED = "plain back-propagation", "DWBP", "DWBP + SACP", "DWBP, cost-based rule"
PUBLISHED_SPEED_UPS = {"cifar-quick": 4.0, "alexnet": 4.5, "googlenet": 4.0}
"""Speed-ups with 8 nodes, in the abstract of Zhang et al. (2015)."""
NUM_NODES = 8
SAME = 1.1
"""Values that differ by less than this factor are the same."""
FASTER = 1.02
"""Ratio of speeds from which on one is faster."""
LATE_WORKERS: dict[LateWorkers, str] = {
    "even": "even workers",
    "one slow": "one slow worker",
    "pauses": "pauses at random",
}


def claims(results: PoseidonResults) -> list[PaperClaim]:
    """Return all claims that the simulated models, rates and workers allow to compare."""
    num_nodes = min(NUM_NODES, max(results.config.workers))
    return [
        *_speed_up_claims(results, num_nodes),
        *_gain_claims(results, num_nodes),
        _loss_claim(results),
        *_parameter_claims(results),
        *_factor_claims(),
        *_staleness_claims(results),
    ]


def _speed_up_claims(results: PoseidonResults, num_nodes: int) -> Iterator[PaperClaim]:
    """Compare the speed-ups with 8 nodes, if as many were simulated."""
    rates = results.config.rates
    for model in results.config.models if num_nodes == NUM_NODES else ():
        published = PUBLISHED_SPEED_UPS[model]
        values = {rate: results.speed_up(model, rate, DWBP_SACP, num_nodes) for rate in rates}
        measured = ", ".join(f"{value:.1f} × at {rate}" for rate, value in values.items())
        first = values[rates[0]]
        agrees = max(published, first) <= SAME * min(published, first)
        reason = "" if agrees else "copies between GPU and host, disks and Caffe's own waiting are not simulated"
        statement = f"{MODEL_NAMES[model]}: speed-up with {NUM_NODES} nodes of 40 GbE"
        yield PaperClaim(statement, f"{published:g} ×", measured, agrees, reason)


def _gain_claims(results: PoseidonResults, num_nodes: int) -> Iterator[PaperClaim]:
    """Compare each part of Poseidon with what it is added to; the source had the first link rate."""
    reasons = {
        DWBP: "on fast links there is little communication left to overlap",
        DWBP_SACP: "reconstructing the gradients from factors takes longer than sending them, or few layers qualify",
    }
    for better, worse in ((DWBP, PLAIN), (DWBP_SACP, DWBP)):
        for model in results.config.models:
            gains = {}
            for rate in results.config.rates:
                new, old = (results.speed_up(model, rate, variant, num_nodes) for variant in (better, worse))
                gains[rate] = new / old
            texts = ", ".join(f"{gain:.2f} × at {rate}" for rate, gain in gains.items())
            agrees = next(iter(gains.values())) >= FASTER
            statement = f"{MODEL_NAMES[model]}: {better} is faster than {worse}"
            reason = "" if agrees else reasons[better]
            yield PaperClaim(statement, "no number", f"{texts}, with {num_nodes} workers", agrees, reason)


def _loss_claim(results: PoseidonResults) -> PaperClaim:
    workers = [number for number in results.config.workers if number > 1]
    few, many, rate = min(workers), max(workers), results.config.rates[-1]
    texts, all_lose = [], True
    for model in results.config.models:
        before, after = (results.speed_up(model, rate, PLAIN, number) / number for number in (few, many))
        texts.append(f"{MODEL_NAMES[model]} {before:.0%} to {after:.0%}")
        all_lose &= after < before
    statement = f"Without DWBP and SACP, efficiency falls with more nodes ({rate}, {few} and {many} workers)"
    return PaperClaim(statement, "no number", ", ".join(texts), all_lose)


def _parameter_claims(results: PoseidonResults) -> Iterator[PaperClaim]:
    for row in results.parameters:
        published, here = (connected / (others + connected) for others, connected in (row.published, row.here))
        agrees = abs(here - published) < 0.01
        reason = "" if agrees else "the slides do not say which network of that name they counted"
        statement = f"{row.model}: share of the parameters in fully connected layers"
        yield PaperClaim(statement, f"{published:.2%}", f"{here:.2%}", agrees, reason)


def _factor_claims() -> Iterator[PaperClaim]:
    """Compare the traffic of sufficient factors by the published formulas."""
    (fc7,) = (shape for shape in layer_shapes("AlexNet", 256) if shape.name == "fc7")
    factors = {number: published_factors([fc7], number) for number in (4, NUM_NODES)}
    for other, index, published in (("server and clients", 0, TIMES_FULL), ("Microsoft's Adam", 1, TIMES_OWNERS)):
        texts = ", ".join(f"{pair[index]:.1f} × with {number} workers" for number, pair in factors.items())
        agrees = abs(factors[4][index] - published) < 0.05
        statement = f"Broadcasting factors sends less than {other}"
        reason = f"with 4 workers, not with the {NUM_NODES} nodes of the experiments" if agrees else ""
        yield PaperClaim(statement, f"{published:g} ×", f"fc7, batch size 256: {texts}", agrees, reason)


def _staleness_claims(results: PoseidonResults) -> Iterator[PaperClaim]:
    late: tuple[LateWorkers, ...] = ("pauses", "one slow")
    for cluster in late:
        seconds = results.step_seconds(cluster)
        most = max(seconds)
        gain = seconds[0] / seconds[most]
        agrees = gain >= FASTER
        reason = "" if agrees else "once the others are ahead by the bound, they wait for the slow worker in every step"
        statement = f"Bounded staleness shortens steps ({LATE_WORKERS[cluster]})"
        yield PaperClaim(statement, "no number", f"{gain:.2f} × as fast with a bound of {most}", agrees, reason)
