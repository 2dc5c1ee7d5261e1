"""`tutti.fit` with processes that it starts: from scripts, with lambdas, elastic, stopped, and their failures."""

import json
import os
import signal
import subprocess
import textwrap
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
import warm
from command import Call
from tutti.errors import ConfigError, WorkerFailed
from tutti.fit.callbacks import Run
from tutti.recipes import digits

DIGITS = digits().data(None)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def test_results_come_back_to_this_process() -> None:
    """Of a local function, a lambda, an optimiser of the model: nothing of it has a name that workers could import."""
    reports: list[tuple[dict[str, Any], int]] = []
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    options = {
        "validation": DIGITS.test,
        "metrics": {"right": lambda outputs, targets: (outputs.argmax(1) == targets).sum()},
    }
    history = tutti.fit(
        model,
        DIGITS.train,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.functional.cross_entropy,
        epochs=2,
        workers=2,
        logger=lambda values, step: reports.append((values, step)),
        **options,
    )
    assert history.model is model
    assert all(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    inputs = torch.stack([DIGITS.test[i][0] for i in range(len(DIGITS.test))])
    targets = torch.stack([DIGITS.test[i][1] for i in range(len(DIGITS.test))])
    assert history[-1].metrics["right"] == int((model(inputs).argmax(1) == targets).sum())
    assert [values["right"] for values, _ in reports if "right" in values] == history["right"]


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    """Workers do not run it: what it defines comes to them by value."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import torch
        from torch import nn
        import tutti

        print("only once")

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(4, 2)

            def forward(self, x):
                return self.layer(x)

        def loss(outputs, targets):
            return nn.functional.cross_entropy(outputs, targets)

        x = torch.randn(64, 4)
        history = tutti.fit(Net, (x, (x[:, 0] > 0).long()), optimizer=torch.optim.Adam, loss=loss, workers=2)
        print(len(history), type(history.model) is Net)
        """)
    )
    ended = subprocess.run([*warm.python(), str(script)], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    lines = ended.stdout.splitlines()
    assert (lines[0], lines[-1], lines.count("only once")) == ("only once", "1 True", 1)


def test_an_error_in_a_worker_is_shown_with_its_traceback() -> None:
    def fail(run: Run) -> None:
        raise KeyError("my callback")

    with pytest.raises(WorkerFailed, match="my callback") as error:
        tutti.fit(
            network(), DIGITS.train, optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), workers=2, callbacks=[fail]
        )
    assert "in fail" in error.value.traceback


def test_what_cannot_be_sent_is_named() -> None:
    lock = threading.Lock()
    options = {"optimizer": torch.optim.SGD, "loss": nn.CrossEntropyLoss(), "workers": 2}
    with pytest.raises(ConfigError, match="callbacks cannot be sent to workers"):
        tutti.fit(network(), DIGITS.train, callbacks=[lambda run: lock.locked()], **options)


class Dies:
    """The second worker ends in the middle of an epoch, or of an evaluation."""

    def __init__(self, when: str) -> None:
        self.when = when

    def on_start(self, run: Run) -> None:
        if self.when == "evaluation" and run.job.world.transport.world_rank == 1:
            run.model.register_forward_pre_hook(lambda module, inputs: None if module.training else os._exit(3))

    def on_step(self, run: Run) -> None:
        if self.when == "epoch" and run.steps == 5 and run.job.world.transport.world_rank == 1:
            os._exit(3)


@pytest.mark.parametrize("when", ["epoch", "evaluation"])
def test_a_run_goes_on_without_a_lost_worker(when: str) -> None:
    options = {"optimizer": partial(torch.optim.SGD, lr=0.1), "loss": nn.CrossEntropyLoss(), "epochs": 2, "seed": 3}
    options |= {"validation": _doubled(DIGITS.test), "metrics": ["accuracy"], "batch_size": 64}
    undisturbed, model = network().double(), network().double()
    wanted = tutti.fit(undisturbed, _doubled(DIGITS.train), **options)
    history = tutti.fit(model, _doubled(DIGITS.train), callbacks=[Dies(when)], workers=(1, 2), **options)
    for one, other in zip(model.parameters(), undisturbed.parameters(), strict=True):
        assert bool(((one - other).abs() < 1e-10).all())
    assert history["accuracy"] == wanted["accuracy"]


def _doubled(data: Any) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*[data[i] for i in range(len(data))], strict=True)
    return torch.stack(inputs).double(), torch.stack(targets)


SCRIPT = """
import sys
import torch
from torch import nn
import tutti
from tutti.recipes import digits

torch.manual_seed(1)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

def ready(run):
    if run.steps == 40:
        print("ready", flush=True)
    if run.steps > 40 and sys.argv[2] == "slow":
        import time; time.sleep(0.05)

class Ready:
    on_step = staticmethod(ready)

history = tutti.fit(model, digits().data(None).train, optimizer=torch.optim.SGD, loss=nn.CrossEntropyLoss(), epochs=3,
    workers=eval(sys.argv[3]), checkpoint=sys.argv[1], callbacks=[Ready()])
print("steps", [epoch.steps for epoch in history])
"""


@pytest.mark.parametrize("workers", ["2", "None"])
def test_ctrl_c_saves_and_the_next_call_continues(tmp_path: Path, workers: str) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "run"
    script.write_text(SCRIPT)
    command = [*warm.python(), str(script), str(folder)]
    with subprocess.Popen(
        [*command, "slow", workers], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert any("ready" in line for line in process.stdout)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=40)
        finally:
            process.kill()
    assert "KeyboardInterrupt" in err
    (saved,) = folder.glob("step-*/checkpoint.json")
    steps = json.loads(saved.read_text())["index"]["steps"]
    assert 40 <= steps < 135
    ended = subprocess.run([*command, "fast", workers], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "steps [45, 90, 135]"


def test_under_tutti_run(tmp_path: Path, call: Call) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    ended = call("run", "--workers", "2", str(script), str(tmp_path / "run"), "fast", "None")
    assert ended.status == 0, ended.err
    assert ended.out.count("steps [45, 90, 135]") == 2
    assert ended.out.count("epoch 3/3") == 1
    ended = call("run", "--workers", "2", str(script), str(tmp_path / "run"), "fast", "2")
    assert ended.status != 0
    assert "leave workers out" in ended.err
