"""What is found of overhead from two jobs, and what predictions are made of it."""

from dataclasses import replace

import pytest

from profiles import lab_perceptron
from tutti.bench.plan import HOSTS, STRATEGIES
from tutti.bench.planner_inputs import NUM_BUCKETS, PlannerInputs, profile_with_overhead, reference_jobs
from tutti.cluster import Cluster, Link
from tutti.cost import Placement
from tutti.plan import Overhead, Profile, price
from tutti.plan.candidates import candidates
from tutti.strategies import AllReduce, parse

LINK = Link("945mbit", "100us")

JOBS = reference_jobs("mlp-1.9M", HOSTS)


def seconds_with(profile: Profile, overhead: Overhead) -> dict[str, float]:
    """What a lab with that overhead would take."""
    own, cluster = replace(profile, overhead=overhead), Cluster(link=LINK)
    return {"solo": profile.seconds} | {job: price(parse(job), own, HOSTS, cluster).step_s for job in JOBS}


def found_of(profile: Profile, coding: float = 1.0) -> PlannerInputs:
    return PlannerInputs((LINK.bits_per_s, LINK.latency_s), coding, 0.3, 1.0, profile)


@pytest.mark.parametrize("coding", [1.0, 2.5])
def test_the_overhead_that_two_jobs_have_is_found(coding: float) -> None:
    there = Overhead(exchange_s=0.011, bucket_s=0.0004, coding_factor=coding, contention=0.3)
    profile, link = profile_with_overhead(
        found_of(lab_perceptron(0.02), coding), HOSTS, seconds_with(lab_perceptron(0.02), there), JOBS
    )
    assert profile.overhead.exchange_s == pytest.approx(0.011)
    assert profile.overhead.bucket_s == pytest.approx(0.0004)
    assert profile.overhead.coding_factor == coding
    assert profile.overhead.contention == 0.3
    assert link == LINK


def test_no_overhead_is_negative() -> None:
    plain = seconds_with(lab_perceptron(0.02), Overhead(contention=0.3))
    one, several = JOBS
    faster, _ = profile_with_overhead(found_of(lab_perceptron(0.02)), HOSTS, plain | {one: 0.01, several: 0.01}, JOBS)
    assert (faster.overhead.exchange_s, faster.overhead.bucket_s) == (0.0, 0.0)
    noisy, _ = profile_with_overhead(found_of(lab_perceptron(0.02)), HOSTS, plain | {one: plain[one] + 0.01}, JOBS)
    assert noisy.overhead.bucket_s == 0.0, "several buckets took no longer than one"
    assert noisy.overhead.exchange_s == pytest.approx(0.005)
    steep, _ = profile_with_overhead(
        found_of(lab_perceptron(0.02)), HOSTS, plain | {several: plain[several] + 0.01}, JOBS
    )
    assert steep.overhead.exchange_s == 0.0 < steep.overhead.bucket_s < 0.01, "as near to both as it comes"


def test_a_step_takes_what_it_takes_beside_the_others() -> None:
    """The profile says which part is whose, and steps without exchange how long they take."""
    seconds = seconds_with(lab_perceptron(0.04), Overhead(contention=0.3))
    profile, _ = profile_with_overhead(found_of(lab_perceptron(0.02)), HOSTS, seconds, JOBS)
    assert profile.seconds == pytest.approx(0.04)
    assert profile.gradients[0].ready_s == pytest.approx(2 * lab_perceptron(0.02).gradients[0].ready_s)
    assert profile.overhead.exchange_s == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("model", ["mlp-1.9M", "cifar-quick", "char-gpt"])
def test_reference_jobs_are_all_reduce_in_one_bucket_and_in_several(model: str) -> None:
    one, several = (parse(job) for job in reference_jobs(model, HOSTS))
    assert isinstance(one, AllReduce)
    assert isinstance(several, AllReduce)
    assert several.bucket_bytes * NUM_BUCKETS < one.bucket_bytes
    assert one.codec == several.codec is not None


def test_reference_jobs_of_the_perceptron() -> None:
    placement = Placement.from_cluster(HOSTS, Cluster())
    buckets = [parse(job).cost(lab_perceptron(0.02), placement).num_buckets for job in JOBS]
    assert buckets[0] == 1 < buckets[1]


def test_what_is_timed_is_what_the_planner_considers() -> None:
    considered = {str(strategy) for group in candidates(lab_perceptron(0.02), HOSTS, Cluster()) for strategy in group}
    assert set(STRATEGIES) <= considered
    assert all(str(parse(text)) == text for text in STRATEGIES)
    assert not set(STRATEGIES) & set(JOBS), "nothing is predicted from itself"
