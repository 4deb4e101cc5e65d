"""Reading a text after a recorded past gives what reading both in one go gives; scores by hand."""

from math import log

import pytest
import torch

from examples.train_pocket.configs import NAMES, Pocket, build
from oscar_mm.cache.cache import as_argument
from oscar_mm.compare.teacher_forcing import (
    IGNORE,
    Forced,
    ForcedCache,
    Recorder,
    Scores,
    answer_logits,
    as_recorded,
)
from tests.checkpoints import build_decoder


@pytest.fixture(scope="module", params=NAMES)
def pocket(request: pytest.FixtureRequest) -> Pocket:
    made = build(request.param)
    made.model.eval()
    made.generator.set_attn_implementation({"text_config": "oscar"})
    return made


def positions(pocket: Pocket, first: int, last: int, rows: int) -> torch.Tensor:
    places = torch.arange(first, last).expand(rows, -1)
    return places if pocket.name == "pocket-llava" else places.expand(3, -1, -1)


@torch.no_grad()
def test_forced_answers_are_those_of_one_forward_pass(pocket: Pocket) -> None:
    ids = torch.randint(10, 90, (2, 60))
    decoder, length = pocket.generator.get_decoder(), 45
    whole = decoder(input_ids=ids, position_ids=positions(pocket, 0, 60, 2), use_cache=False)
    logits = pocket.generator.lm_head(whole.last_hidden_state)

    recorder = Recorder(pocket.generator, torch.float32)
    decoder(
        input_ids=ids[:, :length],
        position_ids=positions(pocket, 0, length, 2),
        **as_argument(recorder.cache),
        use_cache=True,
    )
    targets = torch.full((2, 60 - length), IGNORE)
    targets[0, 3:7] = targets[1, -1] = 5
    forced = Forced(
        ids[:, length:], positions(pocket, length, 60, 2), targets, torch.zeros_like(targets)
    )
    found = answer_logits(pocket.generator, as_recorded(recorder.layers), length, forced)
    expected = torch.cat([logits[0, length + 3 : length + 7], logits[1, -1:]])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    # What the past says is read: another one gives other answers.
    other = answer_logits(
        pocket.generator, lambda index: as_recorded(recorder.layers)(3 - index), length, forced
    )
    assert (other - expected).abs().max() > 0.01


@torch.no_grad()
def test_logits_have_the_scale_of_the_model() -> None:
    model, ids = build_decoder("granite", logits_scaling=8.0), torch.randint(10, 90, (1, 40))
    expected = model(ids).logits[0, 30:]
    model.set_attn_implementation("oscar")
    places, recorder = torch.arange(40)[None], Recorder(model, torch.float32)
    model.get_decoder()(
        input_ids=ids[:, :30],
        position_ids=places[:, :30],
        **as_argument(recorder.cache),
        use_cache=True,
    )
    targets = torch.full((1, 10), 5)
    forced = Forced(ids[:, 30:], places[:, 30:], targets, torch.zeros_like(targets))
    found = answer_logits(model, as_recorded(recorder.layers), 30, forced)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_recorded_states(pocket: Pocket) -> None:
    ids, recorder = torch.randint(10, 90, (3, 20)), Recorder(pocket.generator)
    pocket.generator.get_decoder()(
        input_ids=ids,
        position_ids=positions(pocket, 0, 20, 3),
        **as_argument(recorder.cache),
        use_cache=True,
    )
    assert [layer.index for layer in recorder.layers] == [0, 1, 2, 3]
    for layer in recorder.layers:
        assert layer.keys.shape == layer.values.shape == (3, 2, 20, 128)
        assert layer.keys.dtype == layer.first_queries.dtype == torch.bfloat16
        rows = 2 if pocket.name == "pocket-llava" else 1  # The others have norms over a head.
        assert all(sigma.shape == (rows, 128) for sigma in layer.sigmas.values())


def test_a_sliding_window_hides_the_past() -> None:
    keys = torch.rand(1, 1, 6, 4) + 0.1  # above 0: whoever sees 100 attends to it
    past = (torch.full((1, 1, 3, 4), 100.0), torch.full((1, 1, 3, 4), 100.0))
    cache = ForcedCache(lambda index: past, 3)
    chunk = cache.update(keys, keys, 0)[0].oscar_chunk
    distance = torch.arange(3, 9)[:, None] - torch.arange(9)
    window = ((distance >= 0) & (distance < 2))[None, None]
    seen = chunk.attend(None, keys, keys, keys, 1.0, window)
    assert seen[:, :, 1:].max() < 2
    torch.testing.assert_close(seen[0, 0, 0], past[1][0, 0, 0])


def test_padding_is_refused() -> None:
    with pytest.raises(ValueError, match=r"attention_mask: .* must have no padding"):
        ForcedCache().attend_packed(torch.tensor([[False, True]]))


def test_scores_of_two_prompts() -> None:
    # The first prompt has two answers, of two tokens and of one; the second one of one token.
    targets = torch.tensor([[IGNORE, 0, 1, 1], [2, IGNORE, IGNORE, IGNORE]])
    answers = torch.tensor([[0, 0, 0, 1], [0, 0, 0, 0]])
    forced = Forced(torch.zeros(2, 4), torch.zeros(2, 4), targets, answers, count=2)
    exact = torch.tensor([[4.0, 1, 1], [1, 4, 1], [1, 4, 1], [1, 1, 4]]).log()
    found = exact.clone()
    found[1] = torch.tensor([2.0, 1, 1]).log()  # a wrong token in the first answer
    found[3] = torch.tensor([1.0, 1, 2]).log()  # the right one, less surely
    scores = Scores()
    scores.add(forced, exact, found)
    wrong = 1 / 6 * log(1 / 3) + 4 / 6 * log(8 / 3) + 1 / 6 * log(2 / 3)
    unsure = 2 * 1 / 6 * log(2 / 3) + 4 / 6 * log(4 / 3)
    summary = scores.summary()
    assert (summary["prompts"], summary["answers"], summary["tokens"]) == (2, 3, 4)
    assert summary["exact"] == pytest.approx(2 / 3)
    assert summary["agreement"] == pytest.approx(3 / 4)
    kl = (wrong + unsure) / 4
    assert summary["kl"] == pytest.approx(kl, rel=1e-6)
    # Of the second token the likeliest loses log 8 and log 4 on the others, of the fourth log 2.
    shifts = (log(2 / 1) - log(1 / 4)) ** 2, (log(1 / 1) - log(1 / 4)) ** 2, log(2) ** 2
    assert summary["margin"] == pytest.approx((sum(shifts[:2]) / 2 + shifts[2]) / 4, rel=1e-6)
    apart = ((wrong - 3 * kl) ** 2 + (unsure - kl) ** 2) ** 0.5 / 4
    assert summary["kl_error"] == pytest.approx(apart, rel=1e-6)


def test_the_same_logits_have_no_divergence() -> None:
    logits = torch.randn(5, 7)
    targets = logits.argmax(-1)[None]
    forced = Forced(targets, targets, targets, torch.zeros_like(targets))
    scores = Scores()
    scores.add(forced, logits, logits)
    summary = scores.summary()
    assert summary["kl"] == summary["kl_error"] == summary["margin"] == 0
    assert summary["exact"] == summary["agreement"] == 1
