"""Meshes priced: what splitting a model saves, and what it costs."""

from itertools import pairwise

import pytest
from torch import nn

from profiles import perceptron
from tutti.cluster import Cluster, Link
from tutti.errors import ConfigError
from tutti.parallel import Mesh, Pipeline, tensor_plan
from tutti.plan import price
from tutti.plan.mesh import MeshPrediction, plan_meshes, price_mesh
from tutti.plan.mesh.choose import meshes
from tutti.recipes.models import mlp
from tutti.strategies import AllReduce

SIZES = (512, 512, 512, 512, 512)
FREE = Cluster(link=Link("100tbit", "1ns"), within=Link("100tbit", "1ns"))


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(SIZES)))


def priced(mesh: Mesh, cluster: Cluster, computing_s: float = 0.06, samples: int = 256) -> MeshPrediction:
    profile = perceptron(*SIZES, computing_s=computing_s)
    return price_mesh(mesh, profile, tensor_plan(model(), mesh.tensor), cluster, samples)


def test_replicas_alone_cost_what_their_strategy_does() -> None:
    cluster = Cluster(link=Link("1gbit", "50us"))
    found = priced(Mesh(data=4), cluster)
    whole = price(AllReduce(), perceptron(*SIZES, computing_s=0.06), 4, cluster)
    assert found.step_s == pytest.approx(whole.step_s, rel=0.02)
    assert (found.tensor_s, found.waiting_s) == (0, 0)


@pytest.mark.parametrize(("microbatches", "pipe"), [(None, 2), (16, 2), (4, 4)])
def test_a_pipeline_of_even_stages_waits_as_theory_says(microbatches: int | None, pipe: int) -> None:
    mesh = Mesh(pipe=pipe, pipeline=Pipeline(microbatches=microbatches))
    number = microbatches or 2 * pipe
    found = priced(mesh, FREE, samples=64)
    assert found.computing_s == pytest.approx(0.06 / pipe)
    assert found.waiting_s / found.step_s == pytest.approx((pipe - 1) / (number + pipe - 1), rel=1e-3)


def test_what_stages_give_each_other_takes_its_time() -> None:
    slow = Cluster(link=Link("1mbit", "1ms"))
    free, paid = (priced(Mesh(pipe=2), cluster, samples=64).step_s for cluster in (FREE, slow))
    one = slow.link.seconds(4 * 512 * 64 / 4) if slow.link else 0.0
    assert paid == pytest.approx(5 * one + 2 * one), "the link is slower than the stages, and fills and drains"
    assert free < paid


def test_layers_in_pairs_talk_once_forward_and_once_back() -> None:
    link = Link("1gbit", "50us")
    found = priced(Mesh(tensor=2), Cluster(link=link), samples=64)
    assert found.computing_s == pytest.approx(0.03)
    # Two pairs: each sums outputs of 64 x 512, and the gradients of as many inputs.
    one = price(AllReduce(), perceptron(64 * 512 - 1, 1, computing_s=0.0), 2, Cluster(link=link)).step_s
    assert found.tensor_s == pytest.approx(4 * one, rel=0.2)


def test_memory_is_divided() -> None:
    whole, tensor, pipe = (
        priced(mesh, FREE, samples=64).memory_bytes for mesh in (Mesh(), Mesh(tensor=2), Mesh(pipe=2))
    )
    assert 0.45 < tensor / whole < 0.8, "parameters are halved, outputs of every second layer too"
    assert 0.45 < pipe / whole < 0.6


def test_all_meshes_of_so_many() -> None:
    shapes = [(it.data, it.tensor, it.pipe) for it in meshes(8)]
    assert len(shapes) == len(set(shapes)) == 10
    assert shapes[0] == (8, 1, 1)
    assert all(data * tensor * pipe == 8 for data, tensor, pipe in shapes)


def test_replicas_where_they_fit_and_are_fastest() -> None:
    found = plan_meshes(model(), perceptron(*SIZES, computing_s=1.0), 4, Cluster(link=Link("1gbit", "50us")))
    assert found.best is not None
    assert found.best.mesh == Mesh(data=4)
    assert found.reason.startswith("Do not split the model")


def test_a_model_too_large_for_a_worker_is_split() -> None:
    profile = perceptron(*SIZES, computing_s=1.0)
    limit = round(0.7 * profile.peak_bytes)
    found = plan_meshes(model(), profile, 4, Cluster(link=Link("1gbit", "50us")), memory_bytes=limit)
    assert found.best is not None
    assert found.best.mesh.tensor * found.best.mesh.pipe > 1
    assert found.best.memory_bytes <= limit
    assert "Replicas of the whole model would need" in found.reason
    assert {each["fits"] for each in found.as_dict()["meshes"]} == {True, False}


def test_nothing_fits() -> None:
    found = plan_meshes(model(), perceptron(*SIZES, computing_s=1.0), 4, FREE, memory_bytes=1000)
    assert found.best is None
    assert found.reason.startswith("None fits into 1000 B")


def test_what_cannot_be_is_said() -> None:
    found = plan_meshes(mlp(784, 16, 10), perceptron(784, 16, 10, computing_s=0.01), 8, FREE)
    assert "8 stages need as many layers or more, and the profile has 2" in found.refused["pipe=8"]
    with pytest.raises(ConfigError, match=r"1 samples leave some of 4 replicas without any"):
        priced(Mesh(data=4), FREE, samples=1)
    with pytest.raises(ConfigError, match="memory_bytes must be 1 or more"):
        plan_meshes(model(), perceptron(*SIZES, computing_s=1.0), 4, FREE, memory_bytes=0)
