"""A package that offers a strategy, a codec, a collective and a recipe by entry points, laid out as if installed."""

from pathlib import Path

CODE = """
from dataclasses import dataclass, replace

import torch

from tutti.codecs import Codec, CodecSpeed
from tutti.collectives import Collective, ring
from tutti.cost import all_reduce_cost, CommunicationCost
from tutti.recipes import digits
from tutti.strategies import Exchange, Strategy


@dataclass(frozen=True)
class MajorityVote(Strategy):
    scale: float = 1.0
    exact = False

    def attach(self, replica, transport):
        replica.allocate(transport, bucket_bytes=2**22)
        exchange = MajorityVoteExchange(replica, transport)
        replica.listen(exchange, to="gradients")
        return exchange

    def __str__(self):
        return "vote" if self.scale == 1.0 else f"vote:scale={self.scale}"


class PricedVote(MajorityVote):
    def cost(self, profile, placement):
        return CommunicationCost(all_reduce_cost("ring", profile.gradient_bytes, placement).wire_s, 0.0)

    def __str__(self):
        return "priced-vote"


class MajorityVoteExchange(Exchange):
    def backward_done(self):
        for bucket in self.replica.buckets:
            bucket.flat.sign_()
            ring(bucket.flat, self.transport)
            bucket.flat.sign_().mul_(0.01)

    def metrics(self):
        return {"votes": 7}


def read_vote(options, codec):
    return MajorityVote(**{key: float(text) for key, text in options.items()})


def read_priced_vote(options, codec):
    return PricedVote()


@dataclass(frozen=True)
class Half(Codec):
    name = "half"
    speed = CodecSpeed(2e9, 3e9)

    def encode(self, tensor, state, *, residual=None, groups=None):
        values = tensor.detach().reshape(-1).float() + (0 if residual is None else residual)
        packet = values.half()
        if residual is not None:
            residual.copy_(values - packet)
        return packet.view(torch.uint8), state

    def decode(self, packet, out, *, groups=None, add=False, scale=1.0):
        values = packet.view(torch.float16).float().view(out.shape) * scale
        out.add_(values) if add else out.copy_(values)

    def packet_bytes(self, numel, groups=None):
        return 2 * numel

    def __str__(self):
        return self.name


again = Collective("again", ring.steps, ring.cost)


def small_digits():
    return replace(digits(), name="small-digits", epochs=1, target=0.1)


def read_wrongly(options, codec):
    return "a text"
"""

GROUPS = {
    "tutti.strategies": {"vote": "my_tutti:read_vote", "priced-vote": "my_tutti:read_priced_vote"},
    "tutti.codecs": {"half": "my_tutti:Half"},
    "tutti.collectives": {"again": "my_tutti:again"},
    "tutti.recipes": {"small-digits": "my_tutti:small_digits"},
}


def install(folder: Path, package: str, groups: dict[str, dict[str, str]], code: str | None = None) -> None:
    """Write the metadata of `package` into a folder that will be on the path, and its module `my_tutti` if given."""
    metadata = folder / f"{package.replace('-', '_')}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    sections = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in groups.items()
    )
    (metadata / "entry_points.txt").write_text("\n".join(sections))
    if code is not None:
        (folder / "my_tutti.py").write_text(code)
