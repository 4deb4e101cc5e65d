"""Decode steps of known decoders in few launches, as CUDA graphs; the cache runs without."""
