"""Tagged messages between ranks over TCP.

Modules, from the wire upwards: `frames` (byte format), `messages` (sends and receives in progress), `matching` (which
message goes to which receive), `streams` (one connection, plain or TLS), `reception` (the listening port, and who is
let in), `connections` (all connections of a rank), `connector` (reaching a peer), `messenger` (waiting, deadlines, lost
peers), `transport` (the `Transport` made of it).
"""
