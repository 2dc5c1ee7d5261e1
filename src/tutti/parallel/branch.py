"""Branches of one model, each computed by another rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from tutti.errors import ConfigError
from tutti.parallel.same_batch import SameBatchCheck
from tutti.transports import Transport
from tutti.transports.sockets.frames import DTYPES

_MAX_DIMS = 8
_REFUSED = -1


_REMEDY = (
    "ranks of one group of branches are one worker. Leave out tutti.data.shard, or give it the world of groups (see "
    "docs/branches.md), and give random data and shuffling a seed."
)


class Branches(nn.Module):
    """Independent branches of one model, on different ranks; every rank gets the outputs of all of them.

    `outputs = branches(a, b)` has an output for each branch, as if all had been computed here; all ranks call it, also
    to evaluate. Branches may share weights, or be one module several times. Gradients are right once
    `tutti.distribute(model, optimizer)` has put those of all ranks together, as it does in `loss.backward()`; what
    comes before and after the branches every rank computes for itself.

    The first branch is the first rank's, and so on, round after round if branches are more than ranks. Where ranks are
    more than branches, each group of as many ranks as branches has a replica of its own, and other data: `group`
    and `num_groups` say which, for `tutti.data.shard`. In a group all ranks are given the same inputs.

    Args:
        branches: modules that make one tensor of one tensor each.
        transport: to the other ranks: `tutti.init().transport`. Collective.
    """

    def __init__(self, branches: Sequence[nn.Module], transport: Transport) -> None:
        super().__init__()
        _check(branches, transport)
        self.branches = nn.ModuleList(branches)
        size = min(len(branches), transport.size)
        self.num_groups = transport.size // size
        self.group = transport.rank // size
        members = range(self.group * size, (self.group + 1) * size)
        self._talk = transport.channel("branches", members)
        self._place = transport.rank - members[0]
        self._size = size
        self._same = SameBatchCheck(self._talk, _REMEDY)
        self.distributed = False
        """Whether gradients are averaged over ranks, without which they would be wrong."""

    @property
    def mine(self) -> list[int]:
        """The numbers of the branches that this rank computes."""
        return list(range(self._place, len(self.branches), self._size))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if len(inputs) != len(self.branches):
            raise ConfigError(
                f"rank {self._talk.world_rank}: {len(self.branches)} branches need an input each, got {len(inputs)}."
            )
        if self._size == 1:
            return tuple(branch(x) for branch, x in zip(self.branches, inputs, strict=True))
        if any(x.is_meta for x in inputs):
            return self._counted(inputs)
        if torch.is_grad_enabled():
            self._same([x for x in inputs if x.grad_fn is None])  # Hosts may compute what is below to other last bits.
        entered = _Enter.apply(self, *inputs)
        outputs = {number: self.branches[number](entered[number]) for number in self.mine}
        ties = [x for x in entered if x.requires_grad]
        gathered: tuple[Tensor, ...] = _Gather.apply(self, len(ties), *ties, *outputs.values())
        return gathered

    def _counted(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Without values nothing is sent; whoever counts operations counts those of this rank's branches alone."""
        outputs = []
        for number, (branch, x) in enumerate(zip(self.branches, inputs, strict=True)):
            if number in self.mine:
                outputs.append(branch(x))
            else:
                with _disable_current_modes():
                    outputs.append(branch(x))
        return tuple(outputs)

    def owner(self, number: int) -> int:
        """Whose branch it is: a rank of the group."""
        return number % self._size

    def give(self, tensor: Tensor, number: int) -> list[Any]:
        """Start sending a tensor about a branch of this rank to all others."""
        data = tensor.detach().cpu().contiguous()
        others = [rank for rank in range(self._size) if rank != self._place]
        return [(data, self._talk.isend(data, rank, number)) for rank in others]

    def get(self, room: Tensor, number: int) -> None:
        """Receive one about a branch of another rank."""
        self._talk.irecv(room, self.owner(number), number).wait()

    @property
    def size(self) -> int:
        """How many ranks have branches of one replica."""
        return self._size

    def undistributed(self) -> ConfigError:
        return ConfigError(
            f"rank {self._talk.world_rank}: the gradients of Branches are right when they are averaged over ranks: "
            "tutti.distribute the model that has them before you train it."
        )

    def refusal(self, number: int) -> ConfigError:
        return ConfigError(
            f"rank {self._talk.world_rank}: branch {number} must make one floating-point tensor of at most {_MAX_DIMS} "
            "dimensions. Wrap it in a module that returns what the rest of the model needs."
        )


class _Enter(torch.autograd.Function):
    """Nothing, forward; back, the gradient of every branch's input goes from who has it to all."""

    @staticmethod
    def forward(ctx: Any, branches: Branches, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.branches = branches
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        entered = tuple(x.view_as(x) for x in inputs)
        ctx.mark_non_differentiable(*(x for x in entered if not x.is_floating_point()))
        return entered

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        branches: Branches = ctx.branches
        wanted = [number for number, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        found: dict[int, Tensor] = {}
        sending = []
        for number in wanted:
            shape, dtype, device = ctx.like[number]
            if number in branches.mine:
                grad = grads[number]
                found[number] = torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad / branches.size
                sending += branches.give(found[number], number)
        for number in wanted:
            if number not in found:
                shape, dtype, device = ctx.like[number]
                room = torch.empty(shape, dtype=dtype, device="cpu")
                branches.get(room, number)
                found[number] = room.to(device)
        for _, work in sending:
            work.wait()
        return None, *(found.get(number) for number in range(len(ctx.like)))


class _Gather(torch.autograd.Function):
    """The outputs of all branches, on every rank; back, each rank takes the gradients of its own.

    Every rank computes the same loss, so no gradient has to travel. The mean over ranks, of which only one has a
    gradient for this branch, makes it an nth of what it is: so it is n times as much here.
    """

    @staticmethod
    def forward(ctx: Any, branches: Branches, num_ties: int, *given: Tensor) -> tuple[Tensor, ...]:
        ctx.branches, ctx.num_ties = branches, num_ties
        own = dict(zip(branches.mine, given[num_ties:], strict=True))
        device = next(branches.parameters(), torch.empty(0)).device
        sending = []
        for number, output in own.items():
            sending += branches.give(_header(output), number)
            if _is_fine(output):
                sending += branches.give(output, number)
        outputs = []
        for number in range(len(branches.branches)):
            output = own[number] if number in own else _received(branches, number)
            if not _is_fine(output):
                raise branches.refusal(number)
            outputs.append(output.view_as(output) if number in own else output.to(device))
        for _, work in sending:
            work.wait()
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        branches: Branches = ctx.branches
        if not branches.distributed:
            raise branches.undistributed()
        return None, None, *([None] * ctx.num_ties), *(grads[number] * branches.size for number in branches.mine)


def _received(branches: Branches, number: int) -> Any:
    """Another rank's output; None if it is none that can be sent."""
    header = torch.empty(2 + _MAX_DIMS, dtype=torch.int64)
    branches.get(header, number)
    dtype, dims, *shape = header.tolist()
    if dtype == _REFUSED:
        return None
    room = torch.empty(shape[:dims], dtype=DTYPES[dtype])
    branches.get(room, number)
    return room


def _is_fine(output: Any) -> bool:
    return isinstance(output, Tensor) and output.is_floating_point() and output.dim() <= _MAX_DIMS


def _header(output: Any) -> Tensor:
    """What an output is: its dtype, how many dimensions it has, and which."""
    header = torch.zeros(2 + _MAX_DIMS, dtype=torch.int64)
    header[0] = _REFUSED
    if _is_fine(output):
        header[0], header[1] = DTYPES.index(output.dtype), output.dim()
        header[2 : 2 + output.dim()] = torch.tensor(output.shape)
    return header


def _check(branches: Sequence[nn.Module], transport: Transport) -> None:
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
                what = f"'{name}' of branch {number}" if name else f"branch {number}"
                mistakes.append(
                    f"{what} keeps running statistics, which only one rank would see: use LayerNorm or GroupNorm, or "
                    "track_running_stats=False"
                )
    if mistakes:
        raise ConfigError(f"rank {transport.world_rank}: Branches: {'; '.join(mistakes)}.")
