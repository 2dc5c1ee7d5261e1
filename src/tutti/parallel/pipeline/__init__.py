"""Pipeline parallelism: the layers of a model in stages on different ranks, and batches in microbatches."""
