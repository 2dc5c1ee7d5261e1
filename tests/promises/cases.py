"""Ordinary combinations and ordinary mistakes: scripts as users write them."""

import copy

import torch
import torch.nn.functional as F
from harness import STEPS, Script, X, Y, compiler, filled, net, sgd, step
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint


def plain(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


# Gradients that the script changes between backward and step.


def _changed_gradients(script: Script, change) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches():
        F.cross_entropy(model(x), y).backward()
        change(model, job)
        optimizer.step()
        optimizer.zero_grad()
    return model


def gradients_changed_late_through_data(script: Script) -> nn.Module:
    num_steps = 0

    def change(model: nn.Module, _: object) -> None:
        nonlocal num_steps
        num_steps += 1
        for p in model.parameters() if num_steps > 4 else ():
            p.grad.data.mul_(0.5)

    return _changed_gradients(script, change)


def clip_grad_norm(script: Script) -> nn.Module:
    return _changed_gradients(script, lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.05))


def clip_grad_value(script: Script) -> nn.Module:
    return _changed_gradients(script, lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 0.01))


def clip_by_the_job(script: Script) -> nn.Module:
    return _changed_gradients(script, lambda _, job: job.clip_grad_norm(0.05))


def scale_gradients(script: Script) -> nn.Module:
    return _changed_gradients(script, lambda model, _: [p.grad.mul_(0.5) for p in model.parameters()])


def replace_gradients(script: Script) -> nn.Module:
    def change(model, _):
        for p in model.parameters():
            p.grad = p.grad * 0.5

    return _changed_gradients(script, change)


def drop_a_gradient(script: Script) -> nn.Module:
    def change(model, _):
        model[0].weight.grad = None

    return _changed_gradients(script, change)


# Mixed precision.


def _scaled(script: Script, clip: bool, inf_at: int | None = None) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    for number, (x, y) in enumerate(script.batches()):
        loss = F.cross_entropy(model(x), y)
        if number == inf_at and script.rank == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def grad_scaler(script: Script) -> nn.Module:
    return _scaled(script, clip=False)


def grad_scaler_and_clipping(script: Script) -> nn.Module:
    return _scaled(script, clip=True)


def grad_scaler_with_an_inf(script: Script) -> nn.Module:
    return _scaled(script, clip=False, inf_at=3)


def autocast(script: Script) -> nn.Module:
    model = net().float()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x.float()), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# Accumulation, and other orders of backward, step and zero_grad.


def _accumulated(script: Script, no_sync: bool) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number % 2 == 0 and no_sync:
            with job.no_sync():
                (F.cross_entropy(model(x), y) / 2).backward()
        else:
            (F.cross_entropy(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    return model


def accumulation(script: Script) -> nn.Module:
    return _accumulated(script, no_sync=False)


def accumulation_with_no_sync(script: Script) -> nn.Module:
    return _accumulated(script, no_sync=True)


def zero_grad_forgotten(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model, lr=0.02, momentum=0.0)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def zero_grad_keeps_zeros(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return model


def two_losses_two_backwards(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        out = model(x)
        F.cross_entropy(out, y).backward(retain_graph=True)
        (0.01 * out.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def a_step_left_out(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        F.cross_entropy(model(x), y).backward()
        if number != 2:  # As after a spike of the loss, on every rank alike.
            optimizer.step()
        optimizer.zero_grad()
    return model


def a_step_before_the_first_backward(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    optimizer.step()
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def gradients_by_autograd_grad(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        grads = torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            p.grad = grad
        optimizer.step()
        optimizer.zero_grad()
    return model


def gradient_penalty(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        inputs = x.clone().requires_grad_()
        out = model(inputs)
        (grad,) = torch.autograd.grad(out.sum(), inputs, create_graph=True)
        (F.cross_entropy(out, y) + 0.01 * grad.square().sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# Averages of weights.


def ema_by_averaged_model(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for x, y in script.batches():
        step(model, optimizer, x, y)
        ema.update_parameters(model)
    job.average(ema)
    return ema.module


def ema_updated_in_consensus(script: Script) -> nn.Module:
    model = net()
    ema = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        with job.consensus(optimizer=False):
            ema.update_parameters(model)
    return ema.module


def _with_swapped_ema(script: Script, through_data: bool, first: int, puts_back: bool = True) -> nn.Module:
    """Evaluate the average of the weights in the model itself, and put the weights back before the next step."""
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    average = [p.detach().clone() for p in model.parameters()]

    def write(values: list[Tensor]) -> None:
        for p, value in zip(model.parameters(), values, strict=True):
            (p.data if through_data else p).copy_(value)

    for number, (x, y) in enumerate(script.batches()):
        step(model, optimizer, x, y)
        with torch.no_grad():
            for mean, p in zip(average, model.parameters(), strict=True):
                mean.lerp_(p, 0.5)
            if number < first:
                continue
            before = [p.detach().clone() for p in model.parameters()]
            write(average)
            model.eval()
            output = model(x)
            if script.mesh is None:  # There this rank has parts of the weights.
                weights = dict(zip(dict(model.named_parameters()), average, strict=True))
                expected = torch.func.functional_call(net(), weights, (x,))
                assert torch.equal(output, expected), "the evaluation sees other weights"
            model.train()
            if puts_back:
                write(before)
    return model


def ema_swapped_in(script: Script) -> nn.Module:
    return _with_swapped_ema(script, through_data=False, first=0)


def ema_swapped_in_through_data(script: Script) -> nn.Module:
    return _with_swapped_ema(script, through_data=True, first=0)


def ema_swapped_in_late(script: Script) -> nn.Module:
    return _with_swapped_ema(script, through_data=False, first=4)


def ema_swapped_in_late_through_data(script: Script) -> nn.Module:
    return _with_swapped_ema(script, through_data=True, first=4)


def ema_left_in_through_data(script: Script) -> nn.Module:
    return _with_swapped_ema(script, through_data=True, first=4, puts_back=False)


# Learning rates.


def scheduler_by_step(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    scheduler = StepLR(optimizer, 2, 0.5)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        scheduler.step()
    return model


def scheduler_of_momentum_too(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    scheduler = OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS + 1)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        scheduler.step()
    return model


def plateau_scheduler_on_the_local_loss(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        scheduler.step(float(script.rank))  # It goes down on rank 0 and not on others.
        if script.rank == 1:
            optimizer.param_groups[0]["lr"] *= 0.5
    return model


def plateau_scheduler_on_the_mean_loss(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    for x, y in script.batches():
        loss = step(model, optimizer, x, y)
        scheduler.step(float(job.reduce(loss.detach(), "mean")))
    return model


def learning_rate_set_by_hand(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)
        step(model, optimizer, x, y)
    return model


def learning_rate_of_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model, lr=0.1 * (1 + script.rank))
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def rate_per_layer(script: Script) -> nn.Module:
    model = net()
    groups = [{"params": model[0].parameters(), "lr": 0.02}, {"params": model[2].parameters()}]
    optimizer = SGD(groups, lr=0.2, momentum=0.5)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def group_added_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    extra = filled(nn.Linear(3, 3))
    optimizer.add_param_group({"params": extra.parameters()})
    whole = nn.Sequential(model, extra)
    for x, y in script.batches():
        step(whole, optimizer, x, y)
    return whole


def loss_with_parameters(script: Script) -> nn.Module:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_weight = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy(out, y) * self.log_weight.exp() - self.log_weight

    model, loss = net(), Weighted()
    optimizer = SGD([*model.parameters(), *loss.parameters()], lr=0.1)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList([model, loss])


def step_after_no_sync_only(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches():
        with job.no_sync():
            step(model, optimizer, x, y)
    return model


# Optimisers.


def closure(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return model


def lbfgs(script: Script) -> nn.Module:
    model = net()
    optimizer = LBFGS(model.parameters(), lr=0.1, max_iter=3)
    script.distribute(model, optimizer)
    for x, y in script.batches():

        def evaluate(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return model


def adamw(script: Script) -> nn.Module:
    model = net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def optimizer_made_after_distribute(script: Script) -> nn.Module:
    model = net()
    script.distribute(model, sgd(model))
    optimizer = sgd(model)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def optimizer_in_backward(script: Script) -> nn.Module:
    model = net()
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}
    script.distribute(model, sgd(model))

    def step_now(p: Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for x, y in script.batches():
        F.cross_entropy(model(x), y).backward()
    return model


def two_optimizers(script: Script) -> nn.Module:
    model = net()
    first, second = SGD(model[0].parameters(), lr=0.1), SGD(model[2].parameters(), lr=0.1)
    script.distribute(model, first)
    for x, y in script.batches():
        F.cross_entropy(model(x), y).backward()
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
    return model


def two_models(script: Script) -> nn.Module:
    model, other = net(), net()
    optimizer, other_optimizer = sgd(model), sgd(other, lr=0.05)
    script.distribute(model, optimizer)
    script.distribute(other, other_optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        step(other, other_optimizer, x, y)
    return nn.ModuleList([model, other])


# Hooks of the user.


def tensor_hook(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    model[0].weight.register_hook(lambda grad: 0.5 * grad)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def tensor_hook_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    model[0].weight.register_hook(lambda grad: 0.5 * grad)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def post_accumulate_hook_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)

    def halve(p: Tensor) -> None:
        p.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


# Models.


def batch_norm(script: Script) -> nn.Module:
    model = filled(nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3)))
    if script.world is not None:
        from tutti.job import sync_batchnorm

        model = sync_batchnorm(model, world=script.world)
    optimizer = sgd(model, lr=0.05)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def frozen_layer(script: Script) -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    optimizer = SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def unfrozen_after_distribute(script: Script) -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number == 3:
            model[0].requires_grad_(True)
        step(model, optimizer, x, y)
    return model


def unfrozen_after_finish(script: Script) -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches(0, 3):
        step(model, optimizer, x, y)
    job.finish()
    model[0].requires_grad_(True)
    script.distribute(model, optimizer)
    for x, y in script.batches(3, STEPS):
        step(model, optimizer, x, y)
    return model


def frozen_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number == 3:
            model[0].requires_grad_(False)
        step(model, optimizer, x, y)
    return model


class _Experts(nn.Module):
    """Which expert is used depends on the rank's own samples."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = net()[0], net()[2], net()[2]

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        chosen = x[:, 0] > 1.2
        out = hidden.new_zeros(len(x), 3)
        for expert, mine in ((self.first, chosen), (self.second, ~chosen)):
            if mine.any():
                out = out.index_put((mine.nonzero().flatten(),), expert(hidden[mine]))
        return out


def unused_on_some_ranks(script: Script) -> nn.Module:
    model = _Experts()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def tied_weights(script: Script) -> nn.Module:
    model = filled(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)))
    model[2].weight = model[0].weight
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def sparse_embedding(script: Script) -> nn.Module:
    model = nn.Sequential(nn.Embedding(8, 3, sparse=True)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(24.0).view(8, 3) / 24)
    optimizer = SGD(model.parameters(), lr=0.1)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x[:, 0].abs().long().clamp(max=7), y)
    return model


def compiled_before(script: Script) -> nn.Module:
    model = torch.compile(net(), backend="aot_eager")
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        with compiler:
            out = model(x)
        F.cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


class _Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](checkpoint(self.net[:2], x, use_reentrant=False))


def activation_checkpointing(script: Script) -> nn.Module:
    model = _Checkpointed()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def parts_of_the_model_called(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        hidden = checkpoint(model[:2], x, use_reentrant=False)
        F.cross_entropy(model[2](hidden), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def counter_in_a_buffer(script: Script) -> nn.Module:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls += 1
            return self.net(x)

    model = Counting()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def own_seed_on_every_rank(script: Script) -> nn.Module:
    model = net()
    if script.rank > 0:
        with torch.no_grad():
            model[0].weight.mul_(2.0)
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def another_model_on_one_rank(script: Script) -> nn.Module:
    model = net()
    if script.rank > 0:
        model = nn.Sequential(model[0], nn.Tanh(), nn.Linear(10, 3, bias=False)).double()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def cast_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    model.float()
    for x, y in script.batches():
        step(model, optimizer, x.float(), y)
    return model


def parameter_replaced_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    model[2] = filled(nn.Linear(10, 3))
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def meta_model(script: Script) -> nn.Module:
    if script.world is None:
        return net()
    model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).to("meta")
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def distributed_twice(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


# Parameters that the script changes itself.


def weights_clamped(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.2, 0.2)
    return model


def weights_clamped_at_the_end(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-0.2, 0.2)
    return model


def _with_scaled_weights(script: Script, at_step: int, on_one_rank: bool = False) -> nn.Module:
    """Halve all weights once through `.data`, between two steps or at the end."""
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        step(model, optimizer, x, y)
        if number == at_step and not (on_one_rank and script.rank):
            for p in model.parameters():
                p.data.mul_(0.5)
    return model


def weights_scaled_late_through_data(script: Script) -> nn.Module:
    return _with_scaled_weights(script, at_step=4)


def weights_scaled_at_the_end_through_data(script: Script) -> nn.Module:
    return _with_scaled_weights(script, at_step=STEPS - 1)


def weights_scaled_late_on_one_rank(script: Script) -> nn.Module:
    return _with_scaled_weights(script, at_step=4, on_one_rank=True)


def state_loaded_after_distribute(script: Script) -> nn.Module:
    model = net()
    saved = {name: 0.5 * value for name, value in model.state_dict().items()}
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    model.load_state_dict(saved)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


def state_loaded_on_one_rank(script: Script) -> nn.Module:
    model = net()
    saved = {name: 0.5 * value for name, value in model.state_dict().items()}
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number == 2 and script.rank == 0:
            model.load_state_dict(saved)
        step(model, optimizer, x, y)
    return model


def optimizer_state_loaded_after_distribute(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    for x, y in [(torch.ones(4, 6, dtype=torch.float64), torch.ones(4, dtype=torch.long))]:
        step(model, optimizer, x, y)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    optimizer.load_state_dict(saved)
    for x, y in script.batches():
        step(model, optimizer, x, y)
    return model


# Losses.


def sum_loss(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model, lr=0.01)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def sum_loss_expected(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model, lr=0.01)
    job = script.distribute(model, optimizer)
    if script.steps_by_mean_gradient:
        job.expect(loss="sum")
    for x, y in script.batches():
        F.cross_entropy(model(x), y, reduction="sum").backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def nan_loss_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        loss = F.cross_entropy(model(x), y)
        if number == 3 and script.rank == 0:
            loss = loss * float("nan")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


# Data.


def uneven_parts(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in zip(X, Y, strict=True):
        cut = slice(None) if script.num_parts == 1 else [slice(0, 9), slice(9, 12)][script.rank]
        step(model, optimizer, x[cut], y[cut])
    return model


def same_batches_on_every_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in zip(X, Y, strict=True):
        step(model, optimizer, x, y)
    return model


def fewer_steps_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number == 4 and script.rank == 1:
            break
        step(model, optimizer, x, y)
    return model


def backward_left_out_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number == 3 and script.rank == 1:
            continue  # As for a batch with a broken image.
        step(model, optimizer, x, y)
    return model


# Evaluation, saving, the end.


def evaluation_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        if job.is_leader:
            model.eval()
            with torch.no_grad():
                model(x)
            model.train()
    return model


def evaluation_in_consensus_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        with job.consensus(optimizer=False), torch.no_grad():
            if job.is_leader:
                model.eval()
                model(x)
                model.train()
    return model


def forward_without_backward(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for x, y in script.batches():
        model(x[:2])  # No `no_grad` around it.
        step(model, optimizer, x, y)
    return model


def consensus_on_every_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches():
        step(model, optimizer, x, y)
        with job.consensus(), torch.no_grad():
            model(x)
    return model


def consensus_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        step(model, optimizer, x, y)
        if number == 2 and job.is_leader:
            with job.consensus(), torch.no_grad():
                model(x)
    return model


def error_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        if number == 3 and script.rank == 1:
            raise KeyError("a mistake in the user's loop")
        step(model, optimizer, x, y)
    return model


def finish_on_one_rank(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for number, (x, y) in enumerate(script.batches()):
        step(model, optimizer, x, y)
        if number == 3 and script.rank == 1:
            job.finish()
            break
    return model


def resumed_in_the_middle(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches(0, 3):
        step(model, optimizer, x, y)
    state = job.state_dict()
    with job.consensus():
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    job.finish()
    model = net()
    model.load_state_dict(saved[0])
    optimizer = sgd(model)
    optimizer.load_state_dict(saved[1])
    job = script.distribute(model, optimizer)
    job.load_state_dict(state)
    for x, y in script.batches(3, STEPS):
        step(model, optimizer, x, y)
    return model


def continued_under_another_strategy(script: Script) -> nn.Module:
    model = net()
    optimizer = sgd(model)
    job = script.distribute(model, optimizer)
    for x, y in script.batches(0, 3):
        step(model, optimizer, x, y)
    job.finish()
    if script.world is not None:
        script.strategy = "ring"
    script.distribute(model, optimizer)
    for x, y in script.batches(3, STEPS):
        step(model, optimizer, x, y)
    return model


CASES = {
    name: value
    for name, value in globals().items()
    if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == __name__
}
