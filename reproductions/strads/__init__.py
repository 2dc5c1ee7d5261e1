"""Lee et al. (2014), Kim et al. (2016): scheduled model parallelism."""
