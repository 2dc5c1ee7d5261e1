"""`tutti.profile` on a GPU, whose kernels run behind the calls that start them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tutti
from tutti.errors import ConfigError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


def test_time_is_that_of_kernels_and_not_of_their_start() -> None:
    model = nn.Sequential(nn.Linear(64, 8192), nn.Linear(8192, 8192), nn.ReLU(), nn.Linear(8192, 64)).cuda()
    x, y = torch.randn(8192, 64, device="cuda"), torch.randint(64, (8192,), device="cuda")
    found = tutti.profile(model, (x, y), loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    large = found.layers[1]
    assert large.forward_s > 0.5 * found.forward_s, "128 times the operations of the other two"
    assert large.backward_s > 0.5 * found.backward_s
    assert 0 < sum(layer.backward_s for layer in found.layers) <= 1.2 * found.backward_s
    assert [each.name[0] for each in found.gradients] == ["3", "3", "1", "1", "0", "0"]
    assert found.gradients[-1].ready_s <= found.backward_s
    assert found.step_s > 0


def test_memory_and_random_numbers() -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Dropout(0.5), nn.Linear(256, 256)).cuda()
    parameters = 4 * sum(p.numel() for p in model.parameters())
    before, kept = torch.cuda.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    adam = torch.optim.Adam(model.parameters())
    peaks = [
        tutti.profile(model, torch.randn(n, 256, device="cuda"), optimizer=adam, repeats=1).peak_bytes
        for n in (16, 9616)
    ]
    assert peaks[0] >= 4 * parameters
    assert peaks[1] - peaks[0] > 3 * 9600 * 256 * 4
    torch.cuda.manual_seed(0)
    expected = torch.cuda.get_rng_state()
    tutti.profile(model, torch.ones(4, 256, device="cuda"), repeats=1)
    assert torch.equal(torch.cuda.get_rng_state(), expected)
    assert not torch.equal(before, expected), "the test can see a change"
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), kept, strict=True))


def test_recurrent_layers_and_a_batch_elsewhere() -> None:
    model = nn.LSTM(8, 16).cuda()
    found = tutti.profile(model, torch.randn(5, 3, 8, device="cuda"), repeats=1)
    assert found.layers[0].kind == "LSTM"
    with pytest.raises(ConfigError, match="the model fails in forward"):
        tutti.profile(model, torch.randn(5, 3, 8))
