"""Validation of the fields of a `Cluster`."""

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from tutti.cluster.compute import Compute, Jitter, Pauses
from tutti.cluster.hosts import Host, Tier
from tutti.cluster.link import Link
from tutti.cluster.mistakes import Mistakes, is_count, is_name, is_positive
from tutti.cluster.quantities import parse_time


def normalised(fields: Mapping[str, Any], mistakes: Mistakes) -> dict[str, Any]:
    """Return a cluster's fields in their final form; whatever is wrong is added to `mistakes`."""
    mistakes.need(is_name(fields["name"]), f"a cluster's name must be printable text, got {fields['name']!r}")
    ranks, seed = fields["ranks_per_host"], fields["seed"]
    mistakes.need(ranks is None or is_count(ranks), f"ranks_per_host must be 1 or more, got {ranks!r}")
    mistakes.need(is_count(seed, -math.inf), f"seed must be a whole number, got {seed!r}")
    jitter = fields["jitter"]
    # A plain number is the spread of log-normal jitter.
    if isinstance(jitter, (int, float)):
        jitter = mistakes.attempt(partial(Jitter, jitter))
    optional, needed = {"link": Link, "jitter": Jitter, "pauses": Pauses}, {"within": Link, "compute": Compute}
    for name, kind in (optional | needed).items():
        value = jitter if name == "jitter" else fields[name]
        fine = isinstance(value, kind) or (value is None and name in optional)
        mistakes.need(fine, f"{name} must be a {kind.__name__}, got {value!r}")
    hosts = _hosts(fields["hosts"], mistakes)
    return {
        "jitter": jitter,
        "hosts": hosts,
        "links": _links(fields["links"], hosts, mistakes),
        "tiers": _all_of(Tier, fields["tiers"], "tiers", mistakes),
        "slow": _slow(fields["slow"], mistakes),
        "failures": _failures(fields["failures"], mistakes),
    }


def pair(one: str, two: str) -> tuple[str, str]:
    """Return the names of two hosts in the order in which `links` keeps them."""
    return (one, two) if one <= two else (two, one)


def _hosts(value: Any, mistakes: Mistakes) -> int | tuple[Host, ...] | None:
    """Check a number of hosts, or hosts with different names."""
    if value is None:
        return None
    if not isinstance(value, (list, tuple)):
        mistakes.need(is_count(value), f"hosts must be 1 or more, or a tuple of Host, got {value!r}")
        return value if is_count(value) else None
    hosts = _all_of(Host, value, "hosts", mistakes)
    mistakes.need(len(value) > 0, "a cluster needs 1 host or more, got none")
    # Links name hosts, and ranks of one host are found by its name.
    names = [host.name for host in hosts]
    twice = sorted({name for name in names if names.count(name) > 1})
    mistakes.need(not twice, f"hosts' names must differ, got more than one {' and '.join(map(repr, twice))}")
    return hosts


def _all_of(kind: type, value: Any, what: str, mistakes: Mistakes) -> tuple[Any, ...]:
    """Return the entries that are of the right type; the others are mistakes."""
    if not isinstance(value, (list, tuple)):
        mistakes.need(False, f"{what} must be a tuple of {kind.__name__}, got {value!r}")
        return ()
    wrong = [part for part in value if not isinstance(part, kind)]
    mistakes.need(not wrong, f"{what} must be a tuple of {kind.__name__}, got {', '.join(map(repr, wrong))} in it")
    return tuple(part for part in value if isinstance(part, kind))


def _links(value: Any, hosts: int | tuple[Host, ...] | None, mistakes: Mistakes) -> dict[tuple[str, str], Link]:
    links: dict[tuple[str, str], Link] = {}
    for key, link in _items(value, "links", mistakes):
        if not (isinstance(key, tuple) and len(key) == 2 and all(isinstance(name, str) for name in key)):
            mistakes.need(False, f"links must be between two hosts by name, got {key!r}")
            continue
        one, two = key
        mistakes.need(isinstance(link, Link), f"between {one} and {two} must be a Link, got {link!r}")
        mistakes.need(one != two, f"links join '{one}' with itself: use within for a host's own ranks")
        # Each name once, also where a host is joined with itself.
        for name in dict.fromkeys(key):
            if not _is_there(name, hosts):
                mistakes.need(False, f"links between {one} and {two}: no host is named '{name}'{_hint(name, hosts)}")
        # A pair may be given in both orders, as long as both links are equal.
        same = links.setdefault(pair(one, two), link) == link
        mistakes.need(same, f"links between {one} and {two} differ: {links[pair(one, two)]} and {link}")
    return links


def _is_there(name: str, hosts: int | tuple[Host, ...] | None) -> bool:
    """Whether a host of that name exists, or may exist where their number is open."""
    if isinstance(hosts, tuple):
        return any(host.name == name for host in hosts)
    # Hosts that are given by their number have these names.
    match = re.fullmatch(r"host(0|[1-9][0-9]{0,8})", name)
    return match is not None and (hosts is None or int(match[1]) < hosts)


def _hint(name: str, hosts: int | tuple[Host, ...] | None) -> str:
    """The name that was probably meant, or the names there are."""
    if not isinstance(hosts, tuple):
        return f" (they are host0 to host{hosts - 1})" if hosts is not None else " (they are host0, host1, ...)"
    close = get_close_matches(name, [host.name for host in hosts], n=1)
    return f" (did you mean '{close[0]}'?)" if close else f" (they are {', '.join(host.name for host in hosts)})"


def _slow(value: Any, mistakes: Mistakes) -> dict[int, float]:
    """Return the slowness of ranks, by rank; factors that are not positive are added to `mistakes`."""
    factors = _by_rank(value, "slow", mistakes)
    for rank, factor in factors.items():
        mistakes.need(is_positive(factor), f"slow: rank {rank}'s factor must be above 0 and finite, got {factor!r}")
    return factors


def _failures(value: Any, mistakes: Mistakes) -> dict[int, float]:
    """Return the times of death in seconds, by rank, without those that cannot be read."""
    times = {}
    for rank, time in _by_rank(value, "failures", mistakes).items():
        times[rank] = mistakes.attempt(partial(parse_time, time), f"failures: rank {rank}: ")
    return {rank: seconds for rank, seconds in times.items() if seconds is not None}


def _by_rank(value: Any, what: str, mistakes: Mistakes) -> dict[int, Any]:
    """Return the entries whose keys are ranks; the others are mistakes."""
    items = _items(value, what, mistakes)
    for rank, _ in items:
        mistakes.need(is_count(rank, 0), f"{what}: a rank must be 0 or more, got {rank!r}")
    return {rank: entry for rank, entry in items if is_count(rank, 0)}


def _items(value: Any, what: str, mistakes: Mistakes) -> list[tuple[Any, Any]]:
    mistakes.need(isinstance(value, Mapping), f"{what} must be a mapping, got {value!r}")
    return list(value.items()) if isinstance(value, Mapping) else []
