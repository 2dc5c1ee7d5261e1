"""`summary`: the layers of a model."""


def summary(model, example=None):
    raise NotImplementedError
