"""Operations on pages, ``torch.ops.oscar_mm``: append, decode (attention), pack, store and unpack.

Importing the module of the same name defines an operation. Operations use CUDA kernels from csrc on
NVIDIA GPUs, and PyTorch operations elsewhere.
"""
