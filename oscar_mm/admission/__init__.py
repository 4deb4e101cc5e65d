"""Admission: the size of requests, and the memory of GPUs and budgets."""
