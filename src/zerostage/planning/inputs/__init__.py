"""What the planner is told by files and machines: configurations in use, cards, measured speeds."""
