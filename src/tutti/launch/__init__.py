"""Starting workers, and finding out who one is."""

from tutti.launch.local import launch
from tutti.launch.rendezvous import init

__all__ = ["init", "launch"]
