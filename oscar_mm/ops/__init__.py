"""Operations on pages, ``torch.ops.oscar_mm``: pack, append, decode (attention) and unpack.

Each of the modules of these names defines its operation when it is imported, with a kernel of csrc
on NVIDIA GPUs and by PyTorch operations elsewhere.
"""
