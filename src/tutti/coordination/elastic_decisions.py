"""Decisions about an elastic world: when a generation is formed, when it should end, and who is refused.

How it works
------------
What members say is kept by `ElasticWorld`. `advance` looks at all of it and does what is due; it is called after
everything that happens, and does nothing if nothing is due. So the order in which messages come does not matter, nor
whether they come from a coordinator's whole life or all at once after a restart.

*Begin.* The first generation is formed when all have asked that the launcher has started, or when the minimum has
and nobody else came for `_SETTLE_S`. Only members that do not know of a generation yet begin a world: those that are
`ready` were told that it runs. Fewer than the minimum wait until they give up (`tutti.init(timeout=...)`).

*Next.* A later one is formed when all living members of the present one have asked. With fewer members than the
minimum it waits as long as a launcher says that more workers come, and for `_TOO_FEW_S`, in which launchers notice
losses. After that it is formed with `too_few`, so that its members save their state and end. Members that want to leave
are released before, if others stay. When no member is left, those that wait to come in are refused. If none of the
lost ones had come to the end, the world begins anew with those that come then: nobody has the state any more.

*Change without an interruption.* Members change generations at different moments after a loss: each as soon as it
notices. Where a new member waits or one wants to leave, and after a loss that the strategy tolerates, nothing would end
the steps under way. So all are sent *change*; each answers with the number of steps after which it can stop
(`boundary`), and when all have, they get the largest of these (*switch*).

*Connections that break.* A message to a member that is not connected is dropped. A member that connects says at once
what it waits for (`enter`) or where it is (`belongs`), and then gets what it may have missed: the generation that was
formed without a connection to it, and questions of this generation (`ElasticWorld.tell`).

*A new coordinator* knows nothing. Each member says the number of its generation, and the one with the largest is asked
(*recall*) to describe that generation; if it is lost before it has, the next one is asked. Members of it that nobody
has seen count as living until they connect or are found lost. One that another of them says to be lost does not count:
it was evicted, and must not come back because it is the first to connect. A generation that was formed and is known to
none of the living was begun by none of them, so they go on from the one before. After the generation that was described
only the next one can have been formed, because a third would need all living members in it: its number is left out.
"""

from tutti.coordination.elastic_world import ElasticWorld
from tutti.coordination.frames import Message, ProtocolError, encode

_SETTLE_S = 1.0
"""How long the first generation waits for more members after the last one that came, once it has the minimum."""
_TOO_FEW_S = 2.0
"""How long a generation with too few members waits, after the last one that asked, for launchers to notice losses."""
_FULL_S = 2.0
"""How long a new member waits for a place: one that it replaces may be lost already, and not be known to be."""
TRAINING_HAS_ENDED = "the training has ended"
"""The reason that a new member gets which comes too late."""
WORKERS_ARE_LOST = "all workers that this one was to join are lost"
"""The reason that a new member gets which has waited for members that are all lost."""
_RECONNECT_S = 3.0
"""How old a coordinator must be before it takes a few new members for a whole world: were it started anew, members of
the world before would have connected by then."""


def begin(world: ElasticWorld, now: float, started: float, patience_s: float) -> None:
    """Form the first generation, if enough members have come.

    Args:
        started: when the coordinator was started.
    """
    come = [member for member, request in world.requests.items() if not request.ready]
    settled = now - world.asked_at >= _SETTLE_S and now - started >= _RECONNECT_S
    ranks = {member: int(world.there.describe(member)["rank"]) for member in come}
    # Who was started later has another number, unless one of these is lost.
    started_first = {rank for rank in ranks.values() if rank < world.expected}
    enough = max(world.minimum, min(world.expected, world.maximum))
    if len(started_first) >= enough or (settled and len(come) >= world.minimum):
        _form(world, sorted(come[: world.maximum], key=ranks.__getitem__), too_few=False, now=now)
    elif now - max(world.asked_at, started) >= patience_s:
        # They were told by a coordinator before this one that the world runs, and nobody of it has come.
        for member in world.newcomers():
            world.refuse(member, "no worker of the training is left")


def advance(world: ElasticWorld, more_come: bool, now: float) -> None:
    """Do what is due in a world that has begun.

    Args:
        more_come: whether a launcher has started more workers, or is about to.
    """
    if _recalls(world):
        return
    _refuse_strangers(world)
    living = world.living()
    if not living:
        _end_world(world)
        return
    _refuse_doubters(world, living)
    _answer_requests(world, len(living), now)
    if all(member in world.requests for member in living):
        # In the middle of a collective call nobody can join, who would have to begin with a batch.
        in_call = any(world.requests[member].info.get("in_call") for member in living)
        staying = _release(world, living)
        chosen = [*staying, *([] if in_call else _with_place(world, len(staying)))]
        too_few = len(chosen) < world.minimum and not world.is_finished
        if not too_few or not (more_come or now - world.asked_at < _TOO_FEW_S):
            _form(world, chosen, too_few, now)
    elif _should_end(world, living):
        _end(world, living)


def adopt(world: ElasticWorld, announcement: Message) -> None:
    """A member has described the present generation, which a coordinator before this one has formed."""
    described = [each["member"] for each in announcement["members"]]
    fields = {name: announcement[name] for name in ("scope", "number", "members", "too_few")}
    world.present({"op": "generation", **fields}, [each["id"] for each in described])
    # The next one may have been formed, and be known to new members only: its number is not used again.
    world.highest = max(world.highest, world.number + 1)
    world.there.meet(f"{world.scope}.{world.number}", described)


def _end_world(world: ElasticWorld) -> None:
    """All members have ended: nobody is there to whom new ones could come."""
    is_over = world.is_finished or any(member in world.departed for member in world.members)
    for member in {*world.requests, *world.announced}:
        world.refuse(member, TRAINING_HAS_ENDED if is_over else WORKERS_ARE_LOST)
    world.announced.clear()
    world.all_lost = not is_over


def _release(world: ElasticWorld, living: list[str]) -> list[str]:
    """Let members go that want to leave, if others stay; return the members of the next generation."""
    staying = [member for member in living if not world.requests[member].info.get("leaving")]
    if not staying:
        return living  # Nobody else has the state.
    for member in living:
        if member not in staying:
            world.release(member)
    return staying


def _recalls(world: ElasticWorld) -> bool:
    """Have a generation described that members are in and this coordinator does not know; False if there is none.

    Ended by the answer, or by the loss of all members that could give it.
    """
    newer = [each for each, number in world.belonging.items() if number > world.number and world.there.is_there(each)]
    if newer:
        member = max(newer, key=lambda each: world.belonging[each])
        world.tell(member, "recall", number=world.belonging[member])
    return bool(newer)


def _refuse_strangers(world: ElasticWorld) -> None:
    """Tell members of earlier generations that are not in the present one."""
    for member, number in list(world.belonging.items()):
        if member not in world.members and number <= world.number:
            del world.belonging[member]
            world.refuse(member, "the others have gone on without it")


def _refuse_doubters(world: ElasticWorld, living: list[str]) -> None:
    """Refuse new members to which a living one is lost, as a coordinator before this one has told them."""
    doubters = {each for member in living for each in world.there.claims(member)}
    for member in doubters & set(world.newcomers()):
        world.refuse(member, "it has heard that a worker is lost, and that one is here")


def _answer_requests(world: ElasticWorld, num_living: int, now: float) -> None:
    """Answer members that have missed something, and those for which there is no place."""
    for member, request in list(world.requests.items()):
        if member in world.members and request.after < world.number:
            # It was formed while the connection of this member was broken.
            del world.requests[member]
            world.there.send(member, world.announcement)
        elif request.after < 0 and world.is_finished:
            world.refuse(member, TRAINING_HAS_ENDED)
        elif not request.ready and request.after < 0:
            del world.requests[member]
            world.announced.add(member)
            world.there.send(member, {"op": "running", "scope": world.scope, "size": len(world.members)})
    placed = _with_place(world, num_living)
    for member in world.newcomers():
        if member not in placed and now - world.requests[member].at >= _FULL_S:
            world.refuse(member, f"the job has {world.maximum} workers, which is its maximum")


def _with_place(world: ElasticWorld, num_living: int) -> list[str]:
    """Return new members that wait and for which there is a place, the first one first."""
    return world.newcomers()[: max(0, world.maximum - num_living)]


def _should_end(world: ElasticWorld, living: list[str]) -> bool:
    """Return whether the present generation should end, although nothing ends it by itself."""
    return (
        bool(_with_place(world, len(living)))
        or any(world.wants.get(member) == world.number for member in living)
        or any(world.boundary(member) is not None for member in living)  # Somebody was asked, and waits.
        # Strategies that go on without lost ranks end the generation where all can stop.
        or any(member not in world.departed and world.is_lost(member) for member in world.members)
    )


def _end(world: ElasticWorld, living: list[str]) -> None:
    """Ask all where they can stop; tell them, once all have answered."""
    boundaries = [world.boundary(member) for member in living]
    for member, boundary in zip(living, boundaries, strict=True):
        if boundary is None:
            world.tell(member, "change", number=world.number)
    if world.switch is None and None not in boundaries:
        world.switch = max(boundary for boundary in boundaries if boundary is not None)
    if world.switch is not None:
        for member in living:
            world.tell(member, "switch", number=world.number, steps=world.switch)


def _form(world: ElasticWorld, chosen: list[str], too_few: bool, now: float) -> None:
    requests = {member: world.requests[member] for member in chosen}
    described = [world.there.describe(each) for each in chosen]
    members = [
        {"member": description, "after": requests[each].after, "info": requests[each].info}
        for each, description in zip(chosen, described, strict=True)
    ]
    number = max(world.number, world.highest) + 1
    fields = {"scope": world.scope, "number": number, "members": members, "too_few": int(too_few)}
    announcement = {"op": "generation", **fields}
    try:
        encode(announcement)
    except ProtocolError:  # It can be sent to nobody. They end, and do not ask the same again without end.
        for member in chosen:
            world.refuse(member, f"the values of {len(chosen)} workers are too long for one message")
        return
    for member in chosen:
        del world.requests[member]
        world.announced.discard(member)
    world.present(announcement, chosen)
    world.there.meet(f"{world.scope}.{number}", described)
    for member in chosen:
        world.there.send(member, announcement)
    _answer_requests(world, len(chosen), now)
