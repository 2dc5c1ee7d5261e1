"""The claims about staleness, compared with the measurements."""

from collections.abc import Iterator
from dataclasses import dataclass

from reproductions.report import PaperClaim, bullets, prose, table, value_range
from reproductions.staleness.results import (
    ASYNC,
    ASYNC_AWARE,
    ASYNC_FULL_RATE,
    BSP,
    SOFT_SYNC,
    SSP_RULES,
    StalenessResults,
    StalenessRun,
)

MOST = 0.5
"""More than this fraction of a gap is most of it."""
FASTER = 0.995
"""An epoch shorter than this fraction of async's is faster."""


@dataclass(frozen=True)
class Configuration:
    """The runs of one task, number of workers and cluster, by rule."""

    task: str
    workers: int
    cluster: str
    clear_points: float
    """Difference in accuracy, in points, from which on it is clear."""
    runs: dict[str, StalenessRun]

    def has(self, *rules: str) -> bool:
        """Return whether all these rules were trained."""
        return all(rule in self.runs for rule in rules)

    def points(self, rule: str, other: str) -> float:
        """Return by how many points a rule is more accurate than another."""
        return 100 * (self.runs[rule].accuracy - self.runs[other].accuracy)

    def compare(self, rule: str, other: str) -> int:
        """Return 1 if a rule is clearly more accurate than another, -1 if clearly less, and 0 otherwise."""
        points = self.points(rule, other)
        return 0 if abs(points) < self.clear_points else 1 if points > 0 else -1

    def saved_fraction(self, rule: str) -> float:
        """Return how much of the time per epoch that async saves on BSP a rule saves."""
        bsp_s = self.runs[BSP].epoch_s
        return (bsp_s - self.runs[rule].epoch_s) / (bsp_s - self.runs[ASYNC].epoch_s)

    def seconds_to_goal(self, rule: str) -> float | None:
        """Return the virtual seconds until a rule first came close to BSP's final accuracy."""
        return self.runs[rule].seconds_to(self.runs[BSP].accuracy - self.clear_points / 100)

    def sooner(self, rule: str) -> bool:
        """Return whether a rule came close to BSP's final accuracy before BSP itself."""
        own, bsp = self.seconds_to_goal(rule), self.seconds_to_goal(BSP)
        return own is not None and bsp is not None and own < bsp


def configurations(results: StalenessResults) -> list[Configuration]:
    """Group the runs."""
    groups: dict[tuple[str, int, str], dict[str, StalenessRun]] = {}
    for run in results.runs:
        groups.setdefault((run.task, run.workers, run.cluster), {})[run.rule] = run
    return [Configuration(*key, results.clear_points(key[0]), runs) for key, runs in groups.items()]


def claims(results: StalenessResults) -> list[PaperClaim]:
    """Return all claims that the measured rules and clusters allow to compare."""
    configs = configurations(results)
    return [
        *_slowest_worker_claims(configs),
        *_throughput_claims(configs),
        *_async_accuracy_claims(configs),
        *_bounded_claims(configs),
        *_soft_sync_claims(configs),
        *_aware_claims(configs),
    ]


def _with(configs: list[Configuration], *rules: str) -> list[Configuration]:
    return [config for config in configs if config.has(*rules)]


def _slowest_worker_claims(configs: list[Configuration]) -> Iterator[PaperClaim]:
    """Compare the epoch time on uneven workers with that on even workers."""
    even = {(config.task, config.workers): config for config in configs if config.cluster == "even"}
    for cluster in ("one slow", "pauses"):
        ratios: dict[str, list[float]] = {BSP: [], ASYNC: []}
        for config in _with(configs, BSP, ASYNC):
            base = even.get((config.task, config.workers))
            if config.cluster == cluster and base is not None:
                for rule, values in ratios.items():
                    values.append(config.runs[rule].epoch_s / base.runs[rule].epoch_s)
        if ratios[BSP]:
            measured = (
                f"epoch {value_range(ratios[BSP], '.2f')} × as long as on even workers; async "
                f"{value_range(ratios[ASYNC], '.2f')} ×"
            )
            pairs = zip(ratios[BSP], ratios[ASYNC], strict=True)
            agrees = min(ratios[BSP]) > 1.5 and all(bsp > asynchronous for bsp, asynchronous in pairs)
            yield PaperClaim(f"BSP waits for the slowest worker (*{cluster}*)", "no number", measured, agrees)


def _throughput_claims(configs: list[Configuration]) -> Iterator[PaperClaim]:
    """Compare the time per epoch's worth of samples."""
    chosen = _with(configs, BSP, ASYNC)
    for cluster in dict.fromkeys(config.cluster for config in chosen):
        here = [config for config in chosen if config.cluster == cluster]
        gains = [config.runs[BSP].epoch_s / config.runs[ASYNC].epoch_s for config in here]
        faster = sorted({rule for config in here for rule in _faster_than_async(config)})
        measured = f"epoch {value_range(gains, '.2f')} × as fast as under BSP"
        reason = f"{', '.join(faster)} are faster: SSP reads rarely, async after every step" if faster else ""
        yield PaperClaim(f"Async has the highest throughput (*{cluster}*)", "no number", measured, not faster, reason)


def _faster_than_async(config: Configuration) -> list[str]:
    return [rule for rule, run in config.runs.items() if run.epoch_s < FASTER * config.runs[ASYNC].epoch_s]


def _async_accuracy_claims(configs: list[Configuration]) -> Iterator[PaperClaim]:
    """Compare the accuracy after the same number of epochs."""
    for rule in (ASYNC, ASYNC_FULL_RATE):
        chosen = _with(configs, BSP, rule)
        if not chosen:
            continue
        signs = [config.compare(rule, BSP) for config in chosen]
        points = value_range([config.points(rule, BSP) for config in chosen], "+.1f")
        measured = (
            f"clearly less accurate than BSP in {signs.count(-1)} of {len(chosen)} configurations, clearly more in "
            f"{signs.count(1)} ({points} points)"
        )
        statement = f"Stale gradients reduce accuracy per epoch (*{rule}*)"
        yield PaperClaim(statement, "no number", measured, 2 * signs.count(-1) > len(chosen))


def _bounded_claims(configs: list[Configuration]) -> Iterator[PaperClaim]:
    runs = [(config, rule) for config in configs for rule in SSP_RULES if config.has(BSP, ASYNC, rule)]
    if runs:
        both = [(config, rule) for config, rule in runs if _gets_both(config, rule)]
        measured = f"in {len(both)} of {len(runs)} runs more than half of async's gain in time and no clear loss"
        agrees = 2 * len(both) > len(runs)
        reason = "" if agrees else "whole steps on gradients that are whole steps old; see below"
        yield PaperClaim("SSP combines BSP's convergence with async's speed", "no number", measured, agrees, reason)


def _gets_both(config: Configuration, rule: str) -> bool:
    return config.saved_fraction(rule) > MOST and config.compare(rule, BSP) >= 0


def _soft_sync_claims(configs: list[Configuration]) -> Iterator[PaperClaim]:
    chosen = _with(configs, BSP, ASYNC, SOFT_SYNC)
    if not chosen:
        return
    first = sum(config.sooner(SOFT_SYNC) for config in chosen)
    lost = sum(config.compare(SOFT_SYNC, BSP) < 0 for config in chosen)
    points = value_range([config.points(SOFT_SYNC, BSP) for config in chosen], "+.1f")
    measured = (
        f"close to BSP's final accuracy before BSP in {first} of {len(chosen)} configurations; clearly less accurate "
        f"in {lost} ({points} points)"
    )
    agrees = 2 * first > len(chosen) > 2 * lost
    yield PaperClaim("Soft synchronisation reduces the cost of staleness", "no number", measured, agrees)


def _aware_claims(configs: list[Configuration]) -> Iterator[PaperClaim]:
    lost = [config for config in _with(configs, BSP, ASYNC, ASYNC_FULL_RATE, ASYNC_AWARE) if _lost_at_full_rate(config)]
    if lost:
        fractions = [recovered_fraction(config) for config in lost]
        most = sum(fraction > MOST for fraction in fractions)
        measured = (
            f"recovers {value_range(fractions, '.0%')} of the accuracy that async loses at the full rate; more than "
            f"half in {most} of {len(lost)} configurations"
        )
        statement = "Scaling updates by 1 / staleness reduces the cost of staleness"
        yield PaperClaim(statement, "no number", measured, 2 * most > len(lost))


def _lost_at_full_rate(config: Configuration) -> bool:
    return config.compare(ASYNC_FULL_RATE, BSP) < 0


def recovered_fraction(config: Configuration) -> float:
    """Return how much of the accuracy lost by async at the full rate the scaling by staleness recovers."""
    return config.points(ASYNC_AWARE, ASYNC_FULL_RATE) / config.points(BSP, ASYNC_FULL_RATE)


def detail_blocks(results: StalenessResults) -> list[str]:
    """Return the lists and the table behind the claims, as Markdown blocks."""
    configs = configurations(results)
    return [
        *_accuracy_details(configs),
        *_bounded_details(configs),
        *_soft_sync_details(configs),
        *_aware_details(configs),
    ]


def _accuracy_details(configs: list[Configuration]) -> list[str]:
    items = []
    for rule in (ASYNC, ASYNC_FULL_RATE):
        chosen = _with(configs, BSP, rule)
        for sign, word in ((-1, "less"), (1, "more")):
            if different := [config for config in chosen if config.compare(rule, BSP) == sign]:
                items.append(f"*{rule}* is clearly {word} accurate than BSP on {_grouped(different)}.")
    chosen = _with(configs, BSP, ASYNC)
    if chosen:
        first = sum(config.sooner(ASYNC) for config in chosen)
        never = sum(config.seconds_to_goal(ASYNC) is None for config in chosen)
        items.append(f"""*{ASYNC}* came close to BSP's final accuracy before BSP in {first} of {len(chosen)}
            configurations, and never in {never}.""")
    if any(config.compare(ASYNC_FULL_RATE, BSP) > 0 for config in _with(configs, BSP, ASYNC_FULL_RATE)):
        items.append(
            """At the full rate the servers make N steps where BSP makes one. Where these steps are short enough for
            their staleness, this is worth more than fresh gradients."""
        )
    return ["**Asynchronous SGD**", bullets(items)] if items else []


def _grouped(configs: list[Configuration]) -> str:
    """Return configurations in words, those of one task and number of workers together."""
    groups: dict[tuple[str, int], list[str]] = {}
    for config in configs:
        groups.setdefault((config.task, config.workers), []).append(config.cluster)
    return "; ".join(f"{task} with {workers} workers ({', '.join(names)})" for (task, workers), names in groups.items())


def _bounded_details(configs: list[Configuration]) -> list[str]:
    rows, both, sooner = [], [], []
    for cluster in ("even", "one slow", "pauses"):
        for rule in SSP_RULES:
            chosen = [config for config in _with(configs, BSP, ASYNC, rule) if config.cluster == cluster]
            if chosen:
                fractions = [config.saved_fraction(rule) for config in chosen]
                points = [config.points(rule, BSP) for config in chosen]
                rows.append([cluster, rule, value_range(fractions, ".0%"), value_range(points, "+.1f")])
                both += [f"{rule} on {_grouped([config])}" for config in chosen if _gets_both(config, rule)]
    for rule in SSP_RULES:
        if chosen := _with(configs, BSP, ASYNC, rule):
            first = sum(config.sooner(rule) for config in chosen)
            never = sum(config.seconds_to_goal(rule) is None for config in chosen)
            sooner.append(f"{rule}: {first} of {len(chosen)}, never {never}")
    if not rows:
        return []
    return [
        "**Bounded staleness (SSP).** Fraction of the time per epoch that async saves on BSP and SSP saves too, and "
        "accuracy relative to BSP after the same epochs:",
        table(("cluster", "rule", "fraction of async's gain", "points from BSP"), rows, num_text_columns=2),
        bullets(
            [
                f"More than half of the time and no clear loss: {'; '.join(both) or 'none'}.",
                f"Configurations in which SSP came close to BSP's final accuracy before BSP: {'; '.join(sooner)}.",
                """With a worker that is always slow, a bound cannot help for long. Once the others are as far ahead as
                it allows, they wait for that worker in every step, as under BSP. Pauses, which hit one worker after
                another, are what SSP is for.""",
                """An SSP step has the whole learning rate, on gradients that are whole steps old; an async step has an
                N-th of it. A bound of 1 is about as stale as async with N workers, and larger bounds are staler. A
                smaller learning rate for SSP was not tried.""",
            ]
        ),
    ]


def _soft_sync_details(configs: list[Configuration]) -> list[str]:
    uneven = [config for config in _with(configs, BSP, ASYNC, SOFT_SYNC) if config.cluster != "even"]
    if not uneven:
        return []
    fractions = value_range([config.saved_fraction(SOFT_SYNC) for config in uneven], ".0%")
    return [f"**Soft synchronisation** saves {fractions} of the time that async saves, on uneven workers."]


def _aware_details(configs: list[Configuration]) -> list[str]:
    chosen = _with(configs, BSP, ASYNC, ASYNC_FULL_RATE, ASYNC_AWARE)
    if not chosen:
        return []
    lost = [config for config in chosen if _lost_at_full_rate(config)]
    items = []
    if most := [config for config in lost if recovered_fraction(config) > MOST]:
        items.append(f"It recovers more than half of the loss on {_grouped(most)}.")
    if less := [config for config in lost if recovered_fraction(config) <= MOST]:
        items.append(f"It recovers less on {_grouped(less)}.")
    if worse := [config for config in chosen if config.compare(ASYNC_AWARE, ASYNC_FULL_RATE) < 0]:
        items.append(f"It is clearly less accurate than the full rate, which lost nothing, on {_grouped(worse)}.")
    signs = [config.compare(ASYNC_AWARE, ASYNC) for config in chosen]
    points = value_range([config.points(ASYNC_AWARE, ASYNC) for config in chosen], "+.1f")
    items += [
        f"""Compared with 1 / N of the rate for all updates, it is clearly better in {signs.count(1)} configurations,
        clearly worse in {signs.count(-1)} and the same in {signs.count(0)} ({points} points).""",
        """Async's staleness is N − 1 on average, so the two nearly agree, except at the start: the first N updates add
        up to 1 + 1 + 1/2 + 1/3 … whole steps when scaled by staleness, and to one at 1 / N of the rate. Whether this
        causes the difference was not tested.""",
    ]
    return [prose("**Scaling by 1 / staleness**"), bullets(items)]
