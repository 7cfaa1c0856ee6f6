"""Memory per rank, term by term: parameters, activations, the timeline of a step, recompute by budget."""
