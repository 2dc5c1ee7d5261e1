"""A codec in one file: every value as one signed byte with one scale per tensor. `python examples/custom_codec.py`"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.codecs import Codec, ErrorFeedback
from tutti.recipes import digits


@dataclass(frozen=True)
class Int8(Codec):
    name = "int8"

    def encode(self, tensor, state, *, residual=None, groups=None):
        values = tensor.detach().reshape(-1).float()
        if residual is not None:
            values = values + residual  # What earlier calls dropped.
        scale = values.abs().max().clamp(min=1e-30) / 127
        levels = (values / scale).round().to(torch.int8)
        if residual is not None:
            residual.copy_(values - levels * scale)  # What this call drops.
        return torch.cat([scale.reshape(1).view(torch.uint8), levels.view(torch.uint8)]), state

    def decode(self, packet, out, *, groups=None, add=False, scale=1.0):
        step = packet[:4].clone().view(torch.float32) * scale
        values = (packet[4:].view(torch.int8) * step).view(out.shape)
        out.add_(values) if add else out.copy_(values)

    def packet_bytes(self, numel, groups=None):
        return 4 + numel

    def __str__(self):
        return self.name


def train(epochs: int = 3) -> tuple[float, float]:
    tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.distribute(model, optimizer, strategy=tutti.AllReduce(codec=ErrorFeedback(Int8())))
    for _ in range(epochs):
        for x, y in tutti.shard(DataLoader(digits().data(None).train, batch_size=32, shuffle=True)):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return loss.item(), job.metrics.bytes_sent / job.metrics.steps


if __name__ == "__main__":
    loss, num_bytes = tutti.launch(train, workers=2)[0]
    print(f"2 workers, one byte per value: loss {loss:.3f}, {num_bytes:,.0f} bytes per step and worker")
