"""Formats of weight matrices in 8 and 4 bits, one file each, and what products need to know."""
