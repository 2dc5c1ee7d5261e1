"""`tutti bench encryption`: an all-reduce between hosts over TLS, and over connections in the clear."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tutti.bench.interleaved import Candidates, InterleavedTimer
from tutti.collectives import ALGORITHMS, run
from tutti.errors import ConfigError
from tutti.launch import init
from tutti.launch.supervisor_pipe import SupervisorPipe
from tutti.transports import SocketTransport
from tutti.transports.base import Transport, TransportWrapper

_ROUND_S, _MOST_REPEATS, _SIZE_S = 0.05, 50, 30.0
"""Seconds of one candidate in one round, most calls in that time, and seconds of all rounds of one size, about."""


def measure(sizes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Time a ring at every size in bytes over both kinds of connections, in turn. The same on every rank."""
    transport, reporter = init().transport, SupervisorPipe()
    while isinstance(transport, TransportWrapper):
        transport = transport.inner
    assert isinstance(transport, SocketTransport)
    member = transport.membership.member
    if member.secret is None or member.secret.is_open or not member.secret.encrypt:
        raise ConfigError("nothing is encrypted in this run: leave out TUTTI_ENCRYPT=0 and TUTTI_SECRET=none.")
    channels: dict[str, Transport] = {}
    secret = member.secret
    for name, encrypt in (("clear", False), ("tls", True)):
        member.secret = replace(secret, encrypt=encrypt)
        channels[name] = transport.channel(f"bench {name}")
        _ring(torch.zeros(64), channels[name])  # Opens the connections.
    rows = []
    for number, num_bytes in enumerate(sizes):
        reporter.progress(done=number, total=len(sizes))
        # Zeros: other values would overflow, being summed in place again and again.
        tensor = torch.zeros(num_bytes // 4)
        candidates: Candidates = {name: partial(_ring, tensor, channel) for name, channel in channels.items()}
        seconds = InterleavedTimer(rounds, _ROUND_S, _MOST_REPEATS, _SIZE_S).medians(candidates, transport)
        rows.append({"num_bytes": num_bytes, "seconds": seconds, "ratio": seconds["tls"] / seconds["clear"]})
    return rows


def _ring(tensor: torch.Tensor, transport: Transport) -> None:
    run(ALGORITHMS["ring"].steps(tensor, transport))
