"""Checkpoints that load at any partition and number of ranks: save, load, export, inspect."""
