"""Support of training techniques on a mesh that splits the model, where it is not that of the mesh's strategy."""

from collections.abc import Mapping

from tutti.strategies.compatibility import Support

SUPPORT: Mapping[str, Support] = {}
"""By technique."""
