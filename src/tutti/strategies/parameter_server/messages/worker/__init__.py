"""Worker of parameter servers: pushes gradients as backward makes them, and pulls versions as old as it may use.

How it works
------------
Two threads take part. The training thread calls `MessageWorker`'s events. The transport's thread runs generators: one
per push (`ShardPusher._send`), which sends a shard's gradient and, if the push asks for a newer version, goes on to
receive that (`ShardPuller.receive`). If the rank serves too, its `Server` runs in the same transport thread.

Parts, and what each of them writes:

- `WorkerShard`: state of one shard. The training thread writes its clock, version and pending pull.
- `ShardPusher`: packs gradients into buffers of its own, so that the user may change `p.grad` at once.
- `ShardPuller`: receives into `WorkerShard.received`; copies that into the model, in the training thread only.
- `RequestSender`: sends requests; hands them over directly where the server is on the same rank.

Under a clocked consistency of staleness s, a push of clock c asks for version c + 1 - s if the model holds an older
one, and for one more if it holds exactly that. At most one pull per shard is pending. The training thread waits for it
when the model's version is below clock - s. Under a counting consistency every push asks for a pull, and every
iteration waits for it. While the training starts synchronously, s is 0 (`staleness_bound`).

Where a step counts on all workers or on none (`ServerGroupConfig.exact`), `before_step` waits for all pulls: a step
that is over has been taken by all servers. A loss before that makes it void (`tutti.job.elastic`), and what servers
have is put together by `kept_shards.py`.

Waits: for a pull, see `puller.py`. At a barrier, until all living workers are there (servers send `KEEP_ALIVE`
meanwhile). At the end, until the server of the same rank has served its last worker, without a deadline. The loss of
another worker ends no wait with an error: servers go on without it, unless steps are exact; then they reply `LOST`. A
lost server fails every wait for its shards with `RankLost`.
"""

from tutti.strategies.parameter_server.messages.worker.worker import MessageWorker

__all__ = ["MessageWorker"]
