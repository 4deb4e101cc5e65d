"""Passages of a text, and what methods lose on them, against plain transformers."""

from __future__ import annotations

from math import exp
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, PreTrainedModel

from oscar_mm import InputError, KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from oscar_mm.compare.comparison import JUDGED, ONE_BY_ONE, PassageComparison, longest, passages
from oscar_mm.compare.methods import DEFAULT, PUBLISHED, REFERENCE, block_methods, main_methods
from oscar_mm.compare.paged import Paged
from tests.checkpoints import build_decoder

CHOSEN = (REFERENCE, PUBLISHED, DEFAULT, "standard, 4 bit", "hqq, 2 bit")


class Characters:
    """A tokenizer of one token for ``each`` characters, after a first one."""

    def __init__(self, each: int = 1) -> None:
        self.each = each

    def __call__(self, text: str, return_tensors: str) -> SimpleNamespace:
        ids = [1, *(ord(one) % 297 + 3 for one in text[:: self.each])]
        return SimpleNamespace(input_ids=torch.tensor([ids]))


def text(characters: int) -> str:
    """Lines of 60 characters that differ."""
    return "".join("\n" if i % 60 == 59 else chr(33 + i * i // 60 % 90) for i in range(characters))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    made = build_decoder(request.param)
    made.set_attn_implementation("oscar")
    return made


def methods(*names: str) -> list[Any]:
    return [method for method in main_methods() if method.name in names]


@pytest.mark.daily("llama")
def test_rows_of_methods(model: PreTrainedModel) -> None:
    asked = {"stepwise": (PUBLISHED, DEFAULT, "hqq, 2 bit"), "generated": 5}
    comparison = PassageComparison(model, methods(*CHOSEN), judged=20, **asked)
    pieces = list(passages(Characters(), {"lines": text(9000)}, 300, 3, judged=20))
    for number, ids in enumerate(pieces):
        comparison.add(ids, stepwise=number < 2)
    rows = {row["method"]: row for row in comparison.rows()}
    alone = [ONE_BY_ONE.format(name) for name in (PUBLISHED, DEFAULT)]
    assert list(rows) == [*(one.name for one in methods(*CHOSEN)), *alone]
    exact = rows.pop(REFERENCE)
    assert (exact["kl"], exact["agreement"], exact["perplexity_ratio"]) == (0, 1, 1)
    assert exact["page_bits"] == 16 and "kl_ratio" not in exact
    if "missing" in rows["hqq, 2 bit"]:
        assert rows.pop("hqq, 2 bit")["missing"] == "hqq is not installed"
    for name, row in rows.items():
        count = 2 if name in alone else 3
        assert (row["prompts"], row["tokens"]) == (count, 20 * count)
        assert row["kl"] > 0 and 0 < row["perplexity_error"] < row["perplexity"]
        errors = {key.removesuffix("_error") for key in row if key.endswith("_error")}
        assert errors >= {"kl", "agreement", "perplexity", "perplexity_ratio", "margin"}
        assert errors < set(row) and not {"exact", "answers"} & set(row)
    assert rows["standard, 4 bit"]["kl"] < rows[DEFAULT]["kl"]
    ratio = rows[DEFAULT]["kl"] / rows[PUBLISHED]["kl"]
    assert rows[DEFAULT]["kl_ratio"] == pytest.approx(ratio) and "kl_ratio" not in rows[PUBLISHED]
    # Heads of 64 channels: scales and zeros take twice as much as of 128.
    assert rows[DEFAULT]["page_bits"] == 3.0625 < rows[PUBLISHED]["page_bits"] + 0.01
    for name in alone:
        assert 0 <= rows[name]["same"] <= 5 and rows[name]["same"] / 5 <= rows[name]["greedy"] <= 1
        assert rows[name]["page_bits"] is None and 2 < rows[name]["held_bits"] < 32


def test_the_numbers_are_those_of_plain_transformers(model: PreTrainedModel) -> None:
    """Perplexity of 16 bit with a DynamicCache, and KL one by one with a cache in sdpa."""
    judged, policy = 12, KVPolicy.preset("channel", balance=None)
    plain = build_decoder(model.config.model_type)
    [ids] = passages(Characters(), {"lines": text(3000)}, 280, 1, judged=judged)
    comparison = PassageComparison(model, [Paged("unbalanced", policy)], judged, ("unbalanced",))
    comparison.add(ids, stepwise=True)
    forced, alone = comparison.rows()
    length = ids.shape[1] - judged - 1
    found = {}
    for name, cache in (("exact", DynamicCache()), ("packed", OscarCache(policy, model=model))):
        with torch.no_grad():
            plain(ids[:, :length], **as_argument(cache))
            steps = [
                plain(ids[:, place : place + 1], **as_argument(cache)).logits[0]
                for place in range(length, length + judged)
            ]
        found[name] = torch.cat(steps).double().log_softmax(-1)
    losses = {name: cross_entropy(x, ids[0, length + 1 :]).item() for name, x in found.items()}
    difference = (found["exact"].exp() * (found["exact"] - found["packed"])).sum(-1).mean().item()
    # 16 bit is rounded to bfloat16, which a float32 model's own cache is not.
    assert alone["kl"] == pytest.approx(difference, rel=0.05)
    assert alone["perplexity"] == pytest.approx(exp(losses["packed"]), rel=0.02)
    rise = exp(losses["packed"] - losses["exact"])
    assert alone["perplexity_ratio"] == pytest.approx(rise, rel=0.03)
    assert forced["perplexity"] == pytest.approx(exp(losses["packed"]), rel=0.1)
    assert (alone["kl_error"], alone["prompts"]) == (0, 1) and "same" not in alone


@pytest.mark.daily("llama")
def test_rows_of_decoded_tokens(model: PreTrainedModel) -> None:
    """Other tokens than the judged ones, in all rows, and worse than over an exact past."""
    chosen = [*methods(REFERENCE, PUBLISHED, DEFAULT, "hqq, 2 bit"), *block_methods()[:1]]
    comparison = PassageComparison(model, chosen, judged=8, decoded=40)
    pieces = list(passages(Characters(), {"lines": text(9000)}, 300, 2, judged=40))
    for ids in pieces:
        comparison.add(ids)
    rows = {row["method"]: row for row in comparison.rows()}
    exact = rows[REFERENCE]
    assert (exact["decoded_kl"], exact["decoded_agreement"]) == (0, 1)
    assert exact["decoded_perplexity_ratio"] == 1 and "decoded_kl_ratio" not in exact
    for name in (PUBLISHED, DEFAULT, "blocks"):
        row = rows[name]
        assert (row["tokens"], row["decoded_tokens"]) == (16, 80)
        quarters = row["decoded_kl_quarters"]
        assert len(quarters) == 4 and sum(quarters) / 4 == pytest.approx(row["decoded_kl"])
        errors = {key.removesuffix("_error") for key in row if key.endswith("_error")}
        assert errors >= {"decoded_kl", "decoded_agreement", "decoded_perplexity_ratio"}
    ratio = rows[DEFAULT]["decoded_kl"] / rows[PUBLISHED]["decoded_kl"]
    assert rows[DEFAULT]["decoded_kl_ratio"] == pytest.approx(ratio)
    assert rows["blocks"]["decoded_kl"] > rows[DEFAULT]["decoded_kl"] > 0
    # What is judged over an exact past does not depend on it.
    alone = PassageComparison(model, chosen, judged=8)
    for ids in pieces:
        alone.add(ids[:, :-32])
    for row in alone.rows():
        assert {key: rows[row["method"]][key] for key in row} == row


@pytest.mark.daily("llama")
def test_errors_shrink_with_passages(model: PreTrainedModel) -> None:
    comparison = PassageComparison(model, methods(REFERENCE, DEFAULT), judged=4)
    pieces = list(passages(Characters(), {"lines": text(4000)}, 160, 4, judged=4))
    for ids in pieces:
        comparison.add(ids)
    few = comparison.rows()[1]
    for ids in pieces:
        comparison.add(ids)
    many = comparison.rows()[1]
    for key in ("kl", "perplexity_ratio", "agreement", "margin"):
        assert many[key] == pytest.approx(few[key])
        assert many[f"{key}_error"] == pytest.approx(few[f"{key}_error"] / 2**0.5)


def test_no_passages_and_methods_that_say_nothing() -> None:
    model = build_decoder("llama")
    model.set_attn_implementation("oscar")
    names = ("channel, image in 16 bit", DEFAULT)
    comparison = PassageComparison(model, methods(*names), judged=3)
    assert {row["missing"] for row in comparison.rows()} == {"no passages were given"}
    comparison.add(next(passages(Characters(), {"lines": text(1000)}, 20, 1, judged=3)))
    rows = {row["method"]: row for row in comparison.rows()}
    assert rows["channel, image in 16 bit"]["missing"] == "no such tokens"
    assert rows[DEFAULT]["kl"] == 0 and rows[DEFAULT]["page_bits"] == 16


def test_passages_end_at_different_places_of_a_page() -> None:
    texts = {"one": text(40_000), "other": text(50_000)[::-1]}
    pieces = list(passages(Characters(), texts, 300, 8))
    lengths = [piece.shape[1] - JUDGED - 1 for piece in pieces]
    assert len(set(lengths)) == 8 and all(300 <= length < 428 for length in lengths)
    assert max(len(piece[0]) for piece in pieces) <= longest(300)
    beginnings = {tuple(piece[0, :40].tolist()) for piece in pieces}
    assert len(beginnings) == 8
    # The first token is the tokenizer's own, the second the end of the line before.
    assert {tuple(piece[0, :2].tolist()) for piece in pieces} == {(1, 13)}


@pytest.mark.parametrize("each", [1, 5, 12])
def test_a_text_that_is_just_long_enough(each: int) -> None:
    """Passages overlap as they must; however many characters a token has."""
    words = text(each * 700)
    pieces = list(passages(Characters(each), {"short": words}, 500, 4))
    assert all(500 + JUDGED < piece.shape[1] <= longest(500) for piece in pieces)
    assert len({tuple(piece[0, 1:20].tolist()) for piece in pieces}) > 1


@pytest.mark.parametrize(("each", "characters"), [(1, 5), (1, 2064), (12, 20_000)])
def test_a_text_that_is_too_short(each: int, characters: int) -> None:
    given = {"notes.txt": text(characters)}
    there = -(-characters // each) + 1
    message = rf"notes.txt: the text of {there:,} tokens is too short for a passage of 2,066"
    with pytest.raises(InputError, match=message):
        next(passages(Characters(each), given, 2001, 1))
