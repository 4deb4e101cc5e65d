"""Check a model's quality, speed and memory by page format, on the machine of whoever has it."""
