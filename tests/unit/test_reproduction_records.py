"""Results of reproductions: dataclasses to JSON and back, with validation; the common form of reports."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

from reproductions.records import RecordError, from_json, load, save, to_json
from reproductions.report import PaperClaim, Report, Section, prose, table


class CurvePoint(NamedTuple):
    epoch: float
    loss: float


@dataclass(frozen=True)
class Inner:
    name: str
    seconds: dict[str, float]
    pair: tuple[int, float] = (0, 0.0)
    points: tuple[CurvePoint, ...] = ()


@dataclass(frozen=True)
class Outer:
    rows: tuple[Inner, ...]
    histogram: dict[int, int]
    note: str | None = None
    quick: bool = False


RECORD = Outer(
    rows=(Inner("a", {"ring": 1.0}, (1, 2.5), (CurvePoint(1.0, 2.0),)), Inner("b", {})), histogram={3: 4}, note="x"
)


def test_a_record_survives_the_file(tmp_path: Path) -> None:
    save(RECORD, tmp_path / "results.json")
    assert load(Outer, tmp_path / "results.json") == RECORD
    assert len((tmp_path / "results.json").read_text().splitlines()) == 2 + 3 + 2 + 2, "a row has a line of its own"


def test_whole_numbers_are_floats_too() -> None:
    assert from_json(Inner, {"name": "a", "seconds": {"ring": 1}}) == Inner("a", {"ring": 1.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": [{"name": "a"}]}, r"value\.rows\[0\]: Inner lacks seconds"),
        ({"extra": 1}, r"value: Outer has no field extra; known: rows, histogram"),
        ({"note": 3}, r"value\.note: expected a str, got 3"),
        ({"quick": 1}, r"value\.quick: expected a bool, got 1"),
        ({"histogram": {"x": 1}}, r"value\.histogram: expected a whole number as key"),
        ({"histogram": {"1": True}}, r"value\.histogram\.1: expected a whole number, got True"),
        ({"rows": [{"name": "a", "seconds": {}, "points": [[1]]}]}, r"points\[0\]: expected a list of 2"),
        ({"rows": {}}, r"value\.rows: expected a list"),
        ({"rows": [{"name": "a", "seconds": {}, "pair": [1]}]}, r"rows\[0\]\.pair: expected a list of 2"),
    ],
)
def test_other_forms_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(RecordError, match=message):
        from_json(Outer, {**to_json(RECORD), **change})


def test_a_file_that_is_not_json(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(RecordError, match=r"results\.json is not JSON"):
        load(Outer, tmp_path / "results.json")


def test_the_common_form_of_reports(tmp_path: Path) -> None:
    report = Report(
        name="x",
        title="T",
        source="S",
        machine="M",
        links="L",
        time="virtual",
        quick=True,
        introduction=["I\n  am."],
        criteria="C",
        claims=[PaperClaim("faster", "2 ×", "3 ×", False, "other links"), PaperClaim("a", "b", "c", None)],
        sections=[Section("More", [table(("a", "b"), [("1", "2")], 1), ""])],
        limits=["None."],
    )
    text = report.write(tmp_path)
    assert (tmp_path / "report.md").read_text() == text
    assert text.startswith("# T\n\n|  |  |\n| --- | --- |\n| **Source** | S |\n")
    assert "quick form" in text
    assert "I am.\n" in text
    assert "| faster | 2 × | 3 × | **differs**: other links |\n| a | b | c | undecided |" in text
    assert "## More\n\n| a | b |\n| --- | ---: |\n| 1 | 2 |\n\n## Limits\n\nNone.\n" in text
    assert prose(" a\n b ") == "a b"
