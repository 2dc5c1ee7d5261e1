"""Parameter servers on one host: parameters live in memory that all ranks share."""
