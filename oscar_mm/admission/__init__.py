"""Admission: what a request takes, what a GPU and a budget hold."""
