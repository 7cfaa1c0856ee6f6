"""Frames, handshake and sockets between clients and parameter servers. No tables."""
