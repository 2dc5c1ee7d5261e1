"""Zhang et al. (2015): wait-free back-propagation and sufficient factors."""
