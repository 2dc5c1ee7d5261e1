"""The line that says who holds the others up: when it is printed, and what is left for the error."""

import io

import pytest

from tutti.coordination.diagnosis import HeldUp
from tutti.launch import diagnosis_line
from tutti.launch.diagnosis_line import DiagnosisLine


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def found(seconds: float, cause: str = "computing", rank: int = 1) -> tuple[HeldUp, ...]:
    return (HeldUp(rank, cause, "is in phase 'forward'", (0,), seconds),)


def test_a_cause_is_printed_again_when_its_wait_has_doubled() -> None:
    stream = io.StringIO()
    line = DiagnosisLine(stream)
    for seconds in (1.0, 1.25, 1.5, 1.75, 2.0, 3.0, 4.0):
        line.update(found(seconds))
    assert [text.split()[-2] for text in stream.getvalue().splitlines()] == ["1.0", "2.0", "4.0"]
    # Over, and found once more: that is a new cause.
    line.update(())
    line.update(found(1.0))
    assert stream.getvalue().endswith("rank 0 waits for it for 1.0 s\n")


@pytest.mark.parametrize("in_place", [True, False])
def test_on_a_terminal_the_line_is_written_over_unless_others_write_there(in_place: bool) -> None:
    stream = Terminal()
    line = DiagnosisLine(stream, in_place=in_place)
    for seconds in (1.0, 1.25, 1.5):
        line.update(found(seconds))
    line.update(())
    assert stream.getvalue().count("\r\x1b[K") == (4 if in_place else 0)
    assert stream.getvalue().count("\n") == (0 if in_place else 1)


def test_a_loss_is_reported_by_the_ranks_that_need_the_lost_one() -> None:
    stream = io.StringIO()
    DiagnosisLine(stream).update(found(2.0, "gone"))
    assert stream.getvalue() == ""


def test_an_error_comes_with_what_was_found_a_moment_before(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, now = io.StringIO(), 100.0
    monkeypatch.setattr(diagnosis_line.time, "monotonic", lambda: now)
    line = DiagnosisLine(stream)
    line.update(found(1.0))
    line.update(())  # The loss has ended the wait.
    now += 1
    line.report_failure()
    shown = stream.getvalue().splitlines()
    assert shown[-1] == "tutti: shortly before it failed: " + shown[0].removeprefix("tutti: ")
    now += 60
    line.report_failure()
    assert stream.getvalue().splitlines() == shown, "it had nothing to do with this failure"
