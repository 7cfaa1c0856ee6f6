"""What survives a server's death: the write-ahead log and snapshots. It knows records and files, no sockets."""
