"""CUDA kernels: compiled at first use, launched, and enabled once they agree with PyTorch."""
