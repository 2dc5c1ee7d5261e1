"""What is chosen, and when the answer is: none of it."""

import json

import pytest

from profiles import lab_perceptron, perceptron
from tutti.cluster import Cluster, Jitter, Link
from tutti.errors import ConfigError, NoLink
from tutti.plan import Prediction, RunSize, plan
from tutti.plan.choose import choose
from tutti.plan.scaling import sharing_cores
from tutti.strategies import AllReduce, ParameterServer, Strategy, parse

SLOW, FAST = Cluster(link=Link("100mbit", "100us")), Cluster(link=Link("100gbit", "2us"))
UNEVEN = Cluster(link=Link("1gbit", "50us"), jitter=Jitter(0.1))
TINY = perceptron(64, 10, computing_s=1e-4, num_samples=8)


def prediction(strategy: str, step_s: float, num_bytes: float = 1.0) -> Prediction:
    return Prediction(
        strategy=parse(strategy),
        workers=4,
        num_samples=1,
        total_samples=4,
        step_s=step_s,
        computing_s=0.1,
        exposed_s=step_s - 0.1,
        bytes_per_step=num_bytes,
        memory_bytes=0,
    )


def test_a_tiny_model_on_a_slow_link_is_not_worth_distributing() -> None:
    found = plan(TINY, 4, Cluster(link=Link("10mbit", "1ms")))
    assert not found.distribute
    assert found.best.samples_per_s < found.alone.samples_per_s
    assert found.reason.startswith("Do not distribute: ")
    assert found.stops_paying_at == 1


def test_a_large_model_on_a_fast_link_is() -> None:
    found = plan(lab_perceptron(0.1), 16, FAST)
    assert found.distribute
    assert found.best.samples_per_s > 14 * found.alone.samples_per_s
    assert found.reason.startswith(f"Use {found.best.strategy}: ")
    assert found.stops_paying_at is None
    assert found.most_workers == 1024


def test_at_100_gbit_nothing_is_worth_compressing() -> None:
    found = plan(lab_perceptron(0.02), 16, FAST, allow_lossy=True)
    assert found.compress is False
    assert "Do not compress: " in found.reason
    assert found.best.exact
    exact_s = min(each.step_s for each in found.predictions if str(each.strategy) == "native")
    sums = [each for each in found.predictions if isinstance(each.strategy, AllReduce)]
    compressed = [each for each in sums if each.strategy.codec is not None]
    assert len(compressed) > 5
    assert min(each.step_s for each in compressed) > exact_s


def test_on_a_slow_link_it_is() -> None:
    found = plan(lab_perceptron(0.02), 4, SLOW, allow_lossy=True)
    assert found.compress is True
    assert not found.best.exact
    assert "accuracy is not predicted" in found.reason


@pytest.mark.parametrize(("num_steps", "longest"), [(399, 16), (400, 100), (63, 1), (0, 1)])
def test_blocks_of_local_steps_fit_several_times_into_the_run(num_steps: int, longest: int) -> None:
    profile = lab_perceptron(0.02)
    run = RunSize(num_samples=num_steps * 4 * profile.num_samples)
    found = plan(profile, 4, SLOW, allow_lossy=True, run=run)
    assert found.num_steps == num_steps
    assert max(each.strategy.steps_per_exchange or 1 for each in found.predictions) == longest
    assert f"The run has {num_steps} steps: blocks of more than {max(1, num_steps // 4)} local" in found.reason
    # 16 workers take a quarter of the steps with the same samples.
    by_workers = {row.workers: parse(row.strategy) for row in found.scaling.rows if row.workers > 1}
    assert all(4 * (each.steps_per_exchange or 1) <= max(4, 4 * num_steps / n) for n, each in by_workers.items())
    assert "The run has" not in plan(profile, 4, SLOW, run=run).reason


def test_how_long_a_run_must_be_where_that_is_not_known() -> None:
    found = plan(lab_perceptron(0.02), 4, SLOW, allow_lossy=True)
    every = found.best.strategy.steps_per_exchange
    assert every is not None
    assert every > 1
    assert found.num_steps is None
    assert f"It exchanges every {every} steps: use it in runs of {4 * every} steps or more." in found.reason


def test_what_is_lossy_is_asked_for() -> None:
    found = plan(lab_perceptron(0.02), 4, SLOW)
    assert all(each.exact for each in found.predictions)
    assert found.compress is None


def test_the_best_comes_first_and_the_rest_by_speed() -> None:
    found = plan(lab_perceptron(0.02), 4, SLOW, allow_lossy=True)
    steps = [each.step_s for each in found.predictions[1:]]
    assert steps == sorted(steps)
    assert len({str(each.strategy) for each in found.predictions}) == len(found.predictions)
    assert found.best is found.predictions[0]


def test_exact_is_preferred_to_lossy() -> None:
    exact = prediction("ring", 1.0)
    assert choose([exact, prediction("tree", 2.0)], [prediction("onebit", 0.95)]) is exact
    clearly = prediction("onebit", 0.5)
    assert choose([exact], [clearly]) is clearly


def test_of_exact_ones_that_differ_by_little_all_reduce() -> None:
    ring, servers = prediction("ring", 1.0), prediction("ps:bsp", 0.985)
    assert choose([servers, ring], []) is ring
    assert choose([prediction("ps:bsp", 0.9), ring], []).strategy == parse("ps:bsp")
    assert choose([ring, prediction("tree", 0.985)], []) is ring, "the first of them"


def test_workers_that_share_cores() -> None:
    """On four cores: two threads each for two workers, one for four, and half a core for eight."""
    single, whole = perceptron(64, 10, computing_s=1.0), perceptron(64, 10, computing_s=0.4)
    profile = sharing_cores(single, whole, 4)
    assert [profile(n).forward_s * 3 for n in (1, 2, 3, 4, 8)] == pytest.approx([0.4, 0.5, 1.0, 1.0, 2.0])
    poorly = sharing_cores(single, perceptron(64, 10, computing_s=0.8), 4)
    assert poorly(2).forward_s * 3 == pytest.approx(0.8), "two threads are no quicker than four"
    assert sharing_cores(whole, single, 4)(1) is whole, "threads that are in each other's way are not used"
    found = plan(profile, 4, Cluster(hosts=1))
    assert found.alone.computing_s == pytest.approx(0.4)
    assert found.best.computing_s == pytest.approx(1.0)
    assert found.distribute
    assert found.best.samples_per_s < 1.7 * found.alone.samples_per_s
    assert plan(profile, 16, Cluster(hosts=1)).best.samples_per_s < 1.7 * found.alone.samples_per_s


def test_of_lossy_ones_about_as_fast_the_nearest_to_exact() -> None:
    lossies = [prediction("topk", 0.50, 1), prediction("onebit", 0.52, 30), prediction("bf16", 0.8, 500)]
    assert choose([prediction("ring", 1.0)], lossies) is lossies[1]
    others = [prediction("gossip", 0.5, 100), prediction("bmuf:every=16", 0.5, 50), prediction("ps:async", 0.5, 40)]
    assert choose([prediction("ring", 1.0)], [*others, lossies[1]]) is lossies[1], "what sums all gradients"
    assert choose([prediction("ring", 1.0)], others) is others[2]
    assert choose([prediction("ring", 1.0)], others[:2]) is others[1]
    # About as fast as the fastest, and no longer clearly faster than what is exact.
    assert choose([prediction("ring", 0.56)], lossies) is lossies[0]


def test_a_number_of_workers_stops_paying() -> None:
    """Two exchange their gradients in less time than they compute, four do not."""
    profile, cluster = perceptron(784, 128, 10, computing_s=4.5e-3), Cluster(link=Link("1gbit", "100us"))
    found = plan(profile, 8, cluster)
    assert (found.stops_paying_at, found.most_workers) == (2, 4)
    assert plan(profile, 2, cluster).best.efficiency > 0.5 > plan(profile, 4, cluster).best.efficiency


def test_one_worker_alone_is_the_quickest() -> None:
    """Four of whom one is slow train fewer samples than a quick one by itself."""
    found = plan(lab_perceptron(0.02), 4, Cluster(link=Link("1gbit", "50us"), slow={0: 4.0}))
    assert found.alone.step_s == pytest.approx(0.02)
    assert not found.distribute
    assert found.stops_paying_at == 1


def test_samples_that_do_not_exist_are_not_counted() -> None:
    found = plan(lab_perceptron(0.02), 32, FAST, run=RunSize(global_batch=48))
    assert found.best.num_samples == 2
    assert found.best.samples_per_s == pytest.approx(48 / found.best.step_s)


def test_no_more_workers_than_places() -> None:
    found = plan(lab_perceptron(0.1), 4, Cluster(link=Link("100gbit", "2us"), hosts=4, ranks_per_host=1))
    assert (found.stops_paying_at, found.most_workers) == (None, 4)
    assert not any(
        isinstance(each.strategy, ParameterServer) and each.strategy.num_dedicated_servers for each in found.predictions
    )
    with pytest.raises(ConfigError, match="5 ranks are more than the hosts of 'cluster' hold, 4"):
        plan(lab_perceptron(0.1), 5, Cluster(hosts=4, ranks_per_host=1))


def test_a_global_batch_is_divided() -> None:
    profile = lab_perceptron(0.064)
    found = plan(profile, 4, FAST, run=RunSize(global_batch=128))
    assert found.best.num_samples == 32
    assert found.best.computing_s == pytest.approx(0.032)
    assert found.alone.num_samples == 128
    assert found.alone.computing_s == pytest.approx(0.128)
    with pytest.raises(ConfigError, match="a global batch of 3 samples leaves some of 4 workers without any"):
        plan(profile, 4, FAST, run=RunSize(global_batch=3))


def test_strong_scaling_stops_paying_where_weak_scaling_goes_on() -> None:
    profile, cluster = lab_perceptron(0.5), Cluster(link=Link("2gbit", "50us"))
    weak, strong = plan(profile, 8, cluster), plan(profile, 8, cluster, run=RunSize(global_batch=64))
    assert weak.stops_paying_at is None
    assert strong.stops_paying_at is not None


def test_what_is_uneven_is_simulated_until_the_best_was() -> None:
    asked: list[Strategy] = []

    def simulated(strategy: Strategy) -> float:
        asked.append(strategy)
        return 9.0 if len(asked) == 1 else 1e-3

    found = plan(lab_perceptron(0.02), 4, UNEVEN, simulator=simulated)
    assert len(asked) == 2
    assert (found.best.strategy, found.best.step_s, found.best.simulated) == (asked[1], 1e-3, True)
    assert found.predictions[-1].strategy == asked[0], "what the simulation finds slow is not the best"
    asked.clear()
    assert not plan(lab_perceptron(0.02), 4, SLOW, simulator=simulated).best.simulated
    assert asked == [], "formulas hold"


def test_few_are_simulated() -> None:
    asked: list[Strategy] = []

    def simulated(strategy: Strategy) -> float:
        asked.append(strategy)
        return 9.0

    plan(lab_perceptron(0.02), 4, UNEVEN, simulator=simulated, allow_lossy=True)
    assert len(set(asked)) == len(asked) == 12, "six exact ones, and six others"


def test_what_would_talk_where_no_link_is_is_left_out() -> None:
    def simulated(strategy: Strategy) -> float:
        if strategy != AllReduce("ring"):
            raise NoLink("not joined")
        return 2.0

    found = plan(TINY, 3, UNEVEN, simulator=simulated)
    assert [(each.strategy, each.step_s) for each in found.predictions] == [(AllReduce("ring"), 2.0)]


def test_hosts_that_nothing_joins() -> None:
    apart = Cluster(link=None, hosts=2)
    with pytest.raises(NoLink, match="hosts of the cluster 'cluster' are not joined as any strategy needs"):
        plan(TINY, 2, apart)
    assert plan(TINY, 1, apart).stops_paying_at == 1


def test_without_an_exact_one_the_best_of_the_others() -> None:
    others = [prediction("gossip", 0.5), prediction("bmuf:every=16", 0.7)]
    assert choose([], others) is others[0]


def test_one_worker() -> None:
    found = plan(TINY, 1, SLOW)
    assert not found.distribute
    assert found.best.step_s == found.alone.step_s
    assert found.reason == "One worker exchanges nothing."


def test_refused() -> None:
    with pytest.raises(ConfigError, match="workers must be 1 or more, got 0"):
        plan(TINY, 0, SLOW)


def test_a_plan_as_json() -> None:
    found = json.loads(json.dumps(plan(TINY, 4, SLOW, allow_lossy=True).as_dict()))
    assert found["predictions"][0]["strategy"]
    assert {"step_s", "computing_s", "exposed_s", "bytes_per_step", "memory_bytes", "efficiency", "exact"} <= set(
        found["predictions"][0]
    )
    assert found["alone"]["workers"] == 1


def test_scaling_says_where_doubling_stops_paying_and_why() -> None:
    found = plan(lab_perceptron(0.02), 8, Cluster(link=Link("1gbit", "50us")))
    assert [row.workers for row in found.scaling.rows] == [1, 2, 4, 8]
    assert found.scaling.rows[-1].samples_per_s == found.best.samples_per_s
    for row in found.scaling.rows:
        assert row.speed_up == pytest.approx(row.samples_per_s / found.alone.samples_per_s)
        assert row.efficiency == pytest.approx(row.speed_up / row.workers)
    assert found.stops_paying_at == 2
    assert found.scaling.reason.startswith("More than 2 workers do not pay: ")
    assert "does not count as worthwhile." in found.scaling.reason
    odd = plan(lab_perceptron(0.02), 3, Cluster(link=Link("100gbit", "1us")))
    assert [row.workers for row in odd.scaling.rows][:4] == [1, 2, 3, 4]
    assert odd.scaling.reason.startswith("Every doubling pays up to 1024 workers")
