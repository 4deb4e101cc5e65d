"""Fast decode: optional decode steps with few kernel launches, replayed as CUDA graphs."""
