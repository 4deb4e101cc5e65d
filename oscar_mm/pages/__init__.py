"""Byte format of pages: codes, scales and zero points, and the order of their elements."""
