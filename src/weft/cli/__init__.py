"""The command line: each verb reads its options, calls a package, prints. torch is imported inside verbs only."""
