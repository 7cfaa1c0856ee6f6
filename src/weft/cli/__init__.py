"""The command line: thin. Each verb reads its options, calls a room, prints. torch is imported inside verbs only."""
