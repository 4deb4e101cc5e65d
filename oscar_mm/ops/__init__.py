"""Operations on pages, ``torch.ops.oscar_mm``: append, decode (attention), pack, store and unpack.

Each of the modules of these names defines its operation when imported, with a CUDA kernel of csrc
on NVIDIA GPUs and PyTorch operations elsewhere.
"""
