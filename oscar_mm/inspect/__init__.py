"""Inspect the keys of a prompt in each layer, and the effect of quantizing them."""
