"""A model's layers in stages, one after the other, on different ranks."""
