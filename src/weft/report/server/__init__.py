"""The page of a run on parameter servers: facts, curves, staleness, load of servers and workers, hot keys, events."""
