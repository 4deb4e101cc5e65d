"""Turns of few new tokens over a long past: on a CPU they read it from its packed pages."""

from pathlib import Path

import pytest

from oscar_mm.cache import layer as layer_module
from oscar_mm.cache import paged_attention
from tests.engine.engine import loaded
from tests.prompts import noise


@pytest.mark.daily("standard")
@pytest.mark.parametrize("policy", ["standard", "compact", "channel"])
def test_answers_are_those_over_the_unpacked_past(
    qwen3_vl_folder: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, found = loaded(qwen3_vl_folder, policy), []
    options = {"max_new_tokens": 6, "temperature": 0}
    for most in (None, 0):
        with monkeypatch.context() as patched:
            if most is not None:
                patched.setattr(paged_attention, "max_total_tokens", lambda *_: 0)
            with pipe.chat() as chat:
                chat.tell("What?", "It is far to the station, and no bus goes there. " * 60)
                if most is None:
                    patched.setattr(layer_module.OscarLayer, "parts", lambda *_: 1 / 0)
                asked = ({"images": [noise(32, 64)]}, {}, {"images": [noise(64, 32, 1)]})
                found.append([chat.ask("And?", **shown, **options).token_ids for shown in asked])
    assert found[0] == found[1]
    assert all(len(tokens) == 6 for tokens in found[0])
