"""The lab: emulated hosts on one Linux machine, as network namespaces with shaped links.

How it works. Each host is a network namespace with one virtual Ethernet link to the switch, a namespace with a
bridge. Both ends of a link are shaped to the host's rate (`tc tbf`); the sender's end also delays packets if there is
a latency. Nothing is made in the machine's own namespace and the switch leads nowhere else, so no traffic can leave
the machine.

A lab exists from its constructor to `close`, the end of its `with` block, or the end of its object. Only the process
that made it removes it: a forked copy of the object does nothing. If that process is killed, the namespaces stay,
their names show that their owner is gone, and the next lab that starts removes them (`tutti.launch.lab.ownership`).
"""

import os
import re
import socket
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from types import TracebackType

from tutti.cluster import format_rate, format_time, parse_rate, parse_time
from tutti.errors import ConfigError
from tutti.launch.lab import namespaces
from tutti.launch.lab.namespaces import batch, missing
from tutti.launch.lab.ownership import NAME, Claim, claiming
from tutti.launch.lab.placement import PlacementHost, ProcessPlacement

MAX_HOSTS = 250
"""Number of addresses in the lab's network, less those of the switch and the network itself."""

MIN_RATE, MAX_RATE = 1e5, 1e11
"""Bits per second that `tc tbf` can shape with packets of this size."""

SWITCH = "10.77.0.254"
"""Address of the switch, where the store of a run listens."""

FORM = "such as hosts=4,rate=1gbit,ranks=2,latency=1ms; rate=1gbit/100mbit/1gbit/1gbit gives each host its own"

_KEYS = ("hosts", "rate", "ranks", "latency")

_VARIABLES = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"), "eth0")
"""Variables that name the interface of a host. Torch would look for that of this machine's own name otherwise."""

# Headers of frames leave 95.6 % of the rate to the payload (1448 of 1514 bytes), acknowledgements of what comes the
# other way 2 % less. What fits in the bucket travels at no cost after a pause, so it should be small; but packets that
# do not fit are cut up by the kernel one by one, and at 1 Gbit/s and both ways that takes more than two cores have. So
# packets are kept to 16 KiB, and the bucket to 0.5 ms of the rate. A ring of 4 hosts then reaches 93 to 95 % of
# 100 Mbit/s and of 1 Gbit/s; buckets of 0.15 ms and packets of 8 KiB gave 83 %, of 0.5 ms and 64 KiB 52 %.
_FRAMES = "mtu 1500 gso_max_size 16384"
_BURST_S, _MIN_BURST_BYTES = 0.5e-3, 4 * 1514
# The queue before it: with 100 ms no packet was lost by one sender, by two to one receiver, or by a host to one ten
# times slower.
_QUEUE_S, _MIN_QUEUE_BYTES = 0.1, 256 * 1024

_NETWORK = "10.77.0.0/24"

_counter = count()


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """Number of hosts, and rate and latency of their links."""

    rates: tuple[float, ...]
    """Bits per second of each host's link, in each direction."""
    latency_s: float = 0.0
    """Seconds from any host to any other, one way, beside the time that the rate costs."""
    ranks_per_host: int = 1
    """Number of workers on each host."""

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return len(self.rates)

    @property
    def num_workers(self) -> int:
        """Number of workers on all hosts."""
        return self.hosts * self.ranks_per_host

    @classmethod
    def parse(cls, text: str) -> "LabSpec":
        """Parse a text such as `hosts=4,rate=1gbit,ranks=2,latency=1ms`; `ConfigError` with every mistake in it."""
        if not text.strip():
            raise ConfigError(f"a lab needs a description, {FORM}.")
        pairs = [part.partition("=") for part in text.split(",") if part.strip()]
        given = {key.strip(): value.strip() for key, _, value in pairs}
        mistakes = [f"unknown '{key}' (known: {', '.join(_KEYS)})" for key in given if key not in _KEYS]
        keys = [key.strip() for key, _, _ in pairs]
        # Looked up in the list, because a dict keeps only the last of two.
        mistakes += [f"'{key}' is given twice" for key in given if keys.count(key) > 1]
        rate = given.get("rate", "1gbit").split("/")
        counts = (given.get("hosts", "2"), given.get("ranks", "1"))
        return _checked(counts, rate, given.get("latency"), mistakes)

    def __str__(self) -> str:
        rates = self.rates if len(set(self.rates)) > 1 else self.rates[:1]
        text = f"hosts={self.hosts},rate={'/'.join(map(format_rate, rates))},ranks={self.ranks_per_host}"
        return f"{text},latency={format_time(self.latency_s)}" if self.latency_s else text


def lab(
    hosts: int = 2,
    rate: str | float | Sequence[str | float] = "1gbit",
    *,
    latency: str | float | None = None,
    ranks_per_host: int = 1,
    name: str | None = None,
) -> "Lab":
    """Make hosts on this machine, for `tutti.launch(function, on=...)`. Needs Linux and root.

    Args:
        rate: of every host's link in bits a second, such as "100mbit"; or a sequence, one for each host.
        latency: one way between any two hosts, such as "1ms"; needs a kernel with netem.
        ranks_per_host: how many workers `launch` puts on each.
        name: what `tutti lab list` shows; a living lab's name cannot be taken again.

    The hosts exist until `close`, or the end of a `with`; those that a killed process left go when the next lab starts.
    """
    rates = [rate] if isinstance(rate, (str, int, float)) else list(rate)
    return Lab(_checked((hosts, ranks_per_host), rates, latency, []), name)


class Lab:
    """Emulated hosts, which exist until the lab is closed."""

    def __init__(self, spec: LabSpec, name: str | None = None) -> None:
        if (lacking := missing()) is not None:
            raise ConfigError(lacking)
        self.spec = spec
        # Process and counter: two labs of one process, or of two, never have the same name.
        self.name = name if name is not None else f"lab{os.getpid()}.{next(_counter)}"
        if not re.fullmatch(NAME, self.name):
            raise ConfigError(f"a lab's name is up to 64 letters, digits, '.', '_' and '-'; got '{self.name}'.")
        with claiming(self.name) as claim:
            # Before the first namespace is made, so that whatever was made of it is removed when the rest fails.
            self._remove = weakref.finalize(self, _remove, claim)
            try:
                _build(claim, spec)
            except BaseException:
                self.close()
                raise
        self._placement = ProcessPlacement(
            tuple(PlacementHost(f"host{number}", claim.host(number)) for number in range(spec.hosts)),
            spec.ranks_per_host,
            PlacementHost("switch", claim.switch),
            SWITCH,
            _VARIABLES,
        )

    @property
    def placement(self) -> ProcessPlacement:
        """Placement of ranks on the hosts; `ConfigError` if the lab is closed."""
        if not self._remove.alive:
            raise ConfigError(f"the lab '{self.name}' is closed: make a new one.")
        return self._placement

    def close(self) -> None:
        """Kill all processes on the hosts and remove the hosts."""
        self._remove()

    def __enter__(self) -> "Lab":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def address(host: int) -> str:
    """Address of a host in the lab's network."""
    return f"10.77.0.{host + 1}"


def _checked(
    counts: tuple[str | int, str | int], rates: Sequence[str | float], latency: str | float | None, mistakes: list[str]
) -> LabSpec:
    """Build a `LabSpec` from unchecked values; raise one `ConfigError` with every mistake."""
    hosts = _whole(counts[0], "hosts", MAX_HOSTS, mistakes)
    ranks = _whole(counts[1], "ranks per host", None, mistakes)
    # Everything is looked at before anything is raised, so that the user sees all mistakes at once.
    numbers, latency_s = [], 0.0
    for rate in rates:
        try:
            numbers.append(parse_rate(rate))
            if not MIN_RATE <= numbers[-1] <= MAX_RATE:
                limits = f"from {format_rate(MIN_RATE)} to {format_rate(MAX_RATE)}"
                mistakes.append(f"a lab's rate is {limits}, got '{rate}'")
        except ConfigError as error:
            mistakes.append(str(error).rstrip("."))
    if hosts is not None and len(rates) not in (1, hosts):
        mistakes.append(f"{len(rates)} rates for {hosts} hosts: give one rate, or one for each host")
    try:
        latency_s = parse_time(latency or 0.0)
    except ConfigError as error:
        mistakes.append(str(error).rstrip("."))
    if mistakes or hosts is None or ranks is None:
        raise ConfigError(f"invalid lab: {'; '.join(mistakes)}. Write it {FORM}.")
    # One rate for all hosts is repeated; one for each is taken as it is.
    return LabSpec(rates=tuple(numbers * (hosts // len(numbers))), latency_s=latency_s, ranks_per_host=ranks)


def _whole(value: str | int, what: str, most: int | None, mistakes: list[str]) -> int | None:
    """Return a whole number from 1 to `most`, or None after a note in `mistakes`."""
    try:
        number = int(value)
    except ValueError:
        number = 0
    # 1.5 is no number of hosts, though `int` would take it.
    if not isinstance(value, str) and number != value:
        number = 0
    if number < 1 or (most is not None and number > most):
        mistakes.append(f"{what} must be {f'from 1 to {most}' if most else '1 or more'}, got '{value}'")
        return None
    return number


def _build(claim: Claim, spec: LabSpec) -> None:
    """Make the namespaces, connect them to the switch and shape their links."""
    hosts = [claim.host(number) for number in range(spec.hosts)]
    # One call of `ip` for all: each process costs some milliseconds, and a lab may have 250 hosts.
    batch("ip", (f"netns add {name}" for name in (claim.switch, *hosts)))
    _name_hosts(claim, spec)
    if spec.latency_s:
        _need_netem(claim)
    lines = ["link set lo up", "link add br0 type bridge", f"address add {SWITCH}/24 dev br0", "link set br0 up"]
    for number, host in enumerate(hosts):
        end = f"port{number}"
        lines.append(f"link add {end} {_FRAMES} type veth peer name eth0 {_FRAMES} netns {host}")
        lines.append(f"link set {end} master br0 up")
    batch("ip", lines, claim.switch)
    ports = (shaping(f"port{number}", rate) for number, rate in enumerate(spec.rates))
    batch("tc", chain.from_iterable(ports), claim.switch)
    for number, host in enumerate(hosts):
        batch("ip", ("link set lo up", f"address add {address(number)}/24 dev eth0", "link set eth0 up"), host)
        # What leaves the host is shaped here, and what comes to it at the switch's port above.
        batch("tc", shaping("eth0", spec.rates[number], spec.latency_s), host)
        with suppress(ConfigError):  # A kernel without cubic does as it does.
            batch("ip", (f"route replace {_NETWORK} dev eth0 congctl cubic",), host)


def _name_hosts(claim: Claim, spec: LabSpec) -> None:
    """Give every host's name an address on all of them; on each, the machine's own name means that host."""
    addresses = {claim.switch: SWITCH, **{claim.host(number): address(number) for number in range(spec.hosts)}}
    # Mapped to IPv6 as well: torch asks for both, and complains aloud about an address without a name.
    known = [(own, name.rpartition("-")[2]) for name, own in addresses.items()]
    lines = "".join(f"{own} {name}\n::ffff:{own} {name}\n" for own, name in known)
    for name, own in addresses.items():
        namespaces.write_hosts(name, f"127.0.0.1 localhost\n{lines}{own} {socket.gethostname()}\n")


def shaping(device: str, bits_per_s: float, latency_s: float = 0.0) -> list[str]:
    """Commands for `tc` that shape one end of a link.

    A packet passes two shaped ends on its way, the sender's and the switch's; it is delayed at the first only.
    """
    burst = max(_MIN_BURST_BYTES, int(bits_per_s / 8 * _BURST_S))
    queue = max(_MIN_QUEUE_BYTES, int(bits_per_s / 8 * _QUEUE_S))
    bucket = f"tbf rate {bits_per_s:.0f}bit burst {burst} limit {queue}"
    if not latency_s:
        return [f"qdisc add dev {device} root {bucket}"]
    # netem drops what its queue does not hold: it must hold a whole latency of the rate in packets of 64 bytes, the
    # smallest frames.
    packets = 1000 + int(bits_per_s / 8 * latency_s / 64)  # All that are on their way, however small.
    delay = f"netem delay {latency_s * 1e6:.0f}us limit {packets}"
    return [f"qdisc add dev {device} root handle 1: {delay}", f"qdisc add dev {device} parent 1:1 handle 10: {bucket}"]


def _need_netem(claim: Claim) -> None:
    """Raise `ConfigError` if the kernel cannot delay packets, found by trying in the switch's namespace."""
    try:
        batch("tc", ["qdisc add dev lo root netem delay 1ms", "qdisc del dev lo root"], claim.switch)
    except ConfigError as error:
        raise ConfigError(
            "latency needs netem, which this kernel does not have (module sch_netem). Run without latency, or on "
            f"another kernel. ({error})"
        ) from error


def _remove(claim: Claim) -> None:
    """Remove all namespaces of a lab, if this process made it."""
    if claim.pid != os.getpid():  # A forked child has the object, but not the lab.
        return
    try:
        namespaces.remove(claim.namespaces())
    finally:  # Also when the user presses Ctrl-C again meanwhile.
        namespaces.remove(claim.namespaces())
