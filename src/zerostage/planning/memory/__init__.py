"""Memory in closed form: the operations of a step, and what an engine holds around them."""
