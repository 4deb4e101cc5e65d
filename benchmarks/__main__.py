"""Run all short benchmarks that suit this machine: ``python -m benchmarks`` (``make bench``)."""

import sys
from collections.abc import Sequence

import torch

from benchmarks import accuracy, cpu, fidelity, kernels, memory, packing
from benchmarks.record import parser

# A CPU runs these in minutes.
_SHORT_TASKS = [f"--tasks={name}" for name in ("read 30 images", "read 10 clips")]


def main(arguments: Sequence[str]) -> int:
    """Run the short benchmarks: memory, fidelity and accuracy, and those of the kernels.

    On a CPU, only a few accuracy tasks and the benchmark of the CPU kernels run.
    """
    parser("benchmarks", __doc__).parse_args(arguments)
    memory.main(arguments)
    fidelity.main(arguments)
    short = [] if torch.cuda.is_available() else ["--no-ablation", *_SHORT_TASKS]
    accuracy.main([*arguments, *short])
    if not torch.cuda.is_available():
        print("no CUDA device: benchmarks.kernels and benchmarks.packing do not run")
        return cpu.main(arguments)
    return kernels.main(arguments) or packing.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
