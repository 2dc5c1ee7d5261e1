"""By how much the clocks of ranks differ."""

import torch

from tutti.collectives.messages import broadcast_json
from tutti.transports import Transport

_ASKS = 5


def clock_offsets(transport: Transport) -> list[float]:
    """By rank, the seconds by which its clock is ahead of rank 0's. Collective.

    Ranks of one host have one clock. Of others, rank 0 asks what time it is there, and takes the answer that came
    quickest to be of the middle of the time it took (Cristian 1989).
    """
    if transport.cluster is not None or len(set(transport.hosts)) == 1:
        return [0.0] * transport.size
    found = [0.0] * transport.size
    answer, ask = torch.empty(1, dtype=torch.float64, device="cpu"), torch.zeros(1, device="cpu")
    if transport.rank == 0:
        for rank in range(1, transport.size):
            asked = []
            for _ in range(_ASKS):
                start_s = transport.now()
                transport.isend(ask, rank).wait()
                transport.irecv(answer, rank).wait()
                stop_s = transport.now()
                asked.append((stop_s - start_s, answer.item() - (start_s + stop_s) / 2))
            found[rank] = min(asked)[1]
    else:
        for _ in range(_ASKS):
            transport.irecv(ask, 0).wait()
            answer.fill_(transport.now())
            transport.isend(answer, 0).wait()
    shared: list[float] = broadcast_json(found, transport)
    return shared
