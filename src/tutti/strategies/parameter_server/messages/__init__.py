"""Parameter servers over messages: workers push gradients to servers and pull parameters from them.

`server/` and `worker/` say how each side works, `wire.py` has the message formats, `group.py` the set-up of both.
"""
