"""`tutti bench pipeline`: a table of schedules, and pictures of them."""

import json
from pathlib import Path

import pytest

from command import Call, assert_refused


def test_a_table_and_pictures(call: Call, tmp_path: Path) -> None:
    """How fast it is, is the benchmark's business."""
    words = ["--schedules", "sequential,gpipe", "--width", "8", "--batch", "32", "--microbatches", "4", "--rounds", "1"]
    words += ["--fixed-time", "20"]
    ended = call("bench", "pipeline", *words, "--json", "pipeline.json", "--plot", "pictures")
    assert ended.status == 0, ended.err
    for said in (
        "2 ranks, 4 microbatches",
        "one process",
        "sequential",
        "gpipe",
        "20.0%",
        "figures written to pictures",
    ):
        assert said in ended.out
    result = json.loads((tmp_path / "pipeline.json").read_text())
    assert [row["schedule"] for row in result["rows"]] == ["sequential", "gpipe"]
    for row in result["rows"]:
        assert len(row["spans"]) == len(row["clock_spans"]) == 2 * 2 * 4
        assert 0 < row["bubble"] < 1
    drawn = {path.name for path in (tmp_path / "pictures").iterdir()}
    assert drawn == {"sequential.png", "gpipe.png", "with-and-without-measured.png", "with-and-without-modelled.png"}


REFUSED = {
    "a schedule nobody knows": (["--schedules", "gpip"], r"unknown schedule 'gpip'. Did you mean 'gpipe'"),
    "a batch that does not divide": (["--batch", "10", "--microbatches", "4"], r"--batch 10 does not divide into 4"),
}


@pytest.mark.parametrize(("words", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(words: list[str], message: str, call: Call, tmp_path: Path) -> None:
    assert_refused(call("bench", "pipeline", *words), message, tmp_path)
