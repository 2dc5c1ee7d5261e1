"""Shared memory between the ranks of one host. Importing its modules imports numba, which is slow.

`segments` maps memory, `flags` are counters to wait for, `counters` the page of a channel, `all_reduce` the reductions,
`reduction` their kernels, `liveness` the detection of lost ranks, `transport` the `Transport` made of it. `rounds` and
`slots` exchange data for the torch backend and for pipelines.
"""
