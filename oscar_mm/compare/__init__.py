"""Comparison of ways to store keys and values: the same prompts, the same 16-bit answers."""
