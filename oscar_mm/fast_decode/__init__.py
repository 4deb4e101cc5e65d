"""Run decode steps of supported decoders in few launches, as CUDA graphs; optional for the
cache."""
