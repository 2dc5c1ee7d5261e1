"""Meshes priced: what splitting a model saves, what it costs, and whether a simulation of it agrees."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from profiles import perceptron
from tutti.bench import meshes as bench
from tutti.cluster import Cluster, Link
from tutti.errors import ConfigError
from tutti.job import distribute
from tutti.launch import init
from tutti.parallel import Mesh, Pipeline
from tutti.parallel.pipeline.schedules import actions_by_rank
from tutti.plan import price
from tutti.plan.mesh import MeshPrediction, ModelParts, plan_meshes, price_mesh
from tutti.plan.mesh.axis_placement import placement_along
from tutti.plan.mesh.choose import meshes
from tutti.plan.mesh.dry_run import TracedCollective
from tutti.plan.mesh.pipeline_simulation import PipelineSimulation, StageTime
from tutti.plan.profile import profile as profile_model
from tutti.recipes.models import mlp
from tutti.simulation import operator_clock
from tutti.simulation.runs.simulate import simulate
from tutti.strategies import AllReduce

SIZES = (512, 512, 512, 512, 512)
FREE = Cluster(link=Link("100tbit", "1ns"), within=Link("100tbit", "1ns"))
X = torch.zeros(64, 512)


def model() -> nn.Module:
    return nn.Sequential(*(nn.Linear(inputs, outputs) for inputs, outputs in pairwise(SIZES)))


@pytest.fixture(scope="module")
def parts() -> ModelParts:
    """Timed by operations."""

    def tried() -> ModelParts:
        transport = init().transport
        found = ModelParts(model(), X, transport.now)
        with operator_clock.counting(transport):
            for mesh in meshes(4):
                found.stages(mesh.tensor, mesh.pipe)
        return found

    found: ModelParts = simulate(tried, workers=1).results[0]
    return found


def priced(parts: ModelParts, mesh: Mesh, cluster: Cluster, samples: int = 256) -> MeshPrediction:
    return price_mesh(mesh, parts, perceptron(*SIZES, computing_s=0.06), cluster, samples)


def test_a_simulation_of_every_mesh_takes_as_long() -> None:
    case = bench.compare("digits", "100mbit", 4, bench.profile_parts("digits", [4]), lambda _: None)
    assert len(case.rows) == 6
    middle, worst = bench.error_summary(case.rows)
    assert middle < 0.10, case.as_dict()
    assert worst < 0.25, case.as_dict()
    assert case.times < 1.1


def test_replicas_alone_cost_what_their_strategy_does(parts: ModelParts) -> None:
    cluster = Cluster(link=Link("1gbit", "50us"))
    found = priced(parts, Mesh(data=4), cluster)
    whole = price(AllReduce(), perceptron(*SIZES, computing_s=0.06), 4, cluster)
    assert found.step_s == pytest.approx(whole.step_s)
    assert (found.tensor_s, found.waiting_s) == (0, 0)


@pytest.mark.parametrize(("microbatches", "pipe"), [(4, 2), (16, 2), (4, 4)])
def test_a_pipeline_of_even_stages_waits_as_theory_says(microbatches: int, pipe: int) -> None:
    stages = [StageTime(1.0, 2.0, ((), ()), [0.0], 0.0)] * pipe
    found = PipelineSimulation(actions_by_rank("1f1b", pipe, 1, microbatches), stages, Link("1tbit", 0.0)).seconds()
    assert 1 - 3 * microbatches / found == pytest.approx((pipe - 1) / (microbatches + pipe - 1), rel=1e-6)


def test_what_stages_give_each_other_queues_at_their_network_card() -> None:
    stages = [StageTime(1.0, 1.0, ((), ()), [1e6], 0.0)] * 2
    found = PipelineSimulation(actions_by_rank("gpipe", 2, 1, 4), stages, Link("1mbit", 0.0)).seconds()
    assert found == pytest.approx(1 + 4 * 8 + 1 + 1 + 4 * 8 + 1), "one after the other there, and back"


def test_layers_in_pairs_talk_once_forward_and_once_back(parts: ModelParts) -> None:
    (part,) = parts.stages(2, 1)
    once = TracedCollective("all_reduce", 4 * 64 * 512)
    assert part.profile.forward == (once, once)
    assert part.profile.backward == (once,), "nobody wants the gradient of what the first layer takes"
    found = priced(parts, Mesh(tensor=2), Cluster(link=Link("1gbit", "50us")), samples=64)
    assert found.computing_s == pytest.approx(0.03)
    assert found.tensor_s == pytest.approx(3 * 2 * (50e-6 + 4 * 64 * 512 / 2 * 8e-9))


def test_rows_that_leave_a_host_share_its_link() -> None:
    cluster = Cluster(link=Link("8gbit", "50us"), ranks_per_host=2)
    mesh = Mesh(tensor=2, data=4)
    assert placement_along("tensor", mesh, cluster).link == cluster.within
    assert placement_along("data", mesh, cluster).link == Link("4gbit", "50us")
    assert placement_along("data", mesh, cluster).num_hosts == 4
    alone = placement_along("data", Mesh(data=8), cluster)
    assert (alone.link, alone.num_hosts, alone.num_ranks) == (Link("8gbit", "50us"), 4, 8)


MESHES = [Mesh(data=2, tensor=2), Mesh(data=2, pipe=2), Mesh(tensor=2, pipe=2)]


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}-{mesh.tensor}-{mesh.pipe}")
def test_memory_is_what_ranks_hold(mesh: Mesh, parts: ModelParts) -> None:
    def train() -> int:
        init()
        trained = model()
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
        job = distribute(trained, optimizer, mesh=mesh, example=X)
        job.pipeline(nn.functional.mse_loss)(X, X)
        optimizer.step()
        held: list[Any] = [*trained.parameters(), *(p.grad for p in trained.parameters())]
        held += [state["momentum_buffer"] for state in optimizer.state.values()]
        found = sum(tensor.nbytes for tensor in held if tensor is not None)
        job.finish()
        return found

    whole = model()
    momentum = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    profile = profile_model(whole, X, optimizer=momentum, repeats=1)
    found = price_mesh(mesh, parts, profile, FREE, 64)
    assert found.lasting_bytes == max(simulate(train, workers=mesh.size).results)
    assert found.memory_bytes > found.lasting_bytes


def test_activations_are_kept_as_the_schedule_keeps_them(parts: ModelParts) -> None:
    whole = priced(parts, Mesh(), FREE, samples=6400).memory_bytes
    early, late = (
        priced(parts, Mesh(pipe=4, pipeline=Pipeline(schedule=it, microbatches=64)), FREE, samples=6400).memory_bytes
        for it in ("1f1b", "gpipe")
    )
    assert early < late < whole


def test_all_meshes_of_so_many() -> None:
    shapes = [(it.data, it.tensor, it.pipe) for it in meshes(8)]
    assert len(shapes) == len(set(shapes)) == 10
    assert shapes[0] == (8, 1, 1)
    assert all(data * tensor * pipe == 8 for data, tensor, pipe in shapes)


def test_replicas_where_they_fit_and_are_fastest(parts: ModelParts) -> None:
    found = plan_meshes(parts, perceptron(*SIZES, computing_s=1.0), 4, Cluster(link=Link("1gbit", "50us")))
    assert found.best is not None
    assert found.best.mesh == Mesh(data=4)
    assert found.reason.startswith("Do not split the model")


def test_a_model_too_large_for_a_worker_is_split(parts: ModelParts) -> None:
    profile = perceptron(*SIZES, computing_s=1.0)
    limit = round(0.9 * profile.peak_bytes)
    found = plan_meshes(parts, profile, 4, Cluster(link=Link("1gbit", "50us")), memory_bytes=limit)
    assert found.best is not None
    assert found.best.mesh.tensor * found.best.mesh.pipe > 1
    assert found.best.memory_bytes <= limit
    assert "Replicas of the whole model would need" in found.reason
    assert {each["fits"] for each in found.as_dict()["meshes"]} == {True, False}


def test_nothing_fits(parts: ModelParts) -> None:
    found = plan_meshes(parts, perceptron(*SIZES, computing_s=1.0), 4, FREE, memory_bytes=1000)
    assert found.best is None
    assert found.reason.startswith("Do not train this on 4 workers of 1000 B")


def test_what_cannot_be_is_said(parts: ModelParts) -> None:
    small = ModelParts(mlp(784, 16, 10), torch.zeros(64, 784))
    profile = perceptron(784, 16, 10, computing_s=0.01)
    found = plan_meshes(small, profile, 8, FREE)
    assert "8 stages need as many layers or more, and the model has 3" in found.refused["pipe=8"]
    assert "divide into the 16 microbatches" in plan_meshes(small, profile, 8, FREE, total_samples=24).refused["pipe=8"]
    with pytest.raises(ConfigError, match=r"1 samples leave some of 4 replicas without any"):
        priced(parts, Mesh(data=4), FREE, samples=1)
    with pytest.raises(ConfigError, match="schedule 'zero-bubble' is not priced"):
        priced(parts, Mesh(pipe=2, pipeline=Pipeline(schedule="zero-bubble")), FREE)
    with pytest.raises(ConfigError, match="memory_bytes must be 1 or more"):
        plan_meshes(parts, perceptron(*SIZES, computing_s=1.0), 4, FREE, memory_bytes=0)
