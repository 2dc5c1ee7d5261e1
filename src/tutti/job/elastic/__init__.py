"""Training with workers that come and go: a job goes on with other ranks, from the state that the others have.

Modules: `regrouping` (when ranks change, and how a job goes on), `transfer` (the state that a rank takes over from
another), `positions` (who was where in the data), `void_step` (what a step that does not count must not change),
`joining` (how a new worker comes in), `ends` (how one leaves), `scalers` (a GradScaler that was not given to the job).
"""
