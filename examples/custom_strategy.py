"""A strategy in one file: signSGD with majority vote (Bernstein et al. 2018). `python examples/custom_strategy.py`

Every rank votes for the sign of each gradient value; all ranks step in the direction of the majority.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

import tutti
from tutti.collectives import ring
from tutti.recipes import digits
from tutti.strategies import Exchange, Strategy


@dataclass(frozen=True)
class MajorityVote(Strategy):
    exact = False  # N workers do not give the result of one.

    def attach(self, replica, transport):
        replica.allocate(transport, bucket_bytes=2**22)
        exchange = MajorityVoteExchange(replica, transport)
        replica.listen(exchange, to="gradients")
        return exchange

    def __str__(self):
        return "majority-vote"


class MajorityVoteExchange(Exchange):
    def backward_done(self):  # All buckets are full; what they hold now becomes p.grad.
        for bucket in self.replica.buckets:
            bucket.flat.sign_()
            ring(bucket.flat, self.transport)
            bucket.flat.sign_()


def train(epochs: int = 3) -> float:
    tutti.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003)
    job = tutti.distribute(model, optimizer, strategy=MajorityVote())
    batches = tutti.shard(DataLoader(digits().data(None).train, batch_size=32, shuffle=True))
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    job.finish()
    return loss.item()


if __name__ == "__main__":
    print(f"majority vote of 3 workers: loss {tutti.launch(train, workers=3)[0]:.3f}")
