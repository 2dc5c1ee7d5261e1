"""Clock offsets between the hosts of ranks, by Cristian's algorithm."""

import torch

from tutti.collectives.messages import broadcast_json
from tutti.transports import Transport

_NUM_REQUESTS = 5
"""Requests per rank. The quickest answer is the most precise one."""


def clock_offsets(transport: Transport) -> list[float]:
    """Return, by rank, the seconds by which its clock is ahead of rank 0's. Collective.

    Ranks of one host have one clock, and so do simulated ranks. Otherwise rank 0 asks each rank for its time. It takes
    the answer with the shortest round trip, and assumes that it was given in the middle of that trip (Cristian 1989).
    The error is at most half the round trip.
    """
    if transport.cluster is not None or len(set(transport.hosts)) == 1:
        return [0.0] * transport.size
    offsets_s = [0.0] * transport.size
    answer, request = torch.empty(1, dtype=torch.float64, device="cpu"), torch.zeros(1, device="cpu")
    # One rank after the other: answers of several at once would wait for each other, and seem late.
    if transport.rank == 0:
        for rank in range(1, transport.size):
            measured = []
            for _ in range(_NUM_REQUESTS):
                start_s = transport.now()
                transport.isend(request, rank).wait()
                transport.irecv(answer, rank).wait()
                stop_s = transport.now()
                # Round trip first, so that `min` finds the quickest answer.
                measured.append((stop_s - start_s, answer.item() - (start_s + stop_s) / 2))
            offsets_s[rank] = min(measured)[1]
    else:
        for _ in range(_NUM_REQUESTS):
            transport.irecv(request, 0).wait()
            answer.fill_(transport.now())
            transport.isend(answer, 0).wait()
    shared: list[float] = broadcast_json(offsets_s, transport)
    return shared
