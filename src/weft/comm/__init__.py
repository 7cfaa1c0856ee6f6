"""Communication: process groups, observers of collectives, traffic. No knowledge of models or plans."""
