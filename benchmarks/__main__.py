"""All benchmarks that this machine can run: ``python -m benchmarks`` (``make bench``)."""

import sys
from collections.abc import Sequence

import torch

from benchmarks import accuracy, fidelity, kernels, memory, packing
from benchmarks.record import parser

# What a CPU can do in minutes.
_FEW = [f"--tasks={name}" for name in ("read 30 images", "read 10 clips")]


def main(arguments: Sequence[str]) -> int:
    """Memory, fidelity and accuracy; on a CPU little of the last, and no kernels."""
    parser("benchmarks", __doc__).parse_args(arguments)
    memory.main(arguments)
    fidelity.main(arguments)
    few = [] if torch.cuda.is_available() else ["--no-ablation", *_FEW]
    accuracy.main([*arguments, *few])
    if not torch.cuda.is_available():
        print("no CUDA device: benchmarks.kernels and benchmarks.packing were not run")
        return 0
    return kernels.main(arguments) or packing.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
