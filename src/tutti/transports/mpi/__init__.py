"""MPI as a transport. Importing `tutti.transports.mpi.transport` or `works` starts MPI."""
