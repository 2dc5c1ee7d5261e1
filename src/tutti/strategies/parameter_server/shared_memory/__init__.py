"""Parameter servers on one host: the parameters lie in memory that all workers share, and no rank has to serve.

How it works
------------
There is no server process. `SharedMemoryWorker` runs on every rank, in the training thread alone, and every worker may
take any step. Coordination is by counters in shared memory (`ShardCounters`), each of which has one writer at a time.

1. Push: a worker copies its gradient into its ring (`PushBuffers`), then publishes its clock. The publish comes last: a
   worker that sees the clock sees the gradient.
2. Step: the worker that completes a version makes it. A worker that has pushed, or that waits, looks for shards whose
   next version is due, takes the shard's lock and steps (`Stepper`: each shard by itself, or all shards at once).
3. Read: a worker waits until the versions are new enough, then copies the values (`ParameterReader`).

Which version is due, and who may read, follows the rules of `ledger.py`, evaluated on counters instead of messages.
Under `Async(locks=True)` each worker steps with its own gradients, under the lock; without locks, see `hogwild.py`.

No wait depends on a particular rank to serve. A wait for a member's push ends when that member pushes, leaves, or is
found lost. A wait for a lock ends when its holder releases it, or is found lost: then one of the others takes the lock
over, counts the begun step as taken, and goes on (`ClockMembership.remove_lost`). What a killed worker has pushed stays
in its ring and is applied. `WorkerRegistry` says how losses are found and how barriers work.

Invariant: only the holder of a shard's lock changes its values, its version and the optimiser's state; a version is
published after the values it names.
"""
