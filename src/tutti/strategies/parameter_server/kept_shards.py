"""After a loss: which of the shards and copies that are left the others continue from, and how all get them.

Every rank knows its own shards and copies, each at a version or two. All learn which there are, choose alike, and the
holders of what is chosen send it to all.

Where steps are exact, the version is that of the last step which is over on any rank. A shard may be one version ahead
of it, on a server that has had all updates of the step in which the rank was lost: then what it was before is taken.
Otherwise it is the newest that is left of each shard, and what nobody has is left as the model has it.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tutti.collectives import all_gather_json
from tutti.collectives.nested import broadcast_nested
from tutti.errors import StateLost
from tutti.replica import Replica
from tutti.replica.buckets import Slot, in_memory_order
from tutti.strategies.parameter_server.shard_optimizer import merge_segment_states
from tutti.strategies.parameter_server.shards import ShardSegment
from tutti.transports import Transport

NOTHING: dict[str, Any] = {"exact": False, "completed": -1, "num_shards": 0, "shards": []}
"""What a rank has that joins the others."""


def load_kept(own: dict[str, Any], replica: Replica, transport: Transport) -> dict[str, Any]:
    """Write the values that are left into the model; return the optimiser's state by parameter. Collective.

    Args:
        own: what this rank has: whether steps are exact, the version that its last step has made, the number of shards,
            and the shards here.
        replica: the model.
        transport: joins all ranks.
    """
    tensors = {slot.name: slot.tensor for slot in [*replica.slots, *replica.statistics]}
    segments: list[Any] = []
    for part in shared_shards(own, transport):
        segments += part["segments"]
        with torch.no_grad():
            for name, (start, stop), values in part["values"]:
                in_memory_order(tensors[name])[start:stop].copy_(values)
    return merged_states(segments, replica.slots)


def shared_shards(own: dict[str, Any], transport: Transport) -> Iterator[dict[str, Any]]:
    """Yield the values and states of each shard, on every rank. Collective.

    Raises `StateLost` on all ranks if steps are exact and a shard is not left at the right version.
    """
    channel = transport.channel("kept shards")
    try:
        about = [[each["shard"], each["version"], int(each["is_copy"])] for each in own["shards"]]
        found = all_gather_json([own["completed"], own["num_shards"], about, own["exact"]], channel)
    finally:
        channel.close()
    exact = any(is_exact for *_, is_exact in found)
    version = max(completed for completed, *_ in found) if exact else None
    chosen = choose([shards for _, _, shards, _ in found], version)
    num_shards = max(number for _, number, _, _ in found)
    if exact and len(chosen) < num_shards:
        raise StateLost(
            f"rank {transport.world_rank}: {num_shards - len(chosen)} of {num_shards} parts of the model were lost "
            "together with their copies, because their servers were lost at the same time. Continue from the last "
            "checkpoint."
        )
    for rank in range(transport.size):
        places = [place for holder, place in chosen.values() if holder == rank]
        if places:
            parts = [own["shards"][place] for place in places] if rank == transport.rank else None
            yield from broadcast_nested(parts, transport, rank)


def choose(found: list[list[list[int]]], version: int | None) -> dict[int, tuple[int, int]]:
    """Return the rank from which each shard is taken, and its place among what that rank has.

    Args:
        found: shard, version and whether it is a copy, of all that each rank has.
        version: the version to take; None for the newest.
    """
    best: dict[int, tuple[int, int, int, int]] = {}
    for rank, shards in enumerate(found):
        for place, (shard, its_version, is_copy) in enumerate(shards):
            if version is None or its_version == version:
                # The newest; of equal ones the shard before its copy, and the first rank.
                best[shard] = max(best.get(shard, (-1, 0, 0, 0)), (its_version, -is_copy, -rank, place))
    return {shard: (-rank, place) for shard, (_, _, rank, place) in best.items()}


def merged_states(fetched: list[Any], slots: Iterable[Slot]) -> dict[str, Any]:
    """Return the state of whole parameters, by name, from that of segments."""
    # By name and range: the segment's slot and place in its shard are not known here, nor used.
    segments = [
        (name, ShardSegment(0, start, stop, 0, is_whole), state) for name, (start, stop, is_whole), state in fetched
    ]
    return merge_segment_states(segments, {slot.name: slot for slot in slots})
