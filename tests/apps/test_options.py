"""The key of a server, from a file or the environment; the threads of tiny models."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oscar_mm.apps.options import KEY_VARIABLE, api_key, model_or_bundled
from oscar_mm.errors import InputError

ROOT = Path(__file__).parents[2]


def test_key_from_a_file_or_the_environment(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert api_key(None) is None
    monkeypatch.setenv(KEY_VARIABLE, "from-environment")
    assert api_key(None) == "from-environment"
    file = tmp_path / "key"
    file.write_text("from-file\n")
    assert api_key(file) == "from-file"
    for wrong in ("", "two keys", "k" * 5000):
        file.write_text(wrong)
        with pytest.raises(InputError, match="key: must contain one key"):
            api_key(file)
    monkeypatch.setenv(KEY_VARIABLE, "")
    with pytest.raises(InputError, match=f"{KEY_VARIABLE}: must contain one key"):
        api_key(None)


@pytest.mark.parametrize(
    ("model", "chosen", "expected"),
    [
        ("pocket-vl", None, "1"),
        (None, None, "1"),
        ("pocket-vl", "7", "7"),
        ("oscar_mm/models/pocket-vl", None, None),
    ],
)
def test_threads_of_models(model, chosen, expected, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", chosen or "")
    if chosen is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    model_or_bundled(model)
    assert os.environ.get("OMP_NUM_THREADS") == expected


@pytest.mark.slow
def test_threads_are_chosen_before_torch_is_there() -> None:
    """As `oscar-mm ask` does it: it looks at the media before it looks at the model."""
    program = (
        "from oscar_mm.apps.options import by_kind, model_or_bundled\n"
        "by_kind(['examples/media/receipt.jpg', 'examples/media/counter.mp4'])\n"
        "model_or_bundled('pocket-vl')\n"
        "import torch; print(torch.get_num_threads())"
    )
    free = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=free, capture_output=True, text=True
    )
    assert done.stdout == "1\n", done.stderr
