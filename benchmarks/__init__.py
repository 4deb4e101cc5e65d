"""Benchmarks: each prints a table with its bounds and records it with its command line."""
