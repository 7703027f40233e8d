"""Running things: the float graph, packages, samples from disk."""
