"""`tutti.fit`: the whole training loop in one call. `tutti.summary`: the layers of a model, and what they send."""
