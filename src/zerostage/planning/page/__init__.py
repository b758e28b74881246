"""The answer as one self-contained page."""
