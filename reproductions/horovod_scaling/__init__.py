"""Malik et al. (2018): ring all-reduce and parameter servers on up to 400 GPUs."""
