"""One parameter server: a state machine over the records of its log, and the socket in front of it."""
