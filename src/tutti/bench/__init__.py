"""Benchmarks: Tutti beside its peers, interleaved in one run, so that a noisy machine is noisy to all of them."""
