"""The quantization method in tensor operations: rotation, balancing, token scaling and fits."""
