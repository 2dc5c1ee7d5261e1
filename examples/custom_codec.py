"""A codec in one file: every value as one signed byte with one scale per tensor. `python examples/custom_codec.py`"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.codecs import Codec, ErrorFeedback
from tutti.codecs.base import copy_back, flat_float32, flat_view
from tutti.errors import PacketError
from tutti.recipes import digits


@dataclass(frozen=True)
class Int8(Codec):
    name = "int8"

    def encode(self, tensor, state, *, residual=None, groups=None):
        values = flat_float32(tensor, "Int8")  # Detached, one dimension; the tensor may be empty or strided.
        values = values if residual is None else values + residual  # What earlier calls dropped.
        scale = values.abs().sum() if values.numel() == 0 else values.abs().max() / 127
        levels = (values / scale.clamp(min=1e-30)).round().to(torch.int8)
        if residual is not None and scale.isfinite():  # NaN and infinity are sent on, and must not stay behind.
            residual.copy_(values - levels * scale)  # What this call drops.
        return torch.cat([scale.reshape(1).view(torch.uint8), levels.view(torch.uint8)]), state

    def decode(self, packet, out, *, groups=None, add=False, scale=1.0):
        if packet.numel() != self.packet_bytes(out.numel()):  # Packets come from other machines.
            raise PacketError(f"an int8 packet of {packet.numel()} bytes, wanted {self.packet_bytes(out.numel())}")
        values = packet[4:].view(torch.int8) * (packet[:4].clone().view(torch.float32) * scale)
        flat = flat_view(out)  # Detached, one dimension.
        flat.add_(values) if add else flat.copy_(values)
        copy_back(flat, out)

    def packet_bytes(self, numel, groups=None):
        return 4 + numel

    def __str__(self):
        return self.name


def train() -> tuple[float, float]:
    tutti.init()
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = tutti.distribute(model, optimizer, strategy=tutti.AllReduce(codec=ErrorFeedback(Int8())))
    for x, y in tutti.shard(DataLoader(digits().data(None).train, batch_size=32, shuffle=True)):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    job.finish()
    return loss.item(), job.metrics.bytes_sent / job.metrics.steps


if __name__ == "__main__":
    loss, num_bytes = tutti.launch(train, workers=2)[0]
    print(f"one byte per value: loss {loss:.3f}, {num_bytes:,.0f} bytes per step and worker")
