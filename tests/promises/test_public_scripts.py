"""Training loops in the style of public examples, with the three lines that Tutti needs: no check raises an alarm."""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, random_split

import tutti
from support import run_ok
from tutti.job import distribute
from tutti.world import World

STRATEGIES = ("native", "onebit", "poseidon", "bmuf:every=4", "gossip", "peers", "ps:bsp", "ps:ssp=2")


def images(num: int = 42) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(num, 1, 8, 8, generator=generator), torch.randint(0, 4, (num,), generator=generator)
    )


def classifier() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 4))


def epochs(loader: Any, num_epochs: int = 2) -> Iterator[Any]:
    for _ in range(num_epochs):
        yield from loader


def image_classification(world: World, strategy: str) -> None:
    """Train and evaluate in turn, with a schedule by epoch and the mean of the loss over all ranks."""
    train, test = random_split(images(), [36, 6], generator=torch.Generator().manual_seed(0))
    model = classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    with distribute(model, optimizer, strategy, world=world) as job:
        loader = tutti.shard(DataLoader(train, batch_size=8, shuffle=True), world=job.world)
        for _ in range(2):
            model.train()
            for x, y in loader:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
            scheduler.step()
            model.eval()
            with job.consensus(optimizer=False), torch.no_grad():
                correct = sum((model(x).argmax(1) == y).sum() for x, y in DataLoader(test, batch_size=4))
            assert math.isfinite(job.reduce(float(correct), "mean"))


def mixed_precision_and_ema(world: World, strategy: str) -> None:
    """autocast, GradScaler, clipping, one cycle of the rate, and an average of the weights."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler, steps = torch.amp.GradScaler("cpu", init_scale=128.0), 10
    with distribute(model, optimizer, strategy, world=world) as job:
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        scheduler = OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps + 1)
        loader = tutti.shard(DataLoader(images(40), batch_size=8, shuffle=True), world=job.world)
        for x, y in epochs(loader):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            ema.update_parameters(model)
            scheduler.step()
        job.average(ema)


def language_model(world: World, strategy: str) -> None:
    """Next characters, with accumulated gradients, warm-up, tied weights, and no decay of norms."""

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.norm = nn.Embedding(16, 12), nn.LayerNorm(12)
            self.mix, self.head = nn.Linear(12, 12), nn.Linear(12, 16, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(self.norm(x + F.gelu(self.mix(x.cumsum(1)))))

    torch.manual_seed(2)
    model, tokens = Tiny(), torch.randint(0, 16, (32, 9), generator=torch.Generator().manual_seed(3))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    with distribute(model, optimizer, strategy, world=world) as job:
        loader = tutti.shard(DataLoader(tokens, batch_size=8, shuffle=True), world=job.world)
        for number, batch in enumerate(epochs(loader)):
            if number % 2 == 0:
                with job.no_sync():
                    (F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / 2).backward()
                continue
            (F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


def adversarial_pair(world: World, strategy: str) -> None:
    """A generator and a discriminator, each with its optimiser, stepped in turn."""
    torch.manual_seed(4)
    generator = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 6))
    critic = nn.Sequential(nn.Linear(6, 10), nn.LeakyReLU(0.2), nn.Linear(10, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    d_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    real_data = torch.randn(32, 6, generator=torch.Generator().manual_seed(5))
    noise = torch.Generator().manual_seed(100 + world.rank)
    with (
        distribute(generator, g_optimizer, strategy, world=world),
        distribute(critic, d_optimizer, strategy, world=world) as job,
    ):
        loader = tutti.shard(DataLoader(real_data, batch_size=8, shuffle=True), world=job.world)
        for real in epochs(loader):
            fake = generator(torch.randn(len(real), 4, generator=noise))
            d_optimizer.zero_grad()
            (F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()).backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            for p in critic.parameters():
                p.requires_grad_(False)
            F.softplus(-critic(fake)).mean().backward()
            for p in critic.parameters():
                p.requires_grad_(True)
            g_optimizer.step()


def variational_autoencoder(world: World, strategy: str) -> None:
    """A loss that is a sum, divided by the size of the batch."""
    torch.manual_seed(6)
    model = nn.ModuleDict({"encode": nn.Linear(64, 8), "decode": nn.Linear(4, 64)})
    model.forward = lambda x: _reconstruct(model, x)  # type: ignore[method-assign]
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    with distribute(model, optimizer, strategy, world=world) as job:
        loader = tutti.shard(DataLoader(images(40), batch_size=10, shuffle=True), world=job.world)
        for x, _ in epochs(loader):
            optimizer.zero_grad()
            output, mean, log_variance = model(x.flatten(1))
            reconstruction = F.binary_cross_entropy_with_logits(output, x.flatten(1).sigmoid(), reduction="sum")
            divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
            ((reconstruction + divergence) / len(x)).backward()
            optimizer.step()


def _reconstruct(model: nn.ModuleDict, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean, log_variance = model["encode"](x).chunk(2, dim=1)
    return model["decode"](mean + 0.1 * torch.exp(0.5 * log_variance)), mean, log_variance


def fine_tuning(world: World, strategy: str) -> None:
    """A frozen body and a new head, with a rate of its own, and weights for rare classes."""
    model = classifier()
    model[1].requires_grad_(False)
    model[3] = nn.Linear(12, 4)
    optimizer = torch.optim.SGD([{"params": model[3].weight, "lr": 0.05}, {"params": model[3].bias}], lr=0.01)
    dataset = images()
    weights = torch.where(dataset.tensors[1] == 0, 3.0, 1.0)
    sampler = WeightedRandomSampler(weights.tolist(), len(dataset), generator=torch.Generator().manual_seed(7))
    scheduler = CosineAnnealingLR(optimizer, T_max=10)
    with distribute(model, optimizer, strategy, world=world) as job:
        loader = tutti.shard(DataLoader(dataset, batch_size=8, sampler=sampler), world=job.world)
        for x, y in epochs(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, weight=torch.tensor([1.0, 2.0, 2.0, 2.0])).backward()
            optimizer.step()
            scheduler.step()


def distillation(world: World, strategy: str) -> None:
    """A student that learns from a teacher in evaluation mode, by a weighted sum of two losses."""
    teacher, model = classifier().eval(), classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, nesterov=True, momentum=0.9)
    with distribute(model, optimizer, strategy, world=world) as job:
        loader = tutti.shard(DataLoader(images(), batch_size=8, shuffle=True, drop_last=True), world=job.world)
        for x, y in epochs(loader):
            with torch.no_grad():
                targets = F.log_softmax(teacher(x) / 2, dim=1)
            output = model(x)
            soft = F.kl_div(F.log_softmax(output / 2, dim=1), targets, log_target=True, reduction="batchmean")
            optimizer.zero_grad()
            (0.7 * 4 * soft + 0.3 * F.cross_entropy(output, y)).backward()
            optimizer.step()


def several_tasks(world: World, strategy: str) -> None:
    """Two heads whose losses are stacked and summed, and a branch that some batches do not use."""
    torch.manual_seed(8)
    model = nn.ModuleDict({"body": nn.Linear(64, 10), "kind": nn.Linear(10, 4), "size": nn.Linear(10, 1)})
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    with distribute(model, optimizer, strategy, world=world) as job:
        loader = tutti.shard(DataLoader(images(40), batch_size=8, shuffle=True), world=job.world)
        for number, (x, y) in enumerate(epochs(loader)):
            features = torch.relu(model["body"](x.flatten(1)))
            losses = [F.cross_entropy(model["kind"](features), y)]
            if number % 3:
                losses.append(F.mse_loss(model["size"](features)[:, 0], x.flatten(1).norm(dim=1)))
            optimizer.zero_grad()
            torch.stack(losses).sum().backward()
            optimizer.step()


def policy_gradient(world: World, strategy: str) -> None:
    """Returns as weights of log-probabilities; every rank plays its own games."""
    torch.manual_seed(9)
    policy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    games = torch.Generator().manual_seed(200 + world.rank)
    with distribute(policy, optimizer, strategy, world=world):
        for _ in range(6):
            states = torch.randn(12, 4, generator=games)
            log_probabilities = F.log_softmax(policy(states), dim=1)[:, 0]
            returns = torch.randn(12, generator=games)
            advantage = (returns - returns.mean()) / (returns.std() + 1e-8)
            optimizer.zero_grad()
            (-log_probabilities * advantage).sum().backward()
            optimizer.step()


def contrastive(world: World, strategy: str) -> None:
    """Two views of each image, a momentum copy of the encoder, BatchNorm over all ranks, and resuming in the middle."""
    torch.manual_seed(10)
    model: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
    model = tutti.sync_batchnorm(model, world=world) if strategy in ("native", "onebit") else model
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03)
    for _ in range(2):  # The second time from what the first has left.
        with distribute(model, optimizer, strategy, world=world) as job:
            loader = tutti.shard(DataLoader(images(40), batch_size=10, shuffle=True), world=job.world)
            for x, _ in loader:
                ours = F.normalize(model(x + 0.1 * torch.randn_like(x)), dim=1)
                with torch.no_grad():
                    theirs = F.normalize(target(x), dim=1)
                optimizer.zero_grad()
                F.cross_entropy(ours @ theirs.T / 0.2, torch.arange(len(x))).backward()
                optimizer.step()
                with torch.no_grad():
                    for old, new in zip(target.parameters(), model.parameters(), strict=True):
                        old.lerp_(new, 0.1)


SCRIPTS: tuple[Callable[[World, str], None], ...] = (
    image_classification, mixed_precision_and_ema, language_model, adversarial_pair, variational_autoencoder,
    fine_tuning, distillation, several_tasks, policy_gradient, contrastive,
)  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_no_check_raises_an_alarm(
    script: Callable[[World, str], None], strategy: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="tutti"):
        run_ok(script, strategy, size=2, transport="shared_memory")
    # Servers get gradients that are changed after backward later; a line says so, once.
    assert [
        message for message in caplog.messages if "are pushed to the servers in optimizer.step()" not in message
    ] == []
