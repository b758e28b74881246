"""Published measurements, and how far the planner is from them."""
