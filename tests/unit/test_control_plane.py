"""Where a run's coordinator is found, what a forked child does with it, and what is shown of its secret."""

import errno
import os
import socket
import subprocess
import time
from datetime import timedelta
from typing import Any

import pytest

from tutti.coordination import Coordinator, MemberDescription, Secret
from tutti.coordination.forks import close_in_children
from tutti.coordination.link import Endpoint, connect_member
from tutti.launch import control_plane, host
from tutti.launch.diagnosis_line import DiagnosisThread
from tutti.launch.environment import RankEnvironment
from tutti.launch.run_registry import RunningRun


def test_a_second_world_with_another_timeout_uses_the_same_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TUTTI_COORDINATOR", raising=False)
    monkeypatch.setattr(control_plane, "_endpoints", {})
    served: list[socket.socket] = []
    monkeypatch.setattr(control_plane, "_serve", lambda listening, _: served.append(listening))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = RankEnvironment("hand", 0, 2, 0, "127.0.0.1", port)
    try:
        found = [control_plane._endpoint(environment, timedelta(seconds=seconds)) for seconds in (1, 2)]
    finally:
        for listening in served:
            listening.close()
    assert [each.port for each in found] == [port, port]
    assert len(served) == 1


@pytest.mark.parametrize(("local_size", "expected"), [("2", "10.0.0.7"), ("4", "127.0.1.1")])
def test_a_host_whose_own_name_is_loopback(local_size: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_size)
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    # The route to its own name is loopback, as /etc/hosts of Debian has it; the one to others is not.
    routes = {"node0": "127.0.1.1", host._ELSEWHERE: "10.0.0.7"}
    for module in (control_plane, host):
        monkeypatch.setattr(module, "address_towards", routes.__getitem__)
    assert control_plane._own_address("node0") == expected


def in_child(function: object) -> int:
    """The exit status of a forked child that calls a function: 0 if it returns True."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if function() else 1)  # type: ignore[operator]
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_the_ranks_of_its_parent() -> None:
    secret = Secret.generate()
    coordinator = Coordinator(socket.create_server(("127.0.0.1", 0)), secret, host_id="here")
    diagnosis = DiagnosisThread(coordinator)

    def ends_at_once() -> bool:
        started = time.monotonic()
        control_plane._serve_to_the_end(coordinator, diagnosis, os.getppid())
        return time.monotonic() - started < 1.0

    try:
        assert in_child(ends_at_once) == 0
    finally:
        diagnosis.close()
        coordinator.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_keeps_the_files_that_it_opens() -> None:
    opened = [close_in_children(socket.socket())]
    number = opened[0].fileno()

    def keeps() -> bool:
        file = os.open(os.devnull, os.O_RDONLY)  # Gets the number of the socket.
        opened.clear()
        return file == number and bool(os.fstat(file))

    try:
        assert in_child(keeps) == 0
    finally:
        opened[0].close()


def test_a_run_does_not_show_its_secret() -> None:
    assert "hidden" not in repr(RunningRun(1, 2, "127.0.0.1", 3, "hidden", True, 2, "train.py"))


def test_a_host_on_which_no_observer_can_be_started_takes_part(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    secret = Secret.generate()
    listening = socket.create_server(("127.0.0.1", 0))
    endpoint = Endpoint("127.0.0.1", listening.getsockname()[1])
    coordinator = Coordinator(
        listening, secret, host_id="another host", address="127.0.0.1", patience=timedelta(seconds=10)
    )
    try:
        here = MemberDescription.this_process(0, "node1", "this host")
        member = connect_member(here, endpoint, secret, timeout=timedelta(seconds=10))
        control_plane.wait_for_ranks(member, "world", 0, 1, timedelta(seconds=10))
        member.close()
    finally:
        coordinator.close()
    assert "ranks of node1 run (Resource temporarily unavailable)" in caplog.text
    assert member not in control_plane._observers
