"""`Chaos`: failures that `tutti run --chaos` causes on purpose, and the parser of its text.

A text is a list of clauses with semicolons between, in any order:

    kill RANK|any every D | at D
    stop RANK|any for D [every D | at D]
    cut host NUMBER for D [every D | at D]
    leave RANK|any every D | at D
    join every D | at D
    seed NUMBER

RANK is the place of a worker: whichever worker is there, also one that has taken the place of another. Times count
from the moment when all workers that were started train. A clause without a time is carried out then, once.
"""

import re
from dataclasses import dataclass

from tutti.cluster import parse_duration
from tutti.errors import ConfigError

ACTIONS = ("kill", "stop", "cut", "join", "leave")
_LASTING = ("stop", "cut")

FORM = 'such as "kill any every 20s; stop 2 for 3s at 10s; cut host 0 for 5s; join at 30s; leave 1 at 40s; seed 7"'


@dataclass(frozen=True)
class ChaosRule:
    """One clause: what is done, to whom and when."""

    text: str
    action: str
    target: int | None = None
    """The place of a worker, or the number of a host; None for any worker."""
    lasts_s: float | None = None
    at_s: float | None = None
    every_s: float | None = None


@dataclass(frozen=True)
class Chaos:
    """All clauses, and the seed from which random choices are drawn."""

    rules: tuple[ChaosRule, ...]
    seed: int = 0

    @classmethod
    def parse(cls, text: str) -> "Chaos":
        """Parse a text; `ConfigError` with every mistake in it."""
        clauses = [" ".join(clause.split()) for clause in text.split(";") if clause.strip()]
        mistakes: list[str] = []
        rules, seeds = [], []
        for clause in clauses:
            if clause.split()[0] == "seed":
                seeds.append(_seed(clause, mistakes))
            elif (rule := _rule(clause, mistakes)) is not None:
                rules.append(rule)
        if len(seeds) > 1:
            mistakes.append("the seed is given twice")
        if not clauses:
            mistakes.append("nothing is given")
        elif not rules and not mistakes:
            mistakes.append("a seed alone does nothing")
        if mistakes:
            raise ConfigError(f"--chaos: {'; '.join(mistakes)}. Write it {FORM}.")
        return cls(tuple(rules), seeds[0] if seeds else 0)

    def check(self, workers: int, restarts: int, hosts: int) -> None:
        """Raise one `ConfigError` with everything that cannot be done in a run.

        Args:
            workers: number of workers that are started.
            restarts: how many are started in place of lost ones.
            hosts: number of hosts of the lab; 0 without one.
        """
        mistakes = []
        for rule in self.rules:
            if rule.action == "cut":
                if not hosts:
                    mistakes.append(f"'{rule.text}': only hosts of a lab can be cut off (--lab hosts=2)")
                elif rule.target is not None and rule.target >= hosts:
                    mistakes.append(f"'{rule.text}': the hosts are 0 to {hosts - 1}")
            elif rule.target is not None and rule.target >= workers:
                mistakes.append(f"'{rule.text}': the run starts workers 0 to {workers - 1}")
        if self._may_end_all(workers, restarts):
            mistakes.append("this could leave no worker at all: allow more restarts (--restarts), or end fewer workers")
        if mistakes:
            raise ConfigError(f"--chaos: {'; '.join(dict.fromkeys(mistakes))}.")

    def _may_end_all(self, workers: int, restarts: int) -> bool:
        """Whether all workers may be gone for good at some time. Workers that leave are never replaced."""
        counted = [rule for rule in self.rules if rule.action == "leave" or (rule.action == "kill" and not restarts)]
        if any(rule.target is None and rule.every_s is not None for rule in counted):
            return True
        places = {rule.target for rule in counted if rule.target is not None}
        return len(places) + sum(rule.target is None for rule in counted) >= workers


def _seed(clause: str, mistakes: list[str]) -> int:
    match = re.fullmatch(r"seed (\d{1,18})", clause)
    if match is None:
        mistakes.append(f"'{clause}': a seed is a whole number of 0 or more")
    return int(match[1]) if match else 0


def _rule(clause: str, mistakes: list[str]) -> ChaosRule | None:
    """Parse a clause; None after a note in `mistakes`."""
    action, *words = clause.split()
    before = len(mistakes)
    if action not in ACTIONS:
        mistakes.append(f"'{clause}': '{action}' is not one of {', '.join((*ACTIONS, 'seed'))}")
        return None
    target = _target(clause, action, words, mistakes)
    times = _times(clause, words, mistakes)
    if len(mistakes) == before:
        if "at" in times and "every" in times:
            mistakes.append(f"'{clause}': give 'at' or 'every', not both")
        if action in _LASTING and "for" not in times:
            mistakes.append(f"'{clause}': say for how long, such as 'for 3s'")
        if action not in _LASTING:
            if "for" in times:
                mistakes.append(f"'{clause}': '{action}' does not last, so leave 'for' out")
            if not times.keys() & {"at", "every"}:
                mistakes.append(f"'{clause}': say when, such as 'at 10s' or 'every 10s'")
    if len(mistakes) > before:
        return None
    return ChaosRule(clause, action, target, times.get("for"), times.get("at"), times.get("every"))


def _target(clause: str, action: str, words: list[str], mistakes: list[str]) -> int | None:
    """Take the words that say whom a clause is about; return the number, or None for any or nobody."""
    if action == "join":
        return None
    if action == "cut":
        if words[:1] != ["host"]:
            mistakes.append(f"'{clause}': say which host, such as 'cut host 0 for 5s'")
            return None
        words.pop(0)
    elif words[:1] == ["any"]:
        words.pop(0)
        return None
    if not words or not words[0].isdecimal():
        wanted = "the number of a host" if action == "cut" else "the number of a worker, or any"
        got = f"'{words[0]}'" if words else "nothing"
        mistakes.append(f"'{clause}': {action} needs {wanted}, got {got}")
        if words and words[0] not in ("at", "every", "for"):
            words.pop(0)
        return None
    return int(words.pop(0))


def _times(clause: str, words: list[str], mistakes: list[str]) -> dict[str, float]:
    """Parse what follows: at, every and for, each with a duration."""
    times: dict[str, float] = {}
    while words:
        name = words.pop(0)
        if name not in ("at", "every", "for"):
            mistakes.append(f"'{clause}': '{name}' is not one of at, every, for")
            return times
        if not words:
            mistakes.append(f"'{clause}': '{name}' needs a duration, such as 10s")
            return times
        if name in times:
            mistakes.append(f"'{clause}': '{name}' is given twice")
        try:
            times[name] = parse_duration(words.pop(0), f"'{clause}': {name}").total_seconds()
        except ConfigError as error:
            mistakes.append(str(error).rstrip("."))
    return times
