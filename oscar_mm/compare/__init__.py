"""Compare methods of storing keys and values, on the same prompts and 16-bit answers."""
