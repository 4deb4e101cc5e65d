"""The language benchmark on a tiny random model."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import language
from oscar_mm.compare.methods import DEFAULT, PUBLISHED, REFERENCE, main_methods

CHOSEN = (REFERENCE, PUBLISHED, DEFAULT, "compact, 4 bit")


class Characters:
    """A tokenizer of one token a character."""

    def __call__(self, text: str, return_tensors: str) -> SimpleNamespace:
        return SimpleNamespace(input_ids=torch.tensor([[ord(c) % 64 for c in text]]))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 64, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    made = LlamaForCausalLM(LlamaConfig(**sizes, **heads, initializer_range=0.2)).eval()
    made.set_attn_implementation("oscar")
    return made


def test_rows(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "GENERATED", 5)
    text = "".join(chr(33 + i * i % 91) for i in range(9000)) + "\n" * 9000
    pieces = language.passages(Characters(), [text], 300, 2)
    methods = [method for method in main_methods() if method.name in CHOSEN]
    rows = {row["method"]: row for row in language.measure(model, pieces, methods, stepwise=1)}
    alone = [f"{name}, one by one" for name in language.STEPWISE]
    assert set(rows) == {*CHOSEN, *alone}
    assert rows[REFERENCE]["kl"] == 0 and rows[REFERENCE]["agreement"] == 1
    assert 0 < rows["compact, 4 bit"]["kl"] < rows[DEFAULT]["kl"]
    assert rows[DEFAULT]["page_bits"] < rows[PUBLISHED]["page_bits"] < 3.2
    for name in CHOSEN:
        assert rows[name]["prompts"] == 2 and rows[name]["tokens"] == 2 * language.JUDGED
        assert 1 < rows[name]["perplexity"] < 10_000
    for name in alone:
        assert rows[name]["prompts"] == 1 and 0 < rows[name]["kl"] < 1
        assert 0 <= rows[name]["same"] <= 5


def test_passages_end_at_different_places_of_a_page() -> None:
    text = "a line\n" * 5000
    pieces = list(language.passages(Characters(), [text, text], 300, 8))
    lengths = [piece.shape[1] - language.JUDGED - 1 for piece in pieces]
    assert len(set(lengths)) == 8 and all(300 <= length < 428 for length in lengths)
    with pytest.raises(ValueError, match="is too short for passages of 2,065 tokens"):
        next(language.passages(Characters(), ["short"], 2000, 1))


def test_the_text_of_this_python_is_long_enough() -> None:
    for text in language.python_texts():
        assert len(text) > language._CHARACTERS * 7168
