"""`tutti checkpoints`: the list, verification, the export of a model, and mistakes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command import Call
from tutti.checkpoint.index import INDEX
from tutti.checkpoint.storage import Snapshot, write

load_file = pytest.importorskip("safetensors.torch").load_file


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with the checkpoints of steps 1 to 3."""
    for steps in (1, 2, 3):
        model = {"weight": torch.full((1000,), float(steps))}
        write(tmp_path / "run", Snapshot(steps=steps, model=model, strategy="ps:ssp=3", world_size=4))
    return tmp_path / "run"


def damage(file: Path) -> None:
    """Change the last byte, and not the size."""
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_the_list(call: Call, run: Path) -> None:
    (run / "step-00000002" / INDEX).write_text("{}")
    ended = call("checkpoints", "run")
    assert ended.status == 0, ended.err
    rows = [line for line in ended.out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == ["2", "3", "1"]
    assert "damaged" in rows[0]
    for words in (" UTC", "KiB", "ps:ssp=3", " 4 ", "complete"):
        assert words in rows[1], rows[1]
    assert "step 2: run/step-00000002/checkpoint.json is damaged" in ended.out


def test_verify_reads_everything(call: Call, run: Path) -> None:
    assert call("checkpoints", "run", "--verify").status == 0
    damage(run / "step-00000003" / "model.safetensors")
    assert "damaged" not in call("checkpoints", "run").out
    ended = call("checkpoints", "run", "--verify")
    assert ended.status == 1
    assert "step 3: run/step-00000003/model.safetensors is damaged" in ended.out


def test_export_of_the_newest_complete_model(call: Call, run: Path, tmp_path: Path) -> None:
    damage(run / "step-00000003" / "model.safetensors")
    ended = call("checkpoints", "run", "--to", "model.safetensors")
    assert ended.status == 0, ended.err
    assert "exported the model of run/step-00000002 to model.safetensors" in ended.out
    assert load_file(tmp_path / "model.safetensors")["weight"][0] == 2


def test_export_of_a_step(call: Call, run: Path, tmp_path: Path) -> None:
    assert call("checkpoints", "run", "--to", "model.safetensors", "--step", "1").status == 0
    assert load_file(tmp_path / "model.safetensors")["weight"][0] == 1


def test_a_file_is_replaced_only_if_asked_for(call: Call, run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    ended = call("checkpoints", "run", "--to", "mine")
    assert ended.status == 2
    assert "mine exists already. Give another file, or --overwrite" in ended.err
    assert (tmp_path / "mine").read_text() == "precious"
    assert call("checkpoints", "run", "--to", "mine", "--overwrite").status == 0
    assert load_file(tmp_path / "mine")["weight"][0] == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "run"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent"], "cannot list the checkpoints of absent: No such file"),
        (["empty"], "empty holds no checkpoints"),
        (["run/step-00000001"], r"holds no checkpoints.* It is a checkpoint itself: give .*/run\."),
        (["run", "--step", "1"], "give --to FILE too"),
        (["run", "--overwrite"], "give --to FILE too"),
        (["run", "--to", "new", "--verify"], "exclude each other"),
        (["run", "--to", "new", "--step", "7"], r"run holds no checkpoint of step 7\. Known: 3, 2, 1\."),
        (["run", "--to", "new", "--step", "2"], "the checkpoint of step 2 is damaged: .*model.safetensors"),
        (["run", "--to", "empty"], "empty is a folder. Give empty/model.safetensors"),
        (["run", "--to", "absent/new"], "cannot write absent/new: .*No such file"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes(words: list[str], message: str, call: Call, run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    damage(run / "step-00000002" / "model.safetensors")
    ended = call("checkpoints", *words)
    assert ended.status == 2, ended
    assert re.search(message, ended.err), ended.err
    assert "Traceback" not in ended.err
    assert not (tmp_path / "new").exists()


def test_the_list_imports_no_torch(run: Path) -> None:
    script = (
        "import sys; from tutti.cli import app; app(['checkpoints', sys.argv[1], '--verify'], standalone_mode=False); "
        "assert 'torch' not in sys.modules and 'safetensors' not in sys.modules"
    )
    command = [sys.executable, "-c", script, str(run)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
