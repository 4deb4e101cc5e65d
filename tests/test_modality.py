"""Modality ids and spans."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oscar_mm.modality import PADDING, MediumSpan, Modality, Span, spans_of, token_modalities

IDS = SimpleNamespace(image_token_id=90, video_token_id=91, audio_token_id=92)


def test_spans() -> None:
    ids = [PADDING, PADDING, 0, 1, 1, 1, PADDING, 1, 0, 3]
    assert spans_of(ids) == [
        Span(Modality.TEXT, 2, 1),
        Span(Modality.IMAGE, 3, 3),
        Span(Modality.IMAGE, 7, 1),
        Span(Modality.TEXT, 8, 1),
        Span(Modality.AUDIO, 9, 1),
    ]
    assert spans_of([]) == spans_of([PADDING]) == []
    assert spans_of(torch.tensor([2, 2], dtype=torch.int8)) == [Span(Modality.VIDEO, 0, 2)]
    with pytest.raises(ValueError, match="4"):
        spans_of([0, 4])


@given(st.lists(st.sampled_from([PADDING, *Modality]), max_size=80))
def test_spans_round_trip(ids: list[int]) -> None:
    spans = spans_of(ids)
    restored = [PADDING] * len(ids)
    for span in spans:
        assert span.length > 0
        restored[span.start : span.stop] = [span.modality] * span.length
    assert restored == ids
    for one, other in pairwise(spans):
        assert one.stop < other.start or one.modality != other.modality


def test_labels_are_the_names_of_policies() -> None:
    assert [modality.label for modality in Modality] == ["text", "image", "video", "audio"]


def test_from_token_ids() -> None:
    ids = torch.tensor([[0, 90, 90, 5, 91], [92, 7, 7, 90, 7]])
    found = token_modalities(ids, config=IDS)
    assert found.tolist() == [[0, 1, 1, 0, 2], [3, 0, 0, 1, 0]]
    assert found.dtype == torch.int8 and found.device.type == "cpu"
    assert token_modalities(ids).tolist() == torch.zeros(2, 5).tolist()
    only_images = SimpleNamespace(image_token_id=90, video_token_id=None)
    assert token_modalities(ids, config=only_images).tolist() == [[0, 1, 1, 0, 0], [0, 0, 0, 1, 0]]


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64])
def test_from_the_processor(dtype: torch.dtype) -> None:
    ids = torch.full((1, 4), 90)
    given_ids = torch.tensor([[0, 1, 2, 3]], dtype=dtype)
    found = token_modalities(ids, config=IDS, mm_token_type_ids=given_ids)
    assert found.tolist() == [[0, 1, 2, 3]]
    found.zero_()
    assert given_ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_padding(dtype: torch.dtype) -> None:
    ids = torch.tensor([[90, 90, 5], [5, 90, 5]])
    mask = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    expected = [[PADDING, 1, 0], [0, 1, PADDING]]
    assert token_modalities(ids, config=IDS, attention_mask=mask).tolist() == expected
    types = torch.tensor([[1, 1, 0], [0, 1, 0]])
    assert token_modalities(ids, mm_token_type_ids=types, attention_mask=mask).tolist() == expected


@pytest.mark.parametrize("bad", [-1, 4, 255, 256, 257, 1 << 40])
def test_ids_out_of_range(bad: int) -> None:
    """Also those that a cast to int8 would make valid."""
    with pytest.raises(ValueError, match="mm_token_type_ids must be 0"):
        token_modalities(torch.zeros(1, 2), mm_token_type_ids=torch.tensor([[0, bad]]))


def test_shape_mismatch() -> None:
    with pytest.raises(ValueError, match=r"\(1, 3\).*\(1, 2\)"):
        token_modalities(torch.zeros(1, 2), mm_token_type_ids=torch.zeros(1, 3))


def test_no_tokens() -> None:
    empty = torch.zeros(1, 0, dtype=torch.int64)
    assert token_modalities(empty, mm_token_type_ids=empty).shape == (1, 0)


def test_medium_span() -> None:
    span = MediumSpan(Modality.VIDEO, "clip.mp4", 3, 10, "ab")
    assert span.tokens == 7
    assert span.shifted(5) == MediumSpan(Modality.VIDEO, "clip.mp4", 8, 15, "ab")
