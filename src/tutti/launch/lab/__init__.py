"""The lab: hosts on one Linux machine, as network namespaces with shaped links."""

from tutti.launch.lab.lab import Lab, lab

__all__ = ["Lab", "lab"]
