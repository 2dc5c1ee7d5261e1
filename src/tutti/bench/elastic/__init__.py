"""Measurements of runs whose workers come and go: what a loss costs, whether the result stays, what readiness costs."""
