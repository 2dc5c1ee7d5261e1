"""Requests of a worker to its servers, also to the one on its own rank, which needs no message."""

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
from torch import Tensor

from tutti.errors import DeadlineExceeded, RankLost
from tutti.replica.buckets import Slot
from tutti.strategies.parameter_server.kept_shards import merged_states
from tutti.strategies.parameter_server.messages.config import ServerGroupConfig
from tutti.strategies.parameter_server.messages.server import Server
from tutti.strategies.parameter_server.messages.state_transfer import receive_state, send_state
from tutti.strategies.parameter_server.messages.wire import (
    PAYLOAD_TAG,
    REQUEST_TAG,
    ReplyHeader,
    RequestHeader,
    RequestKind,
    reply_tags,
)
from tutti.transports import Transport, Work
from tutti.transports.base import Operation, Signal


class RequestSender:
    """Sends a worker's requests, and waits for what depends on servers."""

    def __init__(
        self, transport: Transport, config: ServerGroupConfig, local_server: Server | None, servers: list[int]
    ) -> None:
        """Send to `servers`, the ranks that hold shards; `local_server` is that of this rank, if it serves too."""
        self.servers = servers
        self.local_server = local_server
        self._transport = transport
        self._config = config
        self._rank = transport.rank

    def send(self, server: int, kind: RequestKind) -> Operation:
        """Send a request without payload."""
        header = RequestHeader(kind)
        if server == self._rank:
            assert self.local_server is not None
            self.local_server.handle_request(self._rank, header, np.empty(0), np.empty(0), None)
        else:
            yield self._transport.isend(self._config.request_format.pack(header), server, REQUEST_TAG)

    def push(
        self, server: int, header: RequestHeader, options: np.ndarray, has_grad: np.ndarray, payload: Tensor | None
    ) -> Operation:
        """Send a gradient, or a void push, which has none.

        A server on this rank takes the payload over; otherwise it may be reused afterwards.
        """
        if server == self._rank:
            assert self.local_server is not None
            self.local_server.handle_request(self._rank, header, options, has_grad, payload)
        else:
            message = self._config.request_format.pack(header, options, has_grad)
            # Both begin before either is awaited: payloads must follow in the order of their headers, and another push
            # may begin at any wait.
            sends = [self._transport.isend(message, server, REQUEST_TAG)]
            if payload is not None:
                sends.append(self._transport.isend(payload, server, PAYLOAD_TAG))
            yield from sends

    def send_to_all(self, kind: RequestKind) -> None:
        """Send a request without payload to all servers, and wait until it is sent."""
        # To all at once: a server that is slow to take it must not hold up the others.
        for work in [self._transport.spawn(self.send(server, kind)) for server in self.servers]:
            work.wait()

    def fetch_states(self, slots: Iterable[Slot]) -> dict[str, Any]:
        """Return the state of all servers' optimisers, by parameter. After a barrier, when no server steps."""
        fetched: list[Any] = []
        for work in [self._transport.spawn(self._fetch_state(server, fetched)) for server in self.servers]:
            self.wait(work)
        return merged_states(fetched, slots)

    def _fetch_state(self, server: int, segments: list[Any]) -> Operation:
        """Append the optimiser's state of a server's segments to `segments`."""
        # The server of this rank is in the same process and thread: a message to oneself is not possible.
        if server == self._rank:
            assert self.local_server is not None
            segments += self.local_server.copy_state()["segments"]
        else:
            yield from self.send(server, RequestKind.SAVE_STATE)
            state = yield from receive_state(server, self._transport)
            segments += state["segments"]

    def load_state(self, server: int, state: dict[str, Any], first_shard: int) -> Operation:
        """Make a server start again from a state; done when it has. `first_shard` is the index of its first shard."""
        if server == self._rank:
            assert self.local_server is not None
            self.local_server.load_state(state)
        else:
            yield from self.send(server, RequestKind.LOAD_STATE)
            yield from send_state(state, server, self._transport)
            # The server replies when it has loaded; the content of the reply does not matter.
            yield self._transport.irecv(ReplyHeader.empty(), server, reply_tags(first_shard)[0])

    def wait(self, work: Work) -> None:
        """Wait for work that servers complete.

        Raises:
            RankLost: a server is lost. Its shards are lost with it, so no worker can go on.
            Exception: the error of the server of this rank, if that has failed.
        """
        try:
            work.wait()
        except RankLost as loss:
            # The failed server has interrupted this wait, which looks like a loss: its own error says more.
            if self.local_server is not None and self.local_server.failure is not None:
                raise self.local_server.failure from None
            # By world rank, as errors name ranks: a channel of some ranks numbers its servers differently.
            if lost := sorted(loss.gone.keys() & {self._transport.world_ranks[server] for server in self.servers}):
                raise RankLost(
                    f"rank {self._transport.world_rank}: rank {lost[0]} is gone, and the parameters that it served "
                    f"with it: {loss.gone[lost[0]]}. Training survives the loss of a worker on one host, or where "
                    "servers have ranks of their own (ParameterServer(servers=1)).",
                    loss.gone,
                ) from None
            raise

    def disconnect(self) -> None:
        """Send the last request to all servers; wait until the server of this rank has served its last worker."""
        self.send_to_all(RequestKind.DISCONNECT)
        if self.local_server is not None:
            # Without a deadline: other workers may train for as long as they like.
            self._transport.spawn(_wait_for(self.local_server.over), deadline=False).wait()

    def disconnect_after_stop(self) -> None:
        """Disconnect as far as possible within the deadline.

        The server of this rank must have time to reply `STOPPED` to its other workers.
        """
        # Suppressed, because the caller raises `NonFiniteLoss` next, which says more than a peer that has already gone.
        with suppress(RankLost, DeadlineExceeded):
            self.send_to_all(RequestKind.DISCONNECT)
            if self.local_server is not None:
                self._transport.spawn(_wait_for(self.local_server.over)).wait()


def _wait_for(signal: Signal) -> Operation:
    yield signal
