"""The memory report of a conversation as JSON: numbers to share, nothing that was said or shown."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import oscar_mm
from oscar_mm.apps.demo.visitor import Visitor


def report(visitor: Visitor) -> dict[str, Any]:
    """Model, policy, memory, segments (without names) and the speed of the latest answer."""
    side, pipe = visitor.side, visitor.side.chat.pipe
    policy = asdict(pipe.policy) | {"bits": pipe.policy.bits._asdict()}
    found = {
        "oscar_mm": oscar_mm.__version__,
        "model": {"family": pipe.family.name, "fingerprint": pipe.family.fingerprint},
        "dtype": str(pipe.family.model.dtype).removeprefix("torch."),
        "device": pipe.family.device.type,
        "policy": {"preset": visitor.settings.name, **policy},
        "turns": len(side.chat.turns),
        "memory": side.memory.to_dict(),
        "segments": [
            {
                "modality": one.modality.label,
                "tokens": one.tokens,
                "bytes": one.bytes,
                "forgotten": one.forgotten,
            }
            for one in side.segments
        ],
        "timings": asdict(side.timings) if side.timings else None,
    }
    if visitor.other is not None:
        found["sixteen_bit"] = {"memory": visitor.other.memory.to_dict()}
    return found


def report_json(visitor: Visitor) -> str:
    """The same as text."""
    return json.dumps(report(visitor), indent=1, allow_nan=False)
