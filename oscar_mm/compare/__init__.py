"""Comparison of methods that store keys and values, on the same prompts and 16-bit answers."""
