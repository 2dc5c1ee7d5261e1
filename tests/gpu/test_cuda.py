"""What only a GPU can show. Run there with `TUTTI_TEST_DEVICE=cuda`; see CONTRIBUTING."""

from datetime import timedelta

import pytest
import torch
from torch import nn

import tutti
from tutti.codecs import Cast, Codec, ErrorFeedback, LowRank, OneBit, Quantize, RandomK, Threshold, TopK
from tutti.coordination import LocalCoordinator
from tutti.transports import Membership, Peer, SocketTransport

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def reduce_by_nccl() -> tuple[bool, bool, list[float]]:
    peer = Peer.this_process(0, "host", "host")
    membership = Membership(0, [peer], LocalCoordinator().member(peer.process), "alone", timedelta(seconds=30))
    with SocketTransport(membership) as transport:
        tensor = torch.ones(5, device="cuda")
        transport.all_reduce(tensor).wait()
        groups = transport._torch_groups
        return groups.one_gpu_per_rank is True, groups.nccl is not None, tensor.tolist()


def test_nccl_is_used_where_each_rank_has_its_own_gpu() -> None:
    # In a process of its own: NCCL keeps ports open until its process ends.
    assert tutti.launch(reduce_by_nccl, workers=1) == [(True, True, [1.0] * 5)]


def exchange() -> list[float]:
    world = tutti.init()
    sender = torch.full((3,), float(world.rank), device="cuda")
    received = torch.empty(3, device="cuda")
    other = 1 - world.rank
    works = [world.transport.isend(sender, other, 1), world.transport.irecv(received, other, 1)]
    for work in works:
        work.wait()
    return received.tolist()


def test_cuda_messages_between_ranks_that_share_a_gpu() -> None:
    assert tutti.launch(exchange, workers=2) == [[1.0] * 3, [0.0] * 3]


def normalise() -> tuple[torch.Tensor, torch.Tensor]:
    world = tutti.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3)).double().cuda()
    model = tutti.sync_batchnorm(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with tutti.distribute(model, optimizer):
        x = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64).cuda()
        part = x.tensor_split([7])[world.rank] if world.size == 2 else x
        for _ in range(5):
            model(part).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu(), model[1].running_var.cpu()


def test_sync_batchnorm() -> None:
    alone = tutti.launch(normalise, workers=1)[0]
    for result in tutti.launch(normalise, workers=2):
        torch.testing.assert_close(result[0], alone[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(result[1], alone[1], rtol=1e-10, atol=1e-12)


def scaled() -> tuple[float, int]:
    """Mixed precision with a scaler and clipping, compiled: the loop stays as it was."""
    tutti.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda")
    with tutti.distribute(model, optimizer):
        runner = torch.compile(model)
        x, y = torch.randn(8, 16).cuda(), torch.randint(0, 4, (8,)).cuda()
        for _ in range(10):
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(runner(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return float(sum(p.detach().double().sum() for p in model.parameters())), int(torch.isfinite(loss))


def test_scaler_clipping_and_compile() -> None:
    results = tutti.launch(scaled, workers=2)
    assert results[0] == results[1]
    assert results[0][1] == 1


def train_compressed(codec: Codec) -> list[torch.Tensor]:
    world = tutti.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 100)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = tutti.AllReduce("native", 100_000, ErrorFeedback(codec), exact_below=500)
    generator = torch.Generator().manual_seed(world.rank)
    with tutti.distribute(model, optimizer, strategy) as job:
        for _ in range(4):
            model(torch.randn(8, 64, generator=generator).cuda()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        residuals = job.state_dict()["exchange"]["residuals"]["ranks"][world.rank]["elements"]["residual"]
        assert any(each.any() for each in residuals.values())
        job.load_state_dict(job.state_dict())
        model(torch.randn(8, 64, generator=generator).cuda()).square().mean().backward()
    return [p.detach().cpu() for p in model.parameters()] + [p.grad.cpu() for p in model.parameters()]


@pytest.mark.parametrize(
    "codec",
    [OneBit(), Cast("fp8"), Quantize(4), TopK(0.05), TopK(0.05, momentum=0.5), Threshold(), RandomK(), LowRank(2)],
    ids=str,
)
def test_compressed_gradients_on_a_gpu(codec: Codec) -> None:
    one, other = tutti.launch(train_compressed, codec, workers=2)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.isfinite().all()
        assert torch.equal(mine, theirs)
