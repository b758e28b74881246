"""Memory by simulation: the engine itself on fake tensors."""
