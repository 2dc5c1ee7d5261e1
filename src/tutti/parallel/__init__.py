"""Training that splits the model, and not only the data."""
