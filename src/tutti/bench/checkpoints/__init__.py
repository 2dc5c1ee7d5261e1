"""`tutti bench checkpoints`: are runs that are killed continued as if nothing had happened, and what does that cost?

training  a small run that checkpoints every few steps, and records the samples of every step
kills     such runs, killed at random moments and continued, until they end
records   what runs left: which samples their committed steps have used
cost      training time with and without a checkpoint a minute; the copy; the size of the files
resume    time to the first step, with and without a checkpoint, beside reading its files
writing   the rate at which a large state is written, beside dd
"""
