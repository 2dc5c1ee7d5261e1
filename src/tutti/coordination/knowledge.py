"""`JobKnowledge`: what one member has received from the coordinator."""

from typing import Any

from tutti.coordination.description import MemberDescription
from tutti.coordination.frames import Message
from tutti.coordination.launchers import Numbers

LEFT = "it has left"
"""The reason for the loss of a member that left on purpose, with all that it sent still to be read."""


class JobKnowledge:
    """Lost members, notices, rosters and answers, as a member has received them. `Member` guards it."""

    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        """Members that are gone, and why."""
        self.coordinator_host = ""
        """The host whose processes the coordinator itself can see."""
        self.rosters: dict[str, list[MemberDescription]] = {}
        """The members of each complete scope, by rank."""
        self.conflicts: dict[str, str] = {}
        """Scopes that this member cannot join, and why."""
        self.missing: dict[str, tuple[list[int], float]] = {}
        """Ranks that have not joined a scope yet, and for how many seconds they are waited for."""
        self.answers: dict[int, Any] = {}
        """Answers to this member's requests, by their number."""
        self.refused: str | None = None
        """Why this member may take no more part."""
        self.stuck: str | None = None
        """How this member and others wait for each other, without end."""
        self.generations: dict[str, Message] = {}
        """The newest generation of each elastic world, as its message has it."""
        self.running: dict[str, int] = {}
        """Elastic worlds that have begun without this member, and their sizes."""
        self.changes: dict[str, int] = {}
        """The generation of each elastic world that is to end, for which a boundary is asked for."""
        self.switches: dict[str, tuple[int, int]] = {}
        """Of such a generation, after how many steps its members stop."""
        self.recalls: dict[str, int] = {}
        """The generation of each elastic world that this member is asked to describe."""
        self.released: dict[str, int] = {}
        """The generation of each elastic world after which this member was let go, as it wanted."""
        self._notices: dict[str, dict[str, dict[str, str]]] = {}

    def notices(self, scope: str, member: str) -> dict[str, str]:
        """What a member has announced about its part in a scope: reasons by kind."""
        return self._notices.get(scope, {}).get(member, {})

    def apply(self, message: Message) -> None:
        """Take in a message of the coordinator."""
        match message["op"]:
            case "welcome":
                self.lost.update(message["lost"])
                self.coordinator_host = message["host_id"]
            case "lost":
                self.lost[message["member"]] = message["reason"]
            case "noticed":
                members = self._notices.setdefault(message["scope"], {})
                members.setdefault(message["member"], {})[message["kind"]] = message["reason"]
            case "roster":
                found = [MemberDescription.from_json(each) for each in message["members"]]
                self.rosters.setdefault(message["scope"], found)  # The first one counts.
            case "conflict":
                self.conflicts[message["scope"]] = message["reason"]
            case "missing":
                before, _ = self.missing.get(message["scope"], ([], 0.0))
                # A rank that was here and is not any more gave up because of those that never came.
                gave_up = bool(before) and set(before) < set(message["ranks"])
                self.missing[message["scope"]] = before if gave_up else message["ranks"], message["seconds"]
            case "values" | "table":
                self.answers[message["request"]] = message["values" if message["op"] == "values" else "members"]
            case "synced":
                self.answers[message["request"]] = True
            case "refused":
                self.refused = self.refused or message["reason"]
            case "stuck":
                self.stuck = message["reason"]
            case "forget":
                self._forget(message["scope"])
            case _:
                self._apply_to_world(message)

    def _apply_to_world(self, message: Message) -> None:
        """Take in a message about an elastic world, or to a launcher."""
        match message["op"]:
            case "generation":
                scope = f"{message['scope']}.{message['number']}"
                # It may come again, over another connection, after a later one.
                if message["number"] > self.generations.get(message["scope"], {"number": -1})["number"]:
                    self.rosters[scope] = [MemberDescription.from_json(each["member"]) for each in message["members"]]
                    self.generations[message["scope"]] = message
            case "running":
                self.running[message["scope"]] = message["size"]
            case "change":
                self.changes[message["scope"]] = message["number"]
            case "switch":
                self.switches[message["scope"]] = message["number"], message["steps"]
            case "recall":
                self.recalls[message["scope"]] = message["number"]
            case "released":
                self.released[message["scope"]] = message["number"]
            case "numbered":
                self.answers[message["request"]] = Numbers(
                    message["first"], message["minimum"], message["maximum"], message["present"]
                )
            case "managed":
                self.answers[message["request"]] = bool(message["done"]), message["text"]

    def _forget(self, scope: str) -> None:
        """All members have left a scope: nobody reads anything of it any more."""
        for name in [name for name in self._notices if is_inside(name, scope)]:
            del self._notices[name]
        self.rosters.pop(scope, None)
        self.missing.pop(scope, None)


def is_inside(name: str, scope: str) -> bool:
    """Whether a scope or key is a scope itself, or lies in it."""
    return f"{name}/".startswith(f"{scope}/")
