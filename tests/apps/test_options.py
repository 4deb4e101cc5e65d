"""The key of a server, from a file or the environment."""

import pytest

from oscar_mm.apps.options import KEY_VARIABLE, api_key
from oscar_mm.errors import InputError


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
