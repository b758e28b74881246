"""Time: cards, networks, and a step laid on two streams."""
