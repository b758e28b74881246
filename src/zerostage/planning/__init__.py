"""The planner: which stage, how many GPUs, how long a step takes, before the first GPU hour."""
