"""Seide et al. (2014), Strom (2015): gradient compression with and without error feedback."""
