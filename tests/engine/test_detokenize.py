"""Pieces of an answer: whole characters that join to the tokenizer's text, without stop strings."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from oscar_mm.engine.detokenizer import Detokenizer
from tests.tiny import qwen_tokenizer

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)
BYTE_LEVEL = qwen_tokenizer(500)


def byte_fallback() -> PreTrainedTokenizerBase:
    """Tokenizer with byte fallback, as Llama's and Mistral's: words, and bytes for other text."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["\u2581", "a", "b", "\u2581the", "\u2581sign", "\u2581\u2581", "\u6f22", "."]
    vocab = {token: place for place, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


BYTE_FALLBACK = byte_fallback()


def pieces(
    tokenizer: PreTrainedTokenizerBase, tokens: list[int], stop: tuple[str, ...] = ()
) -> tuple[list[str], Detokenizer]:
    text, given_out = Detokenizer(tokenizer, stop), []
    for token in tokens:
        given_out.append(text.push(token))
        if text.stopped:
            break
    given_out.append(text.finish())
    return given_out, text


def decoded(tokenizer: PreTrainedTokenizerBase, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True)


@settings(max_examples=300, deadline=None)
@given(TEXT)
@example("\N{REPLACEMENT CHARACTER}")
@example("a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}")
@example("\U0001f469\u200d\U0001f469\u200d\U0001f467")
@example("e\u0301\n\n  \t x")
def test_any_text(text: str) -> None:
    tokens = BYTE_LEVEL(text)["input_ids"]
    given_out, _ = pieces(BYTE_LEVEL, tokens)
    assert "".join(given_out) == decoded(BYTE_LEVEL, tokens)


def test_a_stop_text_at_an_end_within_a_character() -> None:
    tokens = BYTE_LEVEL("a\u20ac")["input_ids"][:-1]
    given_out, text = pieces(BYTE_LEVEL, tokens, stop=("\ufffd",))
    assert "".join(given_out) == "a" and text.stopped


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), max_size=20))
def test_any_tokens(tokens: list[int]) -> None:
    """A model may generate parts of characters, invalid UTF-8 and special tokens."""
    given_out, _ = pieces(BYTE_LEVEL, tokens)
    assert "".join(given_out) == decoded(BYTE_LEVEL, tokens)


@settings(max_examples=300, deadline=None)
@given(TEXT, st.lists(st.sampled_from([1, 2, 259, 260, 262, 263, 264, 265]), max_size=8))
def test_byte_fallback(text: str, words: list[int]) -> None:
    tokens = [*words, *(3 + byte for byte in text.encode()), *words]
    given_out, _ = pieces(BYTE_FALLBACK, tokens)
    assert "".join(given_out) == decoded(BYTE_FALLBACK, tokens)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, len(BYTE_FALLBACK) - 1), max_size=12))
@example([3 + 0x34, 3 + 0xF5, 260])
def test_bytes_that_are_no_text_do_not_end_the_answer(tokens: list[int]) -> None:
    """One invalid byte turns its whole run of bytes invalid, including those already streamed."""
    given_out, _ = pieces(BYTE_FALLBACK, tokens)
    assert len("".join(given_out)) >= len(decoded(BYTE_FALLBACK, tokens)) // 4


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, len(BYTE_LEVEL) - 1), min_size=1, max_size=20), max_size=8),
    st.sampled_from([(), ("e",), ("th", "\ufffd")]),
)
def test_tokens_that_come_together(groups: list[list[int]], stop: tuple[str, ...]) -> None:
    tokens = [token for group in groups for token in group]
    expected, alone = pieces(BYTE_LEVEL, tokens, stop)
    text, given_out = Detokenizer(BYTE_LEVEL, stop), []
    for group in groups:
        if not text.stopped:
            given_out.append(text.push(*group))
    given_out.append(text.finish())
    assert "".join(given_out) == "".join(expected) and text.stop_text == alone.stop_text


@pytest.mark.parametrize("count", [2, 3, 100])
def test_bytes_that_are_no_text_come_together(count: int) -> None:
    """They leave the text before them as it is, as when they come alone."""
    names = ["a", "<0x41>", "<0xE2>", "<0x82>", "\u2581the", "<0x42>", "<0xFF>", "<0x43>", "b"]
    tokens = BYTE_FALLBACK.convert_tokens_to_ids(names)
    expected, _ = pieces(BYTE_FALLBACK, tokens)
    text = Detokenizer(BYTE_FALLBACK)
    groups = [tokens[start : start + count] for start in range(0, len(tokens), count)]
    given_out = [*(text.push(*group) for group in groups), text.finish()]
    assert "".join(given_out) == "".join(expected) != decoded(BYTE_FALLBACK, tokens)


def test_a_character_comes_whole() -> None:
    tokens = BYTE_LEVEL("\U0001f642")["input_ids"]
    assert len(tokens) == 4
    given_out, _ = pieces(BYTE_LEVEL, tokens)
    assert given_out == ["", "", "", "\U0001f642", ""]


def test_a_character_that_never_ends_comes_at_the_end() -> None:
    tokens = BYTE_LEVEL("ok\U0001f642")["input_ids"][:-1]
    given_out, _ = pieces(BYTE_LEVEL, tokens)
    assert given_out[-1] == "\N{REPLACEMENT CHARACTER}"
    assert "".join(given_out) == decoded(BYTE_LEVEL, tokens)


def test_special_tokens_are_skipped() -> None:
    tokens = BYTE_LEVEL("a<|im_start|><|image_pad|>b<|im_end|>")["input_ids"]
    given_out, _ = pieces(BYTE_LEVEL, tokens)
    assert "".join(given_out) == "ab"


def test_text_comes_without_delay() -> None:
    tokens = BYTE_LEVEL("What is in this image?")["input_ids"]
    given_out, _ = pieces(BYTE_LEVEL, tokens)
    assert all(given_out[:-1]) and not given_out[-1]


@pytest.mark.parametrize(
    ("text", "stop", "expected"),
    [
        ("The sign says stop here", ("stop",), "The sign says "),
        ("stop at once", ("stop",), ""),
        ("one two three", ("three", "two"), "one "),
        ("a user\nUser: b", ("\nUser:",), "a user"),
        ("nothing of it", ("absent", "of itt"), "nothing of it"),
        ("aaaaab", ("aab",), "aaa"),
        ("abcabd", ("abd",), "abc"),
        ("half\U0001f642half", ("\U0001f642",), "half"),
        ("the end", ("end",), "the "),
        ("the en", ("end",), "the en"),
        # The first that is complete ends the answer.
        ("abc", ("abc", "b"), "a"),
        ("xabc", ("bc", "abcd"), "xa"),
    ],
)
def test_stop(text: str, stop: tuple[str, ...], expected: str) -> None:
    tokens = BYTE_LEVEL(text)["input_ids"]
    given_out, detokenizer = pieces(BYTE_LEVEL, tokens, stop)
    assert "".join(given_out) == expected
    assert detokenizer.stopped == (expected != text)


@settings(max_examples=300, deadline=None)
@given(
    st.text("abc \u6f22", max_size=24),
    st.lists(st.text("abc \u6f22", min_size=1, max_size=5), min_size=1, max_size=3),
)
def test_nothing_of_a_stop_is_given_out(text: str, stop: list[str]) -> None:
    """Stop strings are held back also with tokens of one byte each."""
    alphabet = BYTE_LEVEL.backend_tokenizer.get_vocab()
    units = [BYTE_LEVEL.backend_tokenizer.pre_tokenizer.pre_tokenize_str(one) for one in text]
    tokens = [alphabet[unit] for [(word, _)] in units for unit in word]
    given_out, detokenizer = pieces(BYTE_LEVEL, tokens, tuple(stop))
    places = [text.find(one) for one in stop if one in text]
    assert detokenizer.stopped == bool(places)
    if len(stop) == 1:
        assert "".join(given_out) == text[: min(places, default=len(text))]
    for one in stop:
        assert one not in "".join(given_out)
