"""Benchmarks, each of which prints a table with its bounds and records it with its command line."""
