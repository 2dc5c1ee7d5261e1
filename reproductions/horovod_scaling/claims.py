"""The statements of Malik et al. (2018), compared with the simulation."""

from reproductions.horovod_scaling.results import HorovodResults
from reproductions.report import PaperClaim

MODEL_NAMES = {"alexnet": "AlexNet", "googlenet": "GoogLeNet", "resnet50": "ResNet-50"}
ALMOST_LINEAR = 0.9
"""Efficiency from which a curve over workers would look nearly straight."""
SAME_SPEED = 1.1
"""Speeds that differ by less than this factor would coincide in a figure."""
POOR = 0.5
"""Efficiency below which scaling counts as poor."""
SATURATED = 0.95
"""Fraction of the highest throughput from which more workers gain nothing."""


def claims(results: HorovodResults) -> list[PaperClaim]:
    """Return all claims that the simulated models and methods allow to compare."""
    return [*_all_reduce_claims(results), *_server_claims(results)]


def _all_reduce_claims(results: HorovodResults) -> list[PaperClaim]:
    found = []
    ring, most = results.methods[0].name, max(results.config.workers)
    for model in results.config.models:
        name = MODEL_NAMES[model]
        rows = results.select(model=model, method=ring, workers=most)
        low, high = (pick(row.efficiency for row in rows) for pick in (min, max))
        measured = f"efficiency {low:.1%} to {high:.1%} with {most} workers"
        statement = f"{name}, Horovod: throughput and latency almost linear"
        found.append(PaperClaim(statement, "no number", measured, low >= ALMOST_LINEAR))
        if len(results.config.batches) > 1:
            found.append(_batch_size_claim(results, model, ring, most))
    return found


def _batch_size_claim(results: HorovodResults, model: str, method: str, workers: int) -> PaperClaim:
    rows = results.select(model=model, method=method, workers=workers)
    speeds = {row.batch_size: row.images_per_s for row in rows}
    best, ratio = max(speeds, key=speeds.__getitem__), max(speeds.values()) / min(speeds.values())
    alone = [row.images_per_s / row.efficiency for row in rows]
    measured = f"{best} is fastest, {ratio:.2f} × the slowest; on one GPU {max(alone) / min(alone):.2f} ×"
    if model == "alexnet":
        statement = "AlexNet, Horovod: the larger batch size is best"
        return PaperClaim(statement, "no number", measured, best == max(speeds) and ratio > SAME_SPEED)
    agrees = ratio <= SAME_SPEED
    reason = "" if agrees else "batch sizes differ on one GPU already, by the H200's compute times"
    return PaperClaim(
        f"{MODEL_NAMES[model]}, Horovod: all batch sizes equally fast", "no number", measured, agrees, reason
    )


def _server_claims(results: HorovodResults) -> list[PaperClaim]:
    """Return the claims about a single dedicated server, if one was simulated."""
    names = [method.name for method in results.methods if method.num_servers == 1]
    if not names:
        return []
    found, efficiencies = [], {}
    most, batch_size = max(results.config.workers), min(results.config.batches)
    for model in results.config.models:
        rows = results.select(model=model, method=names[0], batch_size=batch_size)
        last = next(row for row in rows if row.workers == most)
        efficiencies[model] = last.efficiency
        highest = max(row.images_per_s for row in rows)
        saturation = next(row.workers for row in rows if row.images_per_s >= SATURATED * highest)
        gain = "throughput still grows" if saturation == most else f"no gain beyond {saturation}"
        measured = f"efficiency {last.efficiency:.1%} with {most} workers; {gain} ({batch_size} images each)"
        statement = f"{MODEL_NAMES[model]}, one parameter server: poor scalability"
        found.append(PaperClaim(statement, "no number", measured, last.efficiency < POOR))
    if "alexnet" in efficiencies and len(efficiencies) > 1:
        worst = min(efficiencies, key=efficiencies.__getitem__)
        statement = "One parameter server: AlexNet's many parameters make communication the bottleneck"
        found.append(
            PaperClaim(statement, "no number", f"{MODEL_NAMES[worst]} has the lowest efficiency", worst == "alexnet")
        )
    return found
