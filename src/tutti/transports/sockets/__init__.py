"""TCP sockets: tagged messages between ranks of different hosts."""
