"""TOML files of clusters: reading with every mistake in one error, and writing."""

import json
import tomllib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tutti.cluster.check import pair
from tutti.cluster.cluster import Cluster
from tutti.cluster.compute import Compute, Jitter, Pauses
from tutti.cluster.hosts import Host, Tier
from tutti.cluster.link import Link
from tutti.cluster.mistakes import Mistakes, is_name
from tutti.cluster.presets import PRESETS
from tutti.cluster.quantities import format_rate, format_speed, format_time, parse_rate, parse_speed, parse_time
from tutti.errors import ConfigError, UnknownName

_NO_LINK = "none"
"""The text in a file for `link=None`: TOML has no null."""


_OWN = 'A cluster of your own is a TOML file, such as one with the line link = { rate = "100mbit", latency = "100us" }'


def load(text: str | Path) -> Cluster:
    """Return a preset by its name, or the cluster that a TOML file describes."""
    if text in PRESETS:
        return PRESETS[str(text)]
    try:
        if Path(text).is_dir():
            raise ConfigError(f"{text} is a folder, not a cluster's TOML file.")
        if not Path(text).exists():
            # What looks like a path is a missing file; anything else is more likely a misspelt preset.
            if isinstance(text, Path) or "/" in text or text.endswith(".toml"):
                raise ConfigError(f"there is no file {text}. Presets: {', '.join(PRESETS)}.")
            raise UnknownName("preset or file", text, PRESETS, [_OWN])
        return read(Path(text).read_text(encoding="utf-8"), str(text))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{text} cannot be read: {error}.") from error


def read(text: str, source: str) -> Cluster:
    """Return the cluster that a file's text describes. Raises one `ConfigError` with every mistake in it."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source} is not TOML: {error}.") from error
    mistakes = Mistakes()
    _check_keys(table, (*_PLAIN, *_PARTS), "", mistakes)
    fields = {key: table[key] for key in _PLAIN if key in table}
    for key, (name, part) in _PARTS.items():
        if key in table and (value := part(table[key], key, mistakes)) is not _REFUSED:
            fields[name] = value
    # A number of hosts and a list of them would contradict each other.
    mistakes.need(not {"hosts", "host"} <= table.keys(), "give either hosts or [[host]], not both")
    # Made even after mistakes, from the parts that are right: it reports what is wrong with those.
    cluster = mistakes.attempt(partial(Cluster, **fields))
    mistakes.report(f"{source}:")
    assert cluster is not None
    return cluster


def write(cluster: Cluster) -> str:
    """Return the text of a file that is read as this cluster."""
    # TOML allows plain keys of the file only before its first table: they all come first.
    lines = [f"name = {_text(cluster.name)}"]
    lines += [f"{key} = {getattr(cluster, key)}" for key in ("ranks_per_host", "seed") if getattr(cluster, key)]
    lines += [f"hosts = {cluster.hosts}"] if isinstance(cluster.hosts, int) else []
    lines.append(f"link = {_text(_NO_LINK) if cluster.link is None else _inline(_link_keys(cluster.link))}")
    lines.append(f"within = {_inline(_link_keys(cluster.within))}")
    if cluster.jitter is not None:
        lines.append(f"jitter = {_inline({'spread': cluster.jitter.spread, 'shape': _text(cluster.jitter.shape)})}")
    if cluster.pauses is not None:
        times = {"every": _time(cluster.pauses.every_s), "length": _time(cluster.pauses.length_s)}
        lines.append(f"pauses = {_inline(times)}")
    lines += _table("[compute]", _compute_keys(cluster.compute))
    lines += _table("[slow]", cluster.slow) if cluster.slow else []
    failures = {rank: _time(seconds) for rank, seconds in cluster.failures.items()}
    lines += _table("[failures]", failures) if failures else []
    for host in cluster.hosts if isinstance(cluster.hosts, tuple) else ():
        lines += _table("[[host]]", _host_keys(host))
    for tier in cluster.tiers:
        keys = {"size": tier.size, "oversubscription": tier.oversubscription, "latency": _time(tier.latency_s)}
        lines += _table("[[tier]]", keys)
    for (one, two), link in cluster.links.items():
        lines += _table("[[between]]", {"hosts": f"[{_text(one)}, {_text(two)}]", **_link_keys(link)})
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class _Form:
    """The form of a table: its keys, the arguments that they stand for, and the keys that it needs."""

    make: Callable[..., Any]
    arguments: Mapping[str, str]
    needed: Mapping[str, Any] = field(default_factory=dict)
    """Needed keys, with a stand-in for each, so that the rest of a table is checked even if they are missing."""

    def read(self, table: Any, where: str, mistakes: Mistakes) -> Any:
        """Make the part that a table describes; `_REFUSED`, with the reasons in `mistakes`, if that is not possible."""
        if not isinstance(table, dict):
            mistakes.need(False, f"{where} must be a table with {', '.join(self.arguments)}, got {table!r}")
            return _REFUSED
        # An unknown key is an error: a misspelt one would change nothing, and nobody would notice.
        _check_keys(table, self.arguments, f"{where}: ", mistakes)
        missing = [key for key in self.needed if key not in table]
        mistakes.need(not missing, f"{where} needs {' and '.join(missing)}")
        completed = {**self.needed, **table}
        arguments = {self.arguments[key]: value for key, value in completed.items() if key in self.arguments}
        made = mistakes.attempt(partial(self.make, **arguments), f"{where}: ")
        # Made from a stand-in, it served to check the other keys only.
        return _REFUSED if made is None or missing else made


def _path(hosts: Any, rate: Any, latency: Any = 0.0) -> tuple[tuple[str, str], Link | None]:
    """Return the two hosts and the link of a [[between]] table."""
    mistakes = Mistakes()
    two = isinstance(hosts, list) and len(hosts) == 2 and all(isinstance(name, str) for name in hosts)
    mistakes.need(two, f'hosts must be two names, such as ["host0", "host1"], got {hosts!r}')
    link = mistakes.attempt(partial(Link, rate, latency))
    mistakes.report()
    return pair(*hosts), link


_REFUSED = object()
"""Marks a part that could not be made."""

_LINK = _Form(Link, {"rate": "rate", "latency": "latency"}, {"rate": 1.0})
_HOST = _Form(Host, {"name": "name", "ranks": "ranks", "link": "link", "speed": "speed"}, {"name": "?"})
_TIER = _Form(Tier, {"size": "size", "oversubscription": "oversubscription", "latency": "latency_s"}, {"size": 2})
_COMPUTE = _Form(Compute, {"flops": "flops", "sample": "sample_s", "step": "step_s", "forward": "forward"})
_PATH = _Form(_path, {"hosts": "hosts", "rate": "rate", "latency": "latency"}, {"hosts": ["?", "?"], "rate": 1.0})
_JITTER = _Form(Jitter, {"spread": "spread", "shape": "shape"}, {"spread": 0.0})
_PAUSES = _Form(Pauses, {"every": "every_s", "length": "length_s"}, {"every": 1.0, "length": 1.0})


def _read_link(value: Any, where: str, mistakes: Mistakes) -> Any:
    """Read the common link, or that there is none."""
    return None if value == _NO_LINK else _LINK.read(value, where, mistakes)


def _read_jitter(value: Any, where: str, mistakes: Mistakes) -> Any:
    """Read jitter as a plain number, which `Cluster` takes for a spread, or as a table."""
    return value if isinstance(value, (int, float)) else _JITTER.read(value, where, mistakes)


def _read_hosts(value: Any, where: str, mistakes: Mistakes) -> Any:
    """Read the [[host]] tables, each perhaps with a link of its own."""
    hosts = []
    for location, table in _tables(value, where, mistakes):
        keys = dict(table)
        if "link" in keys and (link := _LINK.read(keys.pop("link"), f"{location} link", mistakes)) is not _REFUSED:
            keys["link"] = link
        host = _HOST.read(keys, location, mistakes)
        if host is _REFUSED and is_name(keys.get("name")):  # So that links which name it are still checked.
            host = Host(name=keys["name"])
        hosts += [] if host is _REFUSED else [host]
    return tuple(hosts) if hosts or value == [] else _REFUSED


def _read_tiers(value: Any, where: str, mistakes: Mistakes) -> Any:
    """Read the [[tier]] tables, from the hosts up."""
    tiers = [_TIER.read(table, location, mistakes) for location, table in _tables(value, where, mistakes)]
    return tuple(tier for tier in tiers if tier is not _REFUSED)


def _read_between(value: Any, where: str, mistakes: Mistakes) -> Any:
    """Read the [[between]] tables: paths of two hosts by name."""
    links: dict[tuple[str, str], Link] = {}
    for location, table in _tables(value, where, mistakes):
        if (path := _PATH.read(table, location, mistakes)) is not _REFUSED:
            names, link = path
            mistakes.need(names not in links, f"{location}: {names[0]} and {names[1]} are joined before")
            links[names] = link
    return links


def _read_by_rank(value: Any, where: str, mistakes: Mistakes) -> Any:
    """Read a table whose keys are ranks. `Cluster` checks its values."""
    if not isinstance(value, dict):
        mistakes.need(False, f"{where} must be a table by rank, got {value!r}")
        return _REFUSED
    # At most nine digits, so that no text makes a number of thousands of digits.
    # TOML keys are texts. Only canonical decimals count, so that "1" and "01" cannot name the same rank.
    ranks = [key for key in value if key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key]
    for key in (key for key in value if key not in ranks):
        mistakes.need(False, f"{where}: {key!r} is not a rank")
    return {int(key): value[key] for key in ranks}


_PLAIN = ("name", "hosts", "ranks_per_host", "seed")
_PARTS: dict[str, tuple[str, Callable[[Any, str, Mistakes], Any]]] = {
    "link": ("link", _read_link),
    "within": ("within", _LINK.read),
    "compute": ("compute", _COMPUTE.read),
    "jitter": ("jitter", _read_jitter),
    "pauses": ("pauses", _PAUSES.read),
    "slow": ("slow", _read_by_rank),
    "failures": ("failures", _read_by_rank),
    "host": ("hosts", _read_hosts),
    "tier": ("tiers", _read_tiers),
    "between": ("links", _read_between),
}
"""Keys of tables and arrays: the cluster's field, and the function that reads it."""


def _check_keys(table: dict[str, Any], known: Collection[str], where: str, mistakes: Mistakes) -> None:
    """Add every unknown key to `mistakes`, with the known one that is most like it."""
    for key in (key for key in table if key not in known):
        mistakes.need(False, where + str(UnknownName("key", key, known)).rstrip("."))


def _tables(value: Any, where: str, mistakes: Mistakes) -> list[tuple[str, dict[str, Any]]]:
    """Return the tables of an array, each with its name for error messages."""
    if not (isinstance(value, list) and all(isinstance(table, dict) for table in value)):
        mistakes.need(False, f"{where} must be [[{where}]] tables, got {value!r}")
        return []
    return [(f"[[{where}]] {number}", table) for number, table in enumerate(value, 1)]


def _link_keys(link: Link) -> dict[str, Any]:
    return {"rate": _exact(link.bits_per_s, format_rate, parse_rate), "latency": _time(link.latency_s)}


def _host_keys(host: Host) -> dict[str, Any]:
    keys = {"name": _text(host.name), "ranks": host.ranks, "speed": host.speed}
    keys["link"] = None if host.link is None else _inline(_link_keys(host.link))
    return {key: value for key, value in keys.items() if value is not None}


def _compute_keys(compute: Compute) -> dict[str, Any]:
    keys = {"flops": _exact(compute.flops, format_speed, parse_speed), "step": _time(compute.step_s)}
    keys |= {} if compute.sample_s is None else {"sample": _time(compute.sample_s)}
    return {**keys, "forward": compute.forward}


def _time(seconds: float) -> str:
    return _exact(seconds, format_time, parse_time)


def _exact(value: float, form: Callable[[float], str], parse: Callable[[str], float]) -> str:
    """Return a value with a unit where that is read as the same number again, else as a plain number."""
    # Printed values are rounded to four digits. A file must be read as the same cluster, to the bit.
    text = form(value)
    return _text(text) if parse(text) == value else repr(value)


def _text(text: str) -> str:
    """A text as TOML has it: JSON's escapes are valid in TOML's basic strings."""
    return json.dumps(text, ensure_ascii=False)


def _table(head: str, keys: Mapping[Any, Any]) -> list[str]:
    return ["", head, *(f"{key} = {value}" for key, value in keys.items())]


def _inline(keys: Mapping[str, Any]) -> str:
    return f"{{ {', '.join(f'{key} = {value}' for key, value in keys.items())} }}"
