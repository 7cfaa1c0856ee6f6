"""The write-ahead log and snapshots of a server: records and files, no sockets."""
