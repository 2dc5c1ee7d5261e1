"""Dong, Kim (2016): staleness of parameter servers."""
