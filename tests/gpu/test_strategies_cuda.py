"""Every strategy whose result is defined, on a GPU: it ends where it ends on a CPU."""

import pytest
import torch
from torch import nn

import tutti
from tutti.strategies import parse

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

ALIKE = (
    "averaging:every=3", "averaging:every=2,optimizer_state=average", "bmuf:every=3", "bmuf:every=3,overlap=1",
    "diloco:every=3", "gossip:graph=ring", "gossip", "poseidon:rule=broadcast", "poseidon:rule=owners",
    "poseidon:rule=sacp,overlap=0", "ps:bsp", "cheapest",
)  # fmt: skip
"""The same parameters on both, to rounding."""

SOUND = ("bmuf:every=3+onebit", "peers+threshold", "peers", "gossip:pairs=async", "auto", "auto:lossy=1")
"""What arrives when is left to chance, or the choice is: finite, and the same on all ranks in the end."""


def train(texts: tuple[str, ...], device: str) -> dict[str, torch.Tensor]:
    """All strategies in one launch: starting processes costs more than training in them."""
    world = tutti.init()
    found = {}
    for text in texts:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 300), nn.BatchNorm1d(300), nn.ReLU(inplace=True), nn.Linear(300, 50))
        model = model.double().to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(world.rank)
        with tutti.distribute(model, optimizer, parse(text)):
            for _ in range(9):
                x = torch.randn(8, 64, generator=generator, dtype=torch.float64)
                model(x.to(device)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        found[text] = torch.cat([p.detach().reshape(-1).cpu() for p in model.parameters()])
    return found


def test_a_gpu_ends_where_a_cpu_does() -> None:
    on_gpu = tutti.launch(train, ALIKE, "cuda", workers=2, transport="sockets")
    on_cpu = tutti.launch(train, ALIKE, "cpu", workers=2, transport="sockets")
    for text in ALIKE:
        for one, other in zip(on_gpu, on_cpu, strict=True):
            torch.testing.assert_close(
                one[text], other[text], rtol=1e-8, atol=1e-10, msg=lambda said, t=text: f"{t}: {said}"
            )


def test_what_chance_decides_is_sound() -> None:
    one, other = tutti.launch(train, SOUND, "cuda", workers=2, transport="sockets")
    for text in SOUND:
        assert one[text].isfinite().all(), text
        assert torch.equal(one[text], other[text]), text
