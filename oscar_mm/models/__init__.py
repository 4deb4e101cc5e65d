"""Models that come with the package: a name stands for a folder here, and needs no network.

They are tiny, trained by examples/train_pocket for tests and demos; the README.md in each folder
says what it can do.
"""

from pathlib import Path

BUNDLED = {
    "pocket-vl": "reads printed codes, short receipts and coloured shapes",
    "pocket-llava": "reads printed codes and short receipts",
    "pocket-omni": "hears spoken digits and a few words, and reads codes and short receipts",
}
"""Names, and what each model can do; Qwen3-VL, LLaVA-v1.6 and Qwen3-Omni in this order."""


def bundled(model: str | Path) -> Path | None:
    """The folder of a bundled model, or None if ``model`` is no name of one.

    A name wins over a folder in the working directory that is called the same: that one is
    reached as "./pocket-vl", and a ``Path`` always means a folder.
    """
    if isinstance(model, str) and model in BUNDLED:
        return Path(__file__).parent / model
    return None
