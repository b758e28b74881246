"""What a model is to the planner: its parameters by name and shape, wherever it comes from."""
