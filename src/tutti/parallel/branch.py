"""`Branches`: independent branches of one model, each computed by another rank.

How it works
------------
All ranks of a group hold all branches and get the same inputs; rank r of n computes branches r, r + n, r + 2n and so
on. Two autograd functions surround the branches:

- `_GatherOutputs` sends each branch's output from the rank that computed it to all others: a header with dtype and
  shape, then the values, with the number of the branch as tag. In backward no message is needed: every rank computes
  the same loss from the same outputs, so it has the gradients of its own branches' outputs.
- `_ShareInputGradients` does nothing in forward. In backward, the rank that computed a branch sends the gradient of its
  input to all others, so that layers before the branches get the gradients of all branches on every rank.

`distribute` then averages gradients over ranks. A weight of one branch has a gradient on one of n ranks, so its mean
would be an n-th of what it should be: `_GatherOutputs` multiplies by n. A layer before the branches has its gradient
on every rank, so `_ShareInputGradients` divides by n again.

Every rank starts all of its sends before it waits for a message, so no two ranks wait for each other. Both passes are
collective in the group. If a rank is lost, the transport ends the waits for it with `RankLost`. A branch with an output
of the wrong kind sends a header with an invalid dtype, and all ranks raise the same error.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tutti.errors import ConfigError
from tutti.parallel.same_batch import SameBatchCheck
from tutti.transports import Transport, Work
from tutti.transports.sockets.frames import DTYPES

_MAX_DIMS = 8
"""Largest number of dimensions of a branch's output: headers have a fixed size."""

_INVALID = -1
"""The dtype in the header of an output that cannot be sent."""

_REMEDY = (
    "the ranks of one group of branches are one worker. Leave out tutti.shard, or give it the world of groups "
    "(see docs/branches.md), and seed random data and shuffling."
)


class Branches(nn.Module):
    """Independent branches of one model, on different ranks; every rank gets the outputs of all of them.

    `outputs = branches(a, b)` has one output per branch, as if all had been computed here. All ranks call it, also
    to evaluate. Branches may share weights, or be the same module. Layers before and after the branches are computed by
    every rank. Gradients are right once `tutti.distribute(model, optimizer)` averages them in `loss.backward()`.

    The first branch is computed by the first rank, and so on, in turn if there are more branches than ranks. If there
    are more ranks than branches, each group of as many ranks as branches is a replica with its own data: `group` and
    `num_groups` identify it, for `tutti.shard`. The ranks of a group must be given the same inputs.

    Args:
        branches: modules that map one tensor to one floating-point tensor.
        transport: to the other ranks: `tutti.init().transport`. Collective.
    """

    def __init__(self, branches: Sequence[nn.Module], transport: Transport) -> None:
        super().__init__()
        _check(branches, transport)
        self.branches = nn.ModuleList(branches)
        # More ranks than branches are whole groups: `_check` has refused a remainder.
        self.size = min(len(branches), transport.size)
        """Number of ranks that compute the branches of one replica."""
        self.num_groups = transport.size // self.size
        """Number of replicas."""
        self.group = transport.rank // self.size
        """Number of this rank's replica."""
        members = range(self.group * self.size, (self.group + 1) * self.size)
        # On a channel of their own, branches cannot take messages of the job for theirs.
        self._transport = transport.channel("branches", members)
        self._group_rank = transport.rank - members[0]
        self._check_batch = SameBatchCheck(self._transport, _REMEDY)
        self.distributed = False
        """Whether gradients are averaged over ranks, without which they would be wrong. Set by `distribute`."""

    @property
    def local_branches(self) -> list[int]:
        """The numbers of the branches that this rank computes."""
        return list(range(self._group_rank, len(self.branches), self.size))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if len(inputs) != len(self.branches):
            raise ConfigError(
                f"rank {self._transport.world_rank}: {len(self.branches)} branches need an input each, got "
                f"{len(inputs)}. Call branches(x, y, ...) with one tensor per branch."
            )
        if self.size == 1:
            return tuple(branch(x) for branch, x in zip(self.branches, inputs, strict=True))
        if any(x.is_meta for x in inputs):
            return self._forward_without_values(inputs)
        if torch.is_grad_enabled():
            # Inputs that layers have computed are not compared: hosts may differ in their last bits.
            self._check_batch([x for x in inputs if x.grad_fn is None])
        shared = _ShareInputGradients.apply(self, *inputs)
        outputs = {number: self.branches[number](shared[number]) for number in self.local_branches}
        # Inputs of all branches are arguments of the gather, so that autograd runs the backward of
        # `_ShareInputGradients` on every rank, also for branches that it did not compute.
        anchors = [x for x in shared if x.requires_grad]
        gathered: tuple[Tensor, ...] = _GatherOutputs.apply(self, len(anchors), *anchors, *outputs.values())
        return gathered

    def _forward_without_values(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Compute all branches on meta tensors, without messages; count operations of this rank's branches only."""
        outputs = []
        for number, (branch, x) in enumerate(zip(self.branches, inputs, strict=True)):
            if number in self.local_branches:
                outputs.append(branch(x))
            else:
                with _disable_current_modes():  # A counter of operations is such a mode.
                    outputs.append(branch(x))
        return tuple(outputs)

    def isend(self, tensor: Tensor, number: int) -> list[tuple[Tensor, Work]]:
        """Start sending a tensor of a branch of this rank to all others; the tensors are kept until the works end."""
        # A contiguous CPU tensor is not copied: the branch's output itself is sent. Both autograd functions wait for
        # their sends before they return, so nothing can change it meanwhile.
        data = tensor.detach().cpu().contiguous()
        others = [rank for rank in range(self.size) if rank != self._group_rank]
        return [(data, self._transport.isend(data, rank, number)) for rank in others]

    def receive(self, buffer: Tensor, number: int) -> None:
        """Receive a tensor of a branch of another rank into `buffer`."""
        self._transport.irecv(buffer, number % self.size, number).wait()

    def not_distributed_error(self) -> ConfigError:
        """Return the error of a backward pass whose gradients would not be averaged."""
        return ConfigError(
            f"rank {self._transport.world_rank}: gradients of Branches are right only after they are averaged over "
            "ranks: tutti.distribute the model that contains them before you train it."
        )

    def output_error(self, number: int) -> ConfigError:
        """Return the error of a branch whose output cannot be sent."""
        return ConfigError(
            f"rank {self._transport.world_rank}: branch {number} must make one floating-point tensor of at most "
            f"{_MAX_DIMS} dimensions. Wrap it in a module that returns only what the rest of the model needs."
        )


class _ShareInputGradients(torch.autograd.Function):
    """Forward: identity. Backward: the gradient of each branch's input, sent to all ranks by the one that has it."""

    @staticmethod
    def forward(ctx: Any, branches: Branches, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.branches = branches
        ctx.input_properties = [(x.shape, x.dtype, x.device) for x in inputs]
        outputs = tuple(x.view_as(x) for x in inputs)
        ctx.mark_non_differentiable(*(x for x in outputs if not x.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        branches: Branches = ctx.branches
        needed = [number for number, needs_grad in enumerate(ctx.needs_input_grad[1:]) if needs_grad]
        shared: dict[int, Tensor] = {}
        sending = []
        for number in needed:
            shape, dtype, device = ctx.input_properties[number]
            if number in branches.local_branches:
                grad = grads[number]
                # Without a gradient zeros are sent: the other ranks wait for a message of this branch.
                # `_GatherOutputs` multiplied by the number of ranks, and this gradient will be on all of them.
                shared[number] = (
                    torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad / branches.size
                )
                sending += branches.isend(shared[number], number)
        # All gradients of this rank are under way before its first wait. Two ranks that waited for each other first
        # would deadlock.
        for number in needed:
            if number not in shared:
                shape, dtype, device = ctx.input_properties[number]
                buffer = torch.empty(shape, dtype=dtype, device="cpu")
                branches.receive(buffer, number)
                shared[number] = buffer.to(device)
        # Ended by the peers, which take these messages in the loop above. The gradients may be freed only then.
        for _, work in sending:
            work.wait()
        return None, *(shared.get(number) for number in range(len(ctx.input_properties)))


class _GatherOutputs(torch.autograd.Function):
    """Forward: the outputs of all branches, on every rank. Backward: each rank keeps the gradients of its own.

    Every rank computes the same loss, so no gradient has to be sent. Of the n ranks whose gradients are averaged, only
    one has a gradient of this branch: so it is multiplied by n here.
    """

    @staticmethod
    def forward(ctx: Any, branches: Branches, num_anchors: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.branches, ctx.num_anchors = branches, num_anchors
        local = dict(zip(branches.local_branches, tensors[num_anchors:], strict=True))
        # Outputs of other ranks arrive on the CPU and are moved to where this rank's branches compute.
        device = next(branches.parameters(), torch.empty(0)).device
        sending = []
        for number, made in local.items():
            # Receivers do not know dtype and shape. Messages of one tag arrive in order, so the header comes first.
            sending += branches.isend(_header(made), number)
            if _can_be_sent(made):
                sending += branches.isend(made, number)
        outputs = []
        for number in range(len(branches.branches)):
            output: Any = local[number] if number in local else _receive_output(branches, number)
            if not _can_be_sent(output):
                raise branches.output_error(number)  # Every rank has seen the header, and raises it too.
            # A view, since autograd functions must not return their inputs themselves.
            outputs.append(output.view_as(output) if number in local else output.to(device))
        for _, work in sending:
            work.wait()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        branches: Branches = ctx.branches
        # Only now: a forward pass is also right without `distribute`, to evaluate.
        if not branches.distributed:
            raise branches.not_distributed_error()
        local = (grads[number] * branches.size for number in branches.local_branches)
        # The anchors only tie all inputs into the graph. The gradients of inputs come from the branches themselves,
        # here or on a peer.
        return None, None, *([None] * ctx.num_anchors), *local


def _receive_output(branches: Branches, number: int) -> Tensor | None:
    """Receive another rank's output; return None if it is of a kind that cannot be sent."""
    header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64)
    branches.receive(header, number)
    dtype, dims, *shape = header.tolist()
    if dtype == _INVALID:
        return None
    buffer = torch.empty(shape[:dims], dtype=DTYPES[dtype])
    branches.receive(buffer, number)
    return buffer


def _can_be_sent(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point() and output.dim() <= _MAX_DIMS


def _header(output: Any) -> Tensor:
    """Return a description of an output: number of its dtype, number of dimensions, and shape."""
    header = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64)
    # Stays so if the output cannot be sent: the receivers then wait for no second message.
    header[0] = _INVALID
    if _can_be_sent(output):
        header[0], header[1] = DTYPES.index(output.dtype), output.dim()
        header[2 : 2 + output.dim()] = torch.tensor(output.shape)
    return header


def _check(branches: Sequence[nn.Module], transport: Transport) -> None:
    """Refuse branches that these ranks cannot compute; all mistakes at once."""
    mistakes = []
    if not branches:
        mistakes.append("there must be one branch at least")
    elif transport.size > len(branches) and transport.size % len(branches):
        mistakes.append(
            f"{transport.size} ranks cannot be put into groups of {len(branches)}, one rank for each branch: use "
            f"{len(branches)} ranks, or a multiple of that"
        )
    for number, branch in enumerate(branches):
        for name, module in branch.named_modules():
            if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats:
                location = f"'{name}' of branch {number}" if name else f"branch {number}"
                mistakes.append(
                    f"{location} keeps running statistics, which only one rank would update: use LayerNorm or "
                    "GroupNorm, or track_running_stats=False"
                )
    if mistakes:
        raise ConfigError(f"rank {transport.world_rank}: Branches: {'; '.join(mistakes)}.")
