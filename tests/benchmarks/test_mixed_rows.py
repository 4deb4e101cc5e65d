"""Answers of several methods in one batch, against each alone in a cache of transformers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.mixed_rows import Answer, decode
from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.compare.methods import main_methods
from oscar_mm.compare.paged import Paged
from oscar_mm.compare.rivals import Rival
from tests.checkpoints import build_decoder
from tests.compare.test_rivals import Steps

METHODS = {method.name: method for method in main_methods()}
PAGED = ("16 bit", "standard", "channel", "KIVI")
RIVALS = ("KVarN k3v2, own tokens", "TurboQuant 3bit_nc, own tokens", "FP8, own tokens")
LAYERS, MOST = 6, 24


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    """Prompts with a common beginning; 128 tokens of an answer's page are full on the way."""
    draw = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 300, (count,), generator=draw) for count in (250, 275, 120)]
    for text in texts[1:]:
        text[:30] = texts[0][:30]
    return texts


def build() -> Any:
    """A model whose arithmetic rounds less than caches do."""
    return build_decoder("llama", num_hidden_layers=LAYERS).float()


def logits_of(prompts: list[Tensor], names: tuple[str, ...]) -> Iterator[tuple[Answer, Tensor]]:
    """Yield each answer with the logits of its steps, (steps, vocabulary)."""
    model, found = build(), dict[int, list[Tensor]]()
    model.set_attn_implementation("oscar")
    forward = model.forward

    def noted(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)
        if parts := getattr(kwargs.get(next(iter(as_argument(None)))), "parts", None):
            answers = [answer for part in parts for answer in part.answers]
            for answer, logits in zip(answers, output.logits[:, -1], strict=True):
                found.setdefault(id(answer), []).append(logits)
        return output

    model.forward = noted
    methods = [METHODS[name] for name in names]
    rows = 2 * len(methods)  # So that the third prompt joins later.
    for _, _, answers in decode(model, prompts, methods, lambda _: False, most=MOST, rows=rows):
        for answer in answers:
            yield answer, torch.stack(found[id(answer)])


def alone(model: Any, cache: Any, prompt: Tensor, answer: list[int]) -> Tensor:
    """Logits after each token of an answer but the last, with a cache of its own."""
    model(prompt[None], **as_argument(cache))
    steps = [model(torch.tensor([[x]]), **as_argument(cache)).logits[0, -1] for x in answer[:-1]]
    return torch.stack(steps)


@torch.inference_mode()
def test_each_answer_is_that_of_its_method_alone(prompts: list[Tensor]) -> None:
    model, packed = build(), set[str]()
    for answer, logits in logits_of(prompts, (*PAGED, *RIVALS)):
        name = (*PAGED, *RIVALS)[answer.method]
        method, prompt = METHODS[name], prompts[answer.number]
        if isinstance(method, Paged):
            model.set_attn_implementation("oscar")
            cache: Any = OscarCache(method.policy, model=model)
        else:
            assert isinstance(method, Rival)
            model.set_attn_implementation("sdpa")
            cache = Steps(method.format, method.exact, LAYERS)
        expected = alone(model, cache, prompt, answer.tokens)
        assert answer.tokens[1:] == logits.argmax(-1).tolist()
        # Keys and values are rounded to bfloat16, in another order than in these caches.
        assert (logits - expected).square().mean() < 1e-3 * expected.var(), name
        if answer.packed:
            packed.add(name)
    assert packed == {*PAGED, *RIVALS} - {"16 bit"}


@torch.inference_mode()
def test_answers_end(prompts: list[Tensor]) -> None:
    """An answer ends where it is said to, or at its limit; no prompt begins after ``more``."""
    model = build()
    model.set_attn_implementation("oscar")
    methods, allowed = [METHODS["16 bit"], METHODS["KIVI"]], iter([True, False])
    how = {"most": 12, "rows": 2, "more": lambda: next(allowed, False)}
    ended = lambda tokens: len(tokens) >= 5  # noqa: E731
    [(number, layers, answers)] = decode(model, prompts, methods, ended, **how)
    assert number == 0 and [len(answer.tokens) for answer in answers] == [5, 5]
    assert layers[0].keys.shape[2] == len(prompts[0]) and len(layers) == LAYERS
    [(_, _, answers)] = decode(model, prompts[:1], methods, lambda _: False, most=12, rows=1)
    assert [len(answer.tokens) for answer in answers] == [12, 12]
