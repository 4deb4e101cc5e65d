"""Refusals say what was asked, what fits and what to lower: the largest part, then the next."""

import pytest

from oscar_mm.admission.request_size import RequestSize
from oscar_mm.errors import InputError, RequestTooLarge
from oscar_mm.modality import Modality

IMAGES = [(f"{index}.png", 100 + index) for index in range(5)]


def asked(**changes) -> RequestSize:
    tokens = {"text": 20, "image": 510, "video": 0, "audio": 0} | changes.pop("tokens", {})
    return RequestSize(
        **{"tokens": tokens, "answer": 64, "media": {Modality.IMAGE: IMAGES}} | changes
    )


def test_numbers() -> None:
    error = asked(at_least=True, past=7).refusal(400, "kv_budget (9 MB of 8 MB)", "raise kv_budget")
    assert isinstance(error, RequestTooLarge) and isinstance(error, InputError)
    assert (error.asked, error.fits) == (601, 400)
    assert str(error) == (
        "at least 601 tokens are needed, over kv_budget (9 MB of 8 MB), but only 400 fit: 7 "
        "stored, image 510 (4.png: 104, 3.png: 103, 2.png: 102, ...), text 20, max_new_tokens 64; "
        "use fewer or smaller images (at least 3 of these 5 fit), or begin a new chat, or raise "
        "kv_budget"
    )


@pytest.mark.parametrize(
    ("changes", "fits", "said"),
    [
        ({"answer": 1000}, 1000, "; lower max_new_tokens to 470"),
        ({"tokens": {"text": 900}}, 1000, "; use a shorter prompt (394 tokens fit)"),
        ({"tokens": {"audio": 1000}}, 1094, "; use shorter recordings (50% of the seconds fit)"),
        ({"tokens": {"video": 1000}}, 1394, "keep fewer of their frames with video_fps (80% of"),
        ({"media": {Modality.IMAGE: IMAGES[:1]}}, 300, "; use a smaller image (216 tokens"),
        ({"past": 900, "frees": lambda: ["undo()"]}, 1000, "; undo(), begin a new chat"),
        ({"past": 900}, 1000, "; begin a new chat"),
        # The largest alone would not do.
        ({"answer": 400}, 300, "smaller images and lower max_new_tokens to 280"),
    ],
)
def test_what_to_lower(changes: dict, fits: int, said: str) -> None:
    assert str(asked(**changes).refusal(fits, "the context")).endswith(said) or (
        said in str(asked(**changes).refusal(fits, "the context"))
    )
