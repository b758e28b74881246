"""Kill runs and damage checkpoints, many times: `python -m soak`."""
