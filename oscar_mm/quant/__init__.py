"""The quantization method in tensor operations: rotation, scaling by channel and token, fits."""
