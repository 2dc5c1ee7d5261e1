"""Benchmarks: Tutti beside its peers, interleaved in one run, so that noise affects all of them alike."""
