"""`job.checkpoint` and `job.restore`: all state of a run, saved in the loop and loaded before it.

calls         the two calls, as a part of `Job`
schedule      when a checkpoint is due: by steps, by time, or because the process was asked to stop
signals       SIGTERM and SIGUSR1 as requests to stop
first_rank    the state of all ranks in one call, where rank 0 has what they agree on
snapshot      the state of all ranks elsewhere, put together on the rank that writes
restored      a checkpoint, sent to all ranks and loaded
parts         states of what the loop has besides the job: data, schedulers, a GradScaler
random_state  states of random number generators
"""

from tutti.job.checkpoints.calls import JobCheckpoints
from tutti.job.checkpoints.restored import Restored

__all__ = ["JobCheckpoints", "Restored"]
