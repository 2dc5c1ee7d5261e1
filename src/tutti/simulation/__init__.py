"""Virtual time: simulated ranks are threads of one process, of which one runs at a time, over a modelled network.

- `engine`: the event queue, and the control over which rank's thread runs. Start reading here.
- `rank`, `rank_thread`, `waits`, `polling`: one rank: its clock, its thread, how it waits and polls.
- `work`: work under way, and operations that advance in the background.
- `transport`, `channel`, `mailboxes`, `messages`: sending and receiving.
- `network`: pipes and routes of a cluster. `shared_memory`: sums within one host.
- `compute_clock`, `workload`, `operator_clock`: how long computing takes.
- `time_account`: what each rank spent its time on. `deadlock`: the error when all wait.
- `randomness`: random generators per rank. `guard`: nothing leaves the process.
- `sizes`, `dry_replica`: dry runs, with sizes in place of tensors.
- `runs/`: whole simulations: `simulate`, `scaling`, `dry_run`, `calibrate`, `time_to_accuracy`.

This package imports nothing by itself, because its parts belong to different layers: `sizes` is used by transports,
`runs` uses the whole library.
"""
