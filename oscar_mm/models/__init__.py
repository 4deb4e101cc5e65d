"""Models that come with the package: each name stands for a folder here and needs no network.

They are tiny; examples/train_pocket trains them for tests and demos. The README.md in each folder
says what its model can do.
"""

from pathlib import Path

BUNDLED = {
    "pocket-vl": "reads printed codes, short receipts and coloured shapes",
    "pocket-llava": "reads printed codes and short receipts",
    "pocket-omni": "hears spoken digits and a few words, reads codes, short receipts and shapes",
}
"""Name of each model, and what it can do; Qwen3-VL, LLaVA-v1.6 and Qwen3-Omni in this order."""


def bundled(model: str | Path) -> Path | None:
    """The folder of a bundled model, or None if ``model`` names none.

    A name wins over a folder of the same name in the working directory; "./pocket-vl" is that
    folder, and a ``Path`` always means a folder.
    """
    if isinstance(model, str) and model in BUNDLED:
        return Path(__file__).parent / model
    return None


def description(name: str) -> str:
    """A bundled model in a line: "pocket-vl, 5M parameters, a bundled demo model that ..."."""
    weights = Path(__file__).parent / name / "model.safetensors"
    millions = weights.stat().st_size / 2e6
    skills = f"{BUNDLED[name]}; it knows nothing else"
    return f"{name}, {millions:.0f}M parameters, a bundled demo model that {skills}"
