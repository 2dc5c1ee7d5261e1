"""Layers split over ranks, on torch's DTensor."""
