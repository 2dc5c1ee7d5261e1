"""Hosts as users write them for `tutti run --hosts`: a:2,b:4."""

import re
from dataclasses import dataclass

from tutti.errors import ConfigError

FORM = "such as a:2,user@b:4: hosts with the number of workers on each, 1 if none is given"

# Never with a dash in front, which ssh would take for an option.
_HOST = re.compile(r"(?:[\w.][\w.-]*@)?(?:[\w.][\w.-]*|\[[0-9a-fA-F:.%\w]+\])")


@dataclass(frozen=True)
class SshHost:
    """A host, and how many workers it gets."""

    target: str
    """The destination for ssh: a name, an address, or an alias of the user's ssh configuration; perhaps with user@."""
    num_workers: int

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.target.rpartition("@")[2]


def parse_hosts(text: str, name: str = "--hosts") -> tuple[SshHost, ...]:
    """Return the hosts of a text such as a:2,b:4. Raises `ConfigError` with every mistake in it."""
    hosts, mistakes = [], []
    for part in text.split(","):
        match = re.fullmatch(r"(.+?)(?::(-?\w*))?", part.strip())
        if match is None or not _HOST.fullmatch(match[1]):
            mistakes.append(f"'{part}' is not a host")
            continue
        count = "1" if match[2] is None else match[2]
        if not count.isdecimal() or int(count) < 1:
            mistakes.append(f"the number of workers of {match[1]} must be 1 or more, got '{count}'")
            continue
        hosts.append(SshHost(match[1].replace("[", "").replace("]", ""), int(count)))
    names = [host.name for host in hosts]
    twice = sorted({each for each in names if names.count(each) > 1})
    mistakes += [f"{each} is given twice: give it once, with all its workers" for each in twice]
    if mistakes:
        raise ConfigError(f"{name}: {'; '.join(mistakes)}. Write it {FORM}.")
    return tuple(hosts)
