"""What travels between clients and parameter servers: frames, the handshake, sockets. It knows no tables."""
