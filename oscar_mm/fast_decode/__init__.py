"""Decode steps of supported decoders in few launches, as CUDA graphs; the cache works without
them."""
