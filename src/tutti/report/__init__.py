"""Figures of measurements and of simulated runs."""
