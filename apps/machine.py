"""The machine of a measurement: the name of its device, and the versions of its software."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch
import transformers

import oscar_mm

_CPU_INFO = Path("/proc/cpuinfo")


def device_name(device: str) -> str:
    """Return the name of the processor for "cpu", or of the GPU for "cuda"."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    if _CPU_INFO.is_file():
        match = re.search(r"^model name\s*:\s*(.+)$", _CPU_INFO.read_text(), re.MULTILINE)
        if match:
            return match[1].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of the software that affects the results, by name."""
    names = {
        "oscar_mm": oscar_mm.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if torch.version.cuda:
        names["cuda"] = torch.version.cuda
    return names
