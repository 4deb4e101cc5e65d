"""Compile kernels on first use, launch them, and enable them if they agree with PyTorch."""
