"""Reproductions of published experiments: one folder for each, with its code, stored results and report.

`tutti reproduce NAME` runs one from a source checkout; the folder is not part of the installed package. This module
imports neither torch nor tutti, so that listing the reproductions is quick.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """An entry of the registry: what is reproduced, and which module does it."""

    folder: str
    """Name of the folder under `reproductions/`, which is also the package's name."""
    summary: str
    """The experiment, in one line."""
    source: str
    """Authors and year of the reproduced work."""
    options: frozenset[str] = frozenset()
    """Optional settings that it uses, besides `--quick` and `--name`: "data" and "rate"."""

    @property
    def run_module(self) -> str:
        """Module with `reproduce(context)`, which measures and writes results and report."""
        return f"reproductions.{self.folder}.run"

    @property
    def report_module(self) -> str:
        """Module with `report_only(folder)`, which rewrites the report from the stored results."""
        return f"reproductions.{self.folder}.report"

    @property
    def stored_folder(self) -> Path:
        """Folder with the committed results, report and figures."""
        return Path(__file__).parent / self.folder


_DATA = frozenset({"data"})

REPRODUCTIONS: dict[str, Reproduction] = {
    "allreduce-mnist": Reproduction(
        folder="allreduce_mnist",
        summary="Time and accuracy of tree, butterfly and ring all-reduce on MNIST.",
        source="Fourie 2019",
        options=frozenset({"data", "rate"}),
    ),
    "block-momentum": Reproduction(
        folder="block_momentum",
        summary="Block momentum (BMUF), model averaging and 1-bit SGD on up to 64 workers.",
        source="Chen & Huo 2016, in Kim 2016",
        options=_DATA,
    ),
    "decentralised": Reproduction(
        folder="decentralised",
        summary="Peer updates between distant sites, and gossip, without a parameter server.",
        source="Strom 2015, Lian et al. 2017",
        options=_DATA,
    ),
    "error-feedback": Reproduction(
        folder="error_feedback",
        summary="Accuracy under gradient compression, with and without error feedback.",
        source="Seide et al. 2014, Strom 2015",
        options=_DATA,
    ),
    "horovod-scaling": Reproduction(
        folder="horovod_scaling",
        summary="Ring all-reduce and parameter servers on up to 400 GPUs.",
        source="Malik et al. 2018",
    ),
    "poseidon": Reproduction(
        folder="poseidon",
        summary="Wait-free back-propagation, sufficient factors and bounded staleness.",
        source="Zhang et al. 2015, in Kim 2016",
    ),
    "staleness": Reproduction(
        folder="staleness",
        summary="Throughput and accuracy of BSP, SSP, soft synchronisation and asynchronous SGD.",
        source="Dong, Kim 2016",
        options=_DATA,
    ),
    "strads": Reproduction(
        folder="strads",
        summary="Scheduled model parallelism: Lasso and matrix factorisation.",
        source="Lee et al. 2014, Kim et al. 2016",
    ),
}
"""Reproductions by the name that `tutti reproduce` takes."""
