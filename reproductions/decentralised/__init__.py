"""Strom (2015), Lian et al. (2017): training without a parameter server."""
