"""Refusals: what a client is told of errors, and what is left of them."""

import gc
import weakref

import pytest

from oscar_mm.apps.serve.refusals import Refusal, as_refusals
from oscar_mm.errors import InputError, MemoryBusy, RequestTooLarge


class Medium:
    """Decoded media, in the frames of the functions that refuse them."""


def refuse(error: Exception, medium: Medium) -> None:
    def decoded() -> Medium:
        raise KeyError(repr(medium))

    try:
        decoded()
    except KeyError:
        raise error from None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InputError("no"), 400),
        (RequestTooLarge("no", 2, 1), 400),
        (MemoryBusy("no"), 503),
        (OSError("no"), 500),
    ],
)
def test_a_refusal_keeps_no_media(error: Exception, status: int) -> None:
    medium = Medium()
    alive = weakref.ref(medium)
    gc.disable()
    try:
        with pytest.raises(Refusal) as found, as_refusals():
            refuse(error, medium)
        del medium
        assert alive() is None
    finally:
        gc.enable()
    assert found.value.status == status


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("temperature=-1.0: must be 0 or a number", "temperature"),
        ("guided_regex: cannot be served (unclosed)", "guided_regex"),
        ("response_format: cannot be served (not)", "response_format"),
        ("logit_bias={7: 200.0}: must be numbers from", "logit_bias"),
        ("include_stop_str_in_output=1: must be True or False", "include_stop_str_in_output"),
        ("messages[3].content[12]: is not an image", "messages[3].content[12]"),
        ("messages[0].content contains '<|im_end|>'", "messages[0].content"),
        ("1,025 images are more than the limit", None),
    ],
)
def test_a_refusal_names_the_field(message: str, field: str | None) -> None:
    with pytest.raises(Refusal) as found, as_refusals():
        raise InputError(message)
    assert found.value.body["error"]["param"] == field
