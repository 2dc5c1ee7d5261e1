"""Server of parameter shards: applies pushed gradients and answers pulls (Li et al. 2014).

How it works
------------
Each serving rank has one `Server`. Everything in it runs as generators (`Operation`) in one thread of the transport, or
in the simulator's engine, so no part of it has a lock. Per worker there are two generators: `Server._receive_requests`
handles the worker's requests in the order in which they were sent; `ReplySender.send_replies` sends it what it asked
for. Only these two wait for the worker: a slow worker does not by itself hold up others.

Parts, which share a `ServerContext`, and the state that each of them alone writes:

- `WorkerMembership`: who is alive, who is waited for (`members`), who is at the barrier. Written by `WorkerLifecycle`.
- `ServerShard`: a shard's values, `Ledger` and waiting pulls. Decodes updates and applies
  them. Written by `VersionMaker` and `WorkerLifecycle`.
- `UpdateOrdering`, `GlobalClipping`: agreement with other servers, where a consistency or clipping needs it.
- `ReplySender`: outboxes of replies.
- `CopySender`, `CopyReceiver`: the copies of shards on another server (`copies.py`). `ServerHalt`: losses with which
  versions end.

A push goes through them as follows. The request is received and decoded, and its update is recorded in the shard's
ledger. `VersionMaker.settle` then takes every version that the ledger has due: it makes the mean of the updates, takes
the optimiser's step, and replies to every waiting pull that may now be read. The push's own pull, if it asks for one,
is among the waiting ones.

Waits and their ends:

- A pull waits in `ServerShard.waiting_pulls`. The push that completes the wanted version ends it, or the departure of
  the last worker that the version waited for (`WorkerLifecycle.leave`, `lose`, `remove` all call `settle_all`), or a
  stop (`STOPPED`), or the removal of the puller (`REJECTED`).
- A worker at the barrier waits until every living worker is there and all updates are applied. Meanwhile it gets
  `KEEP_ALIVE` replies, because the others may train for longer than a timeout.
- A lost worker fails the receive in `_receive_requests` with `RankLost`; `WorkerLifecycle.lose` removes it.
- The server itself ends (`Server.over`) when no worker is left, or when one of its generators fails. In the latter case
  `failure` is set and the worker of the same rank is interrupted.

Invariant: a reply carries `ServerShard.version`, and the values are exactly those of that version's step. Snapshots
keep it true while values are sent.
"""

from tutti.strategies.parameter_server.messages.server.server import Server

__all__ = ["Server"]
