"""Memory of GPUs by name."""

from __future__ import annotations

GPUS = {
    "RTX 4090": 24,
    "RTX 5090": 32,
    "L40S": 48,
    "A100": 80,
    "H100": 80,
    "H200": 141,
    "B200": 180,
}
"""Memory in 10^9 bytes."""
