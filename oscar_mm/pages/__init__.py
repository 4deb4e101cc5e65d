"""The format of bytes: pages of codes, scales and zero points, and the order of their elements."""
