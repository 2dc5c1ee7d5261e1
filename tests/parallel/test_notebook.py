"""Notebooks: what a cell defines goes to workers and comes back, errors too, and an interrupt stops the workers."""

import os
from pathlib import Path

import pytest

SETUP = """
import os, signal
from pathlib import Path
import torch
from torch import nn
import tutti

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x)

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)

x = torch.randn(64, 4)
options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "loss": loss, "workers": 2}
"""

FIT = """
data = (x, (x[:, 0] > 0).long())
history = tutti.fit(Net(), data, validation=data, metrics={"seen": lambda outputs, targets: len(targets)}, **options)
print(type(history.model) is Net, history["seen"])
"""

LAUNCH = """
class Result:
    def __init__(self, rank):
        self.rank = rank

print([type(result) is Result and result.rank for result in tutti.launch(lambda: Result(tutti.init().rank), workers=2)])

def fails():
    raise KeyError("in a cell")

try:
    tutti.launch(fails, workers=2)
except tutti.TuttiError as error:
    print(type(error).__name__, "in a cell" in str(error), "in fails" in str(error))
"""

INTERRUPT = """
class Notes:
    def on_start(self, run):
        (Path(FOLDER) / str(os.getpid())).touch()

try:
    # As the interrupt button does, when the first report has come.
    interrupt = lambda values, step: os.kill(os.getpid(), signal.SIGINT)
    tutti.fit(Net(), data, epochs=10**6, callbacks=[Notes()], logger=interrupt, **options)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.timeout(120)  # A kernel, and a fork server of its own, each import torch.
def test_cells(tmp_path: Path) -> None:
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    cells = [SETUP + f"FOLDER = {str(tmp_path)!r}", FIT, LAUNCH, INTERRUPT]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3").execute()
    printed = ["".join(each.get("text", "") for each in cell.outputs).splitlines() for cell in notebook.cells]
    assert printed[1][0].startswith("epoch 1/1: loss "), printed
    assert printed[1][-1] == "True [64]"
    assert printed[2] == ["[0, 1]", "WorkerFailed True True"]
    assert printed[3][-1] == "interrupted"
    workers = [int(path.name) for path in tmp_path.iterdir()]
    assert len(workers) == 2
    assert not any(os.path.exists(f"/proc/{pid}") for pid in workers)
