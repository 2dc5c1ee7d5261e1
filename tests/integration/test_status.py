"""`tutti status` on running jobs, and the errors of wrong secrets and identities."""

import json
import os
import re
from contextlib import closing
from datetime import timedelta
from pathlib import Path

import pytest

from command import Call
from started_by_hand import Process, Run, run
from tutti.coordination import MemberDescription, Secret
from tutti.coordination import link as links
from tutti.coordination.description import start_time
from tutti.coordination.link import Endpoint, connect_member
from tutti.errors import ConfigError, EnvironmentConflict, TuttiError
from tutti.launch.control_plane import listener
from tutti.launch.control_settings import find_secret
from tutti.launch.run_registry import RunningRun, announce


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Runs of others on this machine are not seen."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


def announced(job: Run, pid: int) -> None:
    """As a launcher announces its run; the coordinator here has a process of its own."""
    announce(RunningRun(pid, start_time(pid), "127.0.0.1", job.port, job.secret, True, 2, "train.py"))


def test_a_running_job(call: Call) -> None:
    with run(2) as job:
        job.ranks[0].line("step")  # It waits for its input, and rank 1 for it.
        announced(job, job.coordinator.pid)
        shown = call("status")
        assert shown.status == 0, shown.err
        assert "train.py, 2 workers" in shown.out
        assert str(job.ranks[0].pid) in shown.out
        with_stack = call("status", "--stack", "0")
        assert "stack of rank 0:" in with_stack.out
        assert "readline" in with_stack.out
        rows = json.loads(call("status", "--json").out)
        assert [row["rank"] for row in rows] == [0, 1]
        assert [row["pid"] for row in rows] == [rank.pid for rank in job.ranks]
        unknown = call("status", "--stack", "9")
        assert unknown.status == 2
        assert "needs a rank of this run, got 9. Ranks: 0, 1." in unknown.err
        # A second run: the user has to say which.
        announced(job, os.getpid())
        several = call("status")
        assert several.status == 2
        assert "several runs are under way" in several.err
        assert call("status", str(os.getpid())).status == 0


def test_nothing_runs(call: Call) -> None:
    ended = call("status")
    assert ended.status == 2
    assert "no run of this user is under way" in ended.err
    assert "there is no run with launcher 7. Known: none" in call("status", "7").err


# --- who may not take part ---


@pytest.fixture
def served() -> tuple[Process, Endpoint, str]:  # type: ignore[misc]
    secret = os.urandom(16).hex()
    with closing(Process("coordinator.py", "0", TUTTI_SECRET=secret)) as process:
        _, pid, port = process.line("coordinator")
        process.pid = int(pid)
        yield process, Endpoint("127.0.0.1", int(port)), secret


def refused(endpoint: Endpoint, secret: str) -> TuttiError:
    with pytest.raises(TuttiError) as failed:
        connect_member(
            MemberDescription.this_process(1, "here", "here"), endpoint, Secret(secret), timeout=timedelta(seconds=10)
        )
    return failed.value


def test_another_secret(served: tuple[Process, Endpoint, str]) -> None:
    error = refused(served[1], "a secret that nobody gave us")
    assert isinstance(error, ConfigError)
    assert re.search(r"rank 1: the coordinator at 127.0.0.1:\d+ has another secret.*set TUTTI_SECRET", str(error))


def test_another_version(served: tuple[Process, Endpoint, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.tutti, "__version__", "0.0.1")
    error = refused(served[1], served[2])
    assert isinstance(error, EnvironmentConflict)
    assert "it runs Tutti 0.0.1, and the coordinator of this job runs" in str(error)
    assert "install the same version on every host" in str(error)


def test_two_processes_as_one_rank(served: tuple[Process, Endpoint, str]) -> None:
    _, endpoint, secret = served
    members = [
        connect_member(
            MemberDescription.this_process(0, "here", "here"), endpoint, Secret(secret), timeout=timedelta(seconds=10)
        )
        for _ in range(2)
    ]
    try:
        assert members[0].join("world", 0, 2, 0.05) is None, "it waits for the other rank"
        with pytest.raises(EnvironmentConflict, match="two processes say they are rank 0 of 2"):
            members[1].join("world", 0, 2, 10)
    finally:
        for member in members:
            member.close()


def test_secret_files(tmp_path: Path) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    made = find_secret(environment)
    assert find_secret(environment) == made, "it is made once"
    file = tmp_path / "tutti" / "secret"
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"others can read the secret in .* \(mode 644\).*chmod 600"):
        find_secret(environment)
    with pytest.raises(ConfigError, match="a secret needs 16 characters or more, got 5"):
        find_secret({"TUTTI_SECRET": "short"})
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be kept in"):
        find_secret({"XDG_CONFIG_HOME": str(tmp_path / "file")})


def test_an_address_of_another_host() -> None:
    with pytest.raises(EnvironmentConflict, match=r"192\.0\.2\.1 is an address of another: set MASTER_ADDR"):
        listener("192.0.2.1", 0)
