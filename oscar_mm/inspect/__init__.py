"""Inspect: what a prompt's keys look like in each layer, and what quantizing them does."""
