"""CUDA kernels: compiled at first use, launched, trusted where they agree with PyTorch."""
