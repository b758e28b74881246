"""Arithmetic before the run: what each stage needs on each number of ranks."""
