"""Simulated ranks that come and go: the elastic code of real runs, over messages and clocks of a simulation.

Modules: `coordinator` (the real state of a coordinator, and the time that messages to and from it take), `member` (a
rank's view of it), `world` (how a rank joins, and its transports), `launcher` (starts ranks, replaces lost ones, causes
failures).
"""
