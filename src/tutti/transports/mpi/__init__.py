"""Open MPI as a transport. Importing `tutti.transports.mpi.transport` starts MPI."""
