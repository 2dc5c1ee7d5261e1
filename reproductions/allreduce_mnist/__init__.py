"""Fourie (2019): all-reduce algorithms on MNIST."""
