"""Parameter servers: workers push gradients, servers run the optimiser, workers pull parameters (Li et al. 2014).

`consistency.py` has the rules of how far workers may drift apart (`BSP`, `SSP`, `SoftSync`, `Async`); `ledger.py`
decides by them which updates make the next version of a shard. `messages/` implements servers and workers over any
transport. `shared_memory/` does the same for the workers of one host, where no rank has to serve. The simulator models
`messages/`.

How a bucket travels under SSP(3)
---------------------------------
SSP (Ho et al. 2013) lets the fastest worker be 3 iterations ahead of the slowest. Follow bucket 0 of worker 1, which
is about to push for the sixth time: its *clock* is 5. The bucket is cut into two *shards*, on the servers 0 and 1.

1. Backward. When the last gradient of the bucket is there, `bucket_ready` calls `MessageWorker._push` (in the first
   step, and where gradients are changed after backward, `before_step` does: `push_timing.py`). For each shard,
   `ShardPusher` copies the gradient and sends it, with the *base version*: the version of the shard that the model
   holds, here 3. The gradient was computed from that version.
2. The push may ask for a newer version. The next iteration, of clock 6, may read any version from 6 - 3 = 3 on. The
   model holds exactly that, so the push asks for 4, which the iteration after will need: the pull has one iteration to
   arrive.
3. The server receives the push and decodes it. The shard's `Ledger` records it as worker 1's update of clock 5. Version
   v + 1 is made of the updates of clock v of all members. So this update will be in version 6.
4. Say that worker 2, the slowest, is at clock 3: it has pushed the updates of clock 0, 1 and 2. Then version 3 is the
   newest, and worker 1's pull of version 4 waits in `ServerShard.waiting_pulls`.
5. Worker 2 pushes its update of clock 3. Now every member's clock is beyond 3, and version 4 is due. `VersionMaker`
   takes the updates of clock 3 from the ledger. `ShardOptimizer` makes their mean, weighted by samples, and takes a
   step with the user's optimiser. The server then replies with the values to every waiting pull that accepts version 4.
6. Worker 1 receives the values in the background (`ShardPuller.receive`), while it computes. In `after_step`, or before
   the first module that uses the shard computes, the training thread copies them into the model.
7. If version 4 is not there when worker 1 begins the iteration of clock 7, which may not use less than 4, it waits:
   this wait is what bounds the staleness. It is ended by the push of worker 2; or by worker 2 leaving, or being lost,
   because then it is no member any more and the version is due without it.

In shared memory the steps are the same, but worker 1 writes its gradient into a ring (1), publishes its clock (3), and
whichever worker completes version 4 takes its step (5); worker 1 copies the values when it needs them (6).
"""

from tutti.strategies.parameter_server.consistency import BSP, SSP, Async, Consistency, SoftSync, StalenessAware
from tutti.strategies.parameter_server.strategy import ParameterServer, read

__all__ = ["BSP", "SSP", "Async", "Consistency", "ParameterServer", "SoftSync", "StalenessAware", "read"]
