"""Measurements: a table, the command that made it, and the bound it is held against."""
