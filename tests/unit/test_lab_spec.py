"""What a lab is asked for, and who owns which, without making one."""

import os

import pytest

from tutti.errors import ConfigError
from tutti.launch.lab import namespaces, ownership
from tutti.launch.lab.lab import LabSpec, lab, shaping
from tutti.launch.lab.ownership import Claim


def test_whole_text() -> None:
    spec = LabSpec.parse("hosts=4,rate=1gbit,ranks=2,latency=1ms")
    assert spec == LabSpec(rates=(1e9,) * 4, latency_s=1e-3, ranks_per_host=2)
    assert (spec.hosts, spec.num_workers) == (4, 8)


def test_defaults() -> None:
    assert LabSpec.parse("hosts=2") == LabSpec(rates=(1e9, 1e9))


def test_a_rate_for_each_host() -> None:
    assert LabSpec.parse("hosts=3, rate=1gbit/100mbit/2.5gbit").rates == (1e9, 1e8, 2.5e9)


@pytest.mark.parametrize("text", ["hosts=4,rate=1gbit,ranks=2,latency=1ms", "hosts=2,rate=1gbit/100mbit,ranks=1"])
def test_prints_as_the_text_that_makes_it(text: str) -> None:
    assert str(LabSpec.parse(text)) == text


MISTAKES = {
    "hosts=0": "hosts must be from 1 to 250, got '0'",
    "hosts=251": "hosts must be from 1 to 250, got '251'",
    "hosts=two": "hosts must be from 1 to 250, got 'two'",
    "hosts": "hosts must be from 1 to 250, got ''",
    "ranks=0": "ranks per host must be 1 or more, got '0'",
    "rate=fast": "'fast' is not a rate: write a number and a unit",
    "rate=0mbit": "a rate must be above 0",
    "hosts=3,rate=1gbit/1gbit": "2 rates for 3 hosts: give one rate, or one for each host",
    "latency=late": "'late' is not a time",
    "speed=1gbit": r"unknown 'speed' \(known: hosts, rate, ranks, latency\)",
    "hosts=2,hosts=3": "'hosts' is given twice",
}


@pytest.mark.parametrize(("text", "message"), MISTAKES.items(), ids=MISTAKES)
def test_mistakes(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        LabSpec.parse(text)
    assert "Write it such as hosts=4,rate=1gbit,ranks=2,latency=1ms" in str(caught.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        LabSpec.parse("hosts=0,rate=fast,ranks=0,latency=late,speed=1")
    for part in ("hosts must be", "'fast'", "ranks per host must be", "'late'", "unknown 'speed'"):
        assert part in str(caught.value)


def test_a_function_makes_the_same_mistakes() -> None:
    with pytest.raises(ConfigError, match=r"hosts must be from 1 to 250, got '2\.5'; ranks per host .* got '-1'"):
        lab(2.5, ranks_per_host=-1)  # type: ignore[arg-type]


def test_links_are_shaped_by_their_rate() -> None:
    assert shaping("eth0", 1e9) == ["qdisc add dev eth0 root tbf rate 1000000000bit burst 62500 limit 12500000"]
    assert shaping("eth0", 1e6) == ["qdisc add dev eth0 root tbf rate 1000000bit burst 6056 limit 262144"]


def test_delay_is_in_front_of_the_bucket() -> None:
    first, second = shaping("eth0", 1e8, 2e-3)
    assert first == "qdisc add dev eth0 root handle 1: netem delay 2000us limit 1390"
    assert second.startswith("qdisc add dev eth0 parent 1:1 handle 10: tbf rate 100000000bit")


# --- what is lacking ---


def test_tools_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    message = namespaces.missing()
    assert message is not None
    assert "ip and tc in PATH (install the package iproute2)" in message
    assert "\n" not in message
    with pytest.raises(ConfigError, match="install the package iproute2"):
        lab()


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    assert namespaces.missing() == "the lab needs Linux's network namespaces, and this is Darwin."


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "root (run it with sudo)" in str(namespaces.missing())


# --- names ---


def test_names_say_whose_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    mine, other = Claim.mine("a-1-2"), Claim("b", 2**22 + 1, 7)
    there = ["tutti-host0", "else", mine.host(10), mine.switch, mine.host(9), other.host(0), "tutti-b-x-1-host0"]
    monkeypatch.setattr(namespaces, "names", lambda: there)
    assert ownership.existing() == [mine, other]
    assert mine.namespaces() == [mine.host(9), mine.host(10), mine.switch]
    assert mine.alive
    assert not other.alive
    assert not Claim("a", os.getpid(), mine.started + 1).alive, "a process number that is used again"


def test_names_that_cannot_be() -> None:
    if (lacking := namespaces.missing()) is not None:
        pytest.skip(lacking)
    with pytest.raises(ConfigError, match=r"a lab's name is up to 64 letters.*got '\.\./x'"):
        lab(name="../x")
