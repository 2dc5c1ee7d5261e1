"""Mesh planning: how many ranks along data, tensor and pipe, for a model, a memory limit and a network."""

from tutti.plan.mesh.choose import MeshPlan, plan_meshes
from tutti.plan.mesh.cost import MeshPrediction, price_mesh
from tutti.plan.mesh.parts import ModelParts

__all__ = ["MeshPlan", "MeshPrediction", "ModelParts", "plan_meshes", "price_mesh"]
