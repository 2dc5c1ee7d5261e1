"""The control plane of a job: who takes part, who is gone, and the small values that ranks exchange to find each other.

Modules, from the wire upwards: `secret` (what members of a job share, and the keys made of it), `certificates` (mutual
TLS from that secret), `handshake` (proving the secret on a connection), `frames` (bounded JSON messages and their
schema), `state` (the coordinator's decisions, without sockets and clocks), `coordinator` (the service), `member` (a
process's view of the job, and its waits), `link` (the connection between the two), `local` (both in one process).

A process is a *member*. Members meet in a *scope*, where each has a rank: a world, or a group of torch.distributed.
"""

from tutti.coordination.coordinator import Coordinator
from tutti.coordination.link import connect_member
from tutti.coordination.local import LocalCoordinator
from tutti.coordination.member import Member, MemberDescription
from tutti.coordination.secret import Secret

__all__ = ["Coordinator", "LocalCoordinator", "Member", "MemberDescription", "Secret", "connect_member"]
