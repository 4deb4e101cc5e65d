"""All benchmarks that this machine can run: ``python -m benchmarks`` (``make bench``)."""

import sys
from collections.abc import Sequence

import torch

from benchmarks import fidelity, kernels, memory, packing
from benchmarks.record import parser


def main(arguments: Sequence[str]) -> int:
    """Memory and fidelity on the CPU, kernels where there is a CUDA device."""
    parser("benchmarks", __doc__).parse_args(arguments)
    memory.main(arguments)
    fidelity.main(arguments)
    if not torch.cuda.is_available():
        print("no CUDA device: benchmarks.kernels and benchmarks.packing were not run")
        return 0
    return kernels.main(arguments) or packing.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
