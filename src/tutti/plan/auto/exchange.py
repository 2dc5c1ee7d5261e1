"""`AutoExchange`: starts with all-reduce and switches to what the planner finds best, between two steps.

How it works. The replica's events go to the exchange of the strategy in use, the *inner* exchange, which this one made.
This exchange has two hooks of its own. After every optimiser step it tells the `PlanController`, which times steps and
decides. Before every forward pass that trains it asks the controller whether a switch is due, and performs it: not in
the optimiser's hook, because a switch removes and adds hooks of the optimiser.

Every decision that leads to a switch is made from values that all ranks have gathered, or that rank 0 has broadcast, in
the same step. So all ranks switch before the same forward pass. A switch finishes the old inner exchange, which leaves
the same model on every rank, closes its channel, and attaches the new strategy on a new channel with a new name: late
messages of the old one cannot be taken for messages of the new one.
"""

from contextlib import AbstractContextManager
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from tutti.plan.auto.controller import PlanController
from tutti.replica import HookedReplica
from tutti.replica.owned_hooks import OwnedHook
from tutti.strategies import AllReduce, Exchange, Strategy, parse
from tutti.transports import Transport


class AutoExchange(Exchange):
    """Runs the strategy that its controller chooses."""

    replica: HookedReplica

    def __init__(self, replica: HookedReplica, transport: Transport, lossy: bool) -> None:
        super().__init__(replica, transport)
        self.strategy: Strategy = AllReduce()
        """The strategy in use."""
        self._num_attached, self._bytes_sent_before = 0, 0
        self._forward_hook: Any = None
        self.controller = PlanController(replica, transport, self.events, lossy)
        self._attach()
        self._step_hook = replica.optimizer.register_step_post_hook(
            lambda *_: self.controller.step_ended(self.strategy, self.inner)
        )

    @property
    def equal_after_steps(self) -> bool:  # type: ignore[override]
        return self.inner.equal_after_steps

    @property
    def agreed_on_first(self) -> bool:  # type: ignore[override]
        return self.inner.agreed_on_first

    @property
    def elastic_mistake(self) -> str:
        return (
            "'auto' measures and decides with all ranks together, and cannot lose one meanwhile. Let `tutti plan` "
            "choose a strategy, and give that one."
        )

    def metrics(self) -> dict[str, Any]:
        return {**self.inner.metrics(), "planned": self.controller.status(self.strategy)}

    def switch_if_due(self) -> None:
        """Switch to the strategy that the controller has chosen, if it has. Collective: it has chosen on all ranks."""
        # Taken first: if the switch fails, the next forward pass does not repeat it.
        if (switch := self.controller.take_pending()) is not None:
            prediction, message = switch
            self.switch_to(prediction.strategy)
            self.controller.switched(prediction, message)

    def switch_to(self, strategy: Strategy) -> None:
        """Finish the strategy in use and start another. Between two steps. Collective."""
        self.inner.finish()  # Leaves the same model on every rank, from which the new strategy starts.
        self.inner.close()
        # The next exchange counts from zero.
        self._bytes_sent_before += self.inner.bytes_sent
        # Before the channel is closed: gradients may lie in its shared memory, and are copied out of it here.
        self.replica.detach()
        self._channel.close()
        self.strategy = strategy
        self._attach()

    def _attach(self) -> None:
        """Attach the present strategy on a channel of its own, apart from messages of the one before."""
        self._num_attached += 1
        self._channel = self.transport.channel(f"plan {self._num_attached}")
        self.inner = self.strategy.attach(self.replica, self._channel)
        self.inner.events = self.events  # One log for all strategies: the controller reads waiting times from it.
        # Registered last: when it runs, the hooks of the inner exchange have run for this forward pass, so that a
        # switch does not remove hooks that are still to be called.
        if self._forward_hook is not None:
            self._forward_hook.remove()
        self._forward_hook = self.replica.model.register_forward_pre_hook(_SwitchHook(self))

    @property
    def bytes_sent(self) -> int:
        return self._bytes_sent_before + self.inner.bytes_sent

    def consensus(self, optimizer: bool = False) -> None:
        self.inner.consensus(optimizer)

    def restore_local(self) -> None:
        self.inner.restore_local()

    def waiting(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return self.inner.waiting()

    def finish(self) -> None:
        self.inner.finish()

    def close(self) -> None:
        self.controller.close()
        self._forward_hook.remove()
        self._step_hook.remove()
        self.inner.close()

    def state_dict(self) -> dict[str, Any]:
        return {"chosen": str(self.strategy), **self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> set[str]:
        """Continue with the strategy that was chosen; without a choice in `state`, with the present one."""
        chosen = state.get("chosen")
        if chosen is not None and (strategy := parse(chosen)) != self.strategy:
            self.switch_to(strategy)
        return self.inner.load_state_dict({name: part for name, part in state.items() if name != "chosen"})

    @property
    def num_workers(self) -> int:
        return self.inner.num_workers

    @property
    def gradient_share(self) -> float:
        return self.inner.gradient_share

    def add_to_model(self, changes: dict[str, Tensor]) -> None:
        self.inner.add_to_model(changes)


class _SwitchHook(OwnedHook):
    """Asks an exchange to switch, if it is due, before a forward pass that trains."""

    def __init__(self, exchange: AutoExchange) -> None:
        self._exchange = ref(exchange)  # Weak: the model holds this hook, and must not keep the exchange alive.

    def __call__(self, *_: Any) -> None:
        # A forward pass without gradients is evaluation, in which ranks need not take part together.
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and (exchange := self._exchange()) is not None:
            exchange.switch_if_due()
