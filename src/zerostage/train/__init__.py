"""The command's trainer: configuration, data, the loop, and the start of the ranks."""
