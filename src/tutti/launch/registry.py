"""The launchers that `tutti run --on` and `tutti.launch(on=...)` know by name."""

from tutti.errors import PluginError
from tutti.launch.elastic_run import ElasticRun
from tutti.launch.launcher import Launcher, MakeLauncher
from tutti.plugins import Registry, describe

LAUNCHERS: Registry[MakeLauncher] = Registry(
    "launcher",
    "tutti.launchers",
    {
        "local": "tutti.launch.local_launcher:on_this_machine",
        "lab": "tutti.launch.local_launcher:in_new_lab",
        "ssh": "tutti.launch.ssh.launcher:over_ssh",
        "slurm": "tutti.launch.ssh.slurm_steps:on_slurm_nodes",
    },
    callable,
    "a function of a text and a number of workers that returns a tutti.launch.launcher.Launcher",
)


def make_launcher(text: str, workers: int | ElasticRun | None) -> Launcher:
    """Make the launcher of a text NAME or NAME:OPTIONS, such as ssh:a:2,b:4. Raises `ConfigError`."""
    name, _, options = text.partition(":")
    made = LAUNCHERS.find(name)(options, workers)
    if not isinstance(made, Launcher):
        raise PluginError(
            f"the launcher '{name}' has made {describe(made)}; wanted is a {Launcher.__module__}.Launcher."
        )
    return made
