"""Answers with drafts, against those without, and drafts against transformers' modules."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.modeling_qwen3_5 import apply_rotary_pos_emb

from oscar_mm import InputError, OscarCache, OscarVLPipeline
from oscar_mm.cache.steady_rows import SteadyRows
from oscar_mm.engine.decode_runner import DecodeRunner, RequestState
from oscar_mm.engine.grammar import Grammar
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.sampling import Sampling
from oscar_mm.fast_decode import draft_runner, graph_runner
from oscar_mm.fast_decode.decoder import FastDecoder, Verified
from oscar_mm.fast_decode.draft_runner import DraftRunner
from oscar_mm.fast_decode.drafts import Drafts
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.kernels.self_check import relative_error
from oscar_mm.media.media import Media
from tests.draft_weights import Oracle, with_drafts
from tests.fast_decode.test_graph_runner import Repeat
from tests.pipelines.conftest import NEVER
from tests.prompts import noise
from tests.tiny_qwen3_5 import qwen3_5

LENGTH = 64
QUESTION = "Tell me about the pages of the cache."


@pytest.fixture(scope="module")
def dense(qwen3_5_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_drafts(qwen3_5_folder, tmp_path_factory.mktemp("drafts") / "dense")


@pytest.fixture(scope="module")
def moe(qwen3_5_moe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_drafts(
        qwen3_5_moe_folder, tmp_path_factory.mktemp("drafts") / "moe", experts_apart=True
    )


@pytest.fixture(scope="module")
def drafting(dense: Path) -> OscarVLPipeline:
    return pipeline(dense, drafts=True)


@pytest.fixture(scope="module")
def plain(dense: Path) -> OscarVLPipeline:
    return pipeline(dense)


def pipeline(folder: Path, policy: str = "compact", **options: Any) -> OscarVLPipeline:
    pipe = OscarVLPipeline(folder, policy=policy, **{"device": "cpu"} | options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def ids(pipe: OscarVLPipeline, **options: Any) -> list[int]:
    return pipe([], QUESTION, **{"max_new_tokens": LENGTH} | options).token_ids


@pytest.mark.daily("moe")
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_answers_are_those_without_drafts(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = request.getfixturevalue(kind)
    expected, pipe = ids(pipeline(folder)), pipeline(folder, drafts=True)
    assert ids(pipe) == expected
    for wrong in ((), range(0, LENGTH, 3)):
        with monkeypatch.context() as patch:
            oracle = Oracle(patch, expected, wrong)
            answer = pipe([], QUESTION, max_new_tokens=LENGTH)
        assert answer.token_ids == expected
        assert oracle.passes < LENGTH * (0.7 if wrong else 0.45)
        assert LENGTH * 0.4 < answer.accepted_drafts <= answer.drafts
        assert (answer.drafts - answer.accepted_drafts > LENGTH // 4) == bool(wrong)


@pytest.mark.daily("compact")
@pytest.mark.parametrize("policy", ["bf16", "channel", "compact"])
def test_captured_passes_give_the_same_answers(
    policy: str, dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes run on fixed tables, as graphs read them; calling the function again stands for a
    graph's replay."""
    repeat, expected = Repeat(), ids(pipeline(dense, policy))
    pipe, early = pipeline(dense, policy, drafts=True), list[bool]()
    launch = DraftRunner.launch_following
    monkeypatch.setattr(
        DraftRunner,
        "launch_following",
        lambda runner, *given: early.append(launch(runner, *given)) or early[-1],
    )
    monkeypatch.setattr(draft_runner, "graph_capture", lambda devices: repeat)
    Oracle(monkeypatch, expected, range(0, LENGTH, 4))
    assert ids(pipe) == expected
    assert repeat.replays > LENGTH // 6
    # With pages of few bits, most passes are launched before the host knows how many drafts of the
    # one before are right; otherwise pools grow first.
    assert sum(early) > LENGTH // 6 or policy != "compact"


@pytest.mark.daily("options1", "options2")
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.8, "seed": 6, "top_k": 20, "repetition_penalty": 1.3, "logprobs": 2},
        {"temperature": 0.0, "presence_penalty": 1.0, "min_tokens": 20, "logit_bias": {7: 3.0}},
    ],
)
def test_sampled_answers_are_those_without_drafts(
    options: dict[str, Any],
    drafting: OscarVLPipeline,
    plain: OscarVLPipeline,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    how = {"max_new_tokens": 60} | options
    expected = plain([], QUESTION, **how)
    Oracle(monkeypatch, expected.token_ids, range(0, LENGTH, 4))
    found = drafting([], QUESTION, **how)
    assert found.token_ids == expected.token_ids and found.accepted_drafts > 15
    for one, other in zip(found.logprobs or (), expected.logprobs or (), strict=True):
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=0.02)


class Known:
    """Stand-in for a ``DraftRunner``, with known drafts and logits."""

    def __init__(self, drafts: Sequence[int], logits: torch.Tensor) -> None:
        self._verified = Verified(torch.tensor([0, *drafts]), logits, torch.zeros(1))

    def __call__(self, token: int, position: int) -> Verified:
        return self._verified

    def launch_following(self, tokens: torch.Tensor, accepted: torch.Tensor) -> bool:
        return False

    def finish(self, accepted: int, token: int | None) -> None: ...


@pytest.mark.daily("options1")
@pytest.mark.parametrize(
    "options", [{"temperature": 1.0}, {"temperature": 0.7, "repetition_penalty": 2.0}]
)
def test_tokens_have_the_distribution_of_the_model(
    options: dict[str, Any], drafting: OscarVLPipeline
) -> None:
    """Frequencies of the first three tokens, two of which had drafts, against the probabilities of
    the model; the penalty of a token depends on the tokens before it."""
    logits = torch.tensor([[1.0, 0.4, -1.0], [-0.5, 0.2, 0.8], [0.3, 0, 1]])
    drafts, count = (1, 2), 2000
    runner = DecodeRunner(drafting.model, drafting.new_cache(), (4,), torch.device("cpu"))
    found = Counter[tuple[int, ...]]()
    torch.manual_seed(0)
    for _ in range(count):
        row = RequestState(Sampling(max_new_tokens=9, **options), torch.tensor([0]), 1, frozenset())
        row.take(0)
        runner.set_rows([row])
        runner._drafts = Known(drafts, logits)
        runner.step()
        found[tuple(row.tokens[1:])] += 1
    penalty, temperature = options.get("repetition_penalty", 1.0), options["temperature"]

    def chances(seen: Sequence[int], place: int) -> list[float]:
        own = logits[place].clone()
        for token in {0, *seen}:
            own[token] = own[token] / penalty if own[token] > 0 else own[token] * penalty
        return (own / temperature).softmax(-1).tolist()

    expected = dict[tuple[int, ...], float]()
    prefix, reached = [], 1.0
    for place in range(3):
        for token, chance in enumerate(chances(prefix, place)):
            if place == 2 or token != drafts[place]:
                expected[*prefix, token] = reached * chance
        if place < 2:
            reached *= chances(prefix, place)[drafts[place]]
            prefix.append(drafts[place])
    assert found.keys() <= expected.keys() and sum(expected.values()) == pytest.approx(1)
    for tokens, chance in expected.items():
        deviation = (chance * (1 - chance) / count) ** 0.5
        assert abs(found[tokens] / count - chance) < 4 * deviation, tokens


def prompt_of(
    pipe: OscarVLPipeline, cache: OscarCache | None = None
) -> tuple[torch.Tensor, Any, Any]:
    """Ids of a question, its cache and the logits after it."""
    prompt = pipe.family.prompt(first_turn(QUESTION, ()), Media())
    cache = pipe.new_cache() if cache is None else cache
    logits = read_prompt(pipe.model, prompt.to(pipe.family.device), cache)
    return prompt.inputs["input_ids"], cache, logits


@torch.inference_mode()
def test_passes_agree_with_transformers_modules(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits, outputs of the draft module and its stored keys agree with those of transformers'
    modules without a cache, whether drafts are accepted or not."""
    pipe, outputs = pipeline(dense, "bf16", drafts=True), list[torch.Tensor]()
    draft = FastDecoder.draft
    monkeypatch.setattr(
        FastDecoder,
        "draft",
        lambda decoder, rows, drafts: outputs.append(rows) or draft(decoder, rows, drafts),
    )
    tokens, cache, logits = prompt_of(pipe)
    runner = DraftRunner(pipe.model, cache, (4,), torch.device("cpu"), 2)
    for accepted in (0, 2, 1, 2, 0, 1):
        tokens = torch.cat([tokens, logits.argmax(-1)[None]], 1)
        known = tokens.shape[1]
        outputs.clear()
        verified = runner(int(tokens[0, -1]), known - 1)
        assert verified is not None
        tried = torch.cat([tokens, verified.tokens[None, 1:]], 1)
        hidden, expected = decoded(pipe.model, tried)
        torch.testing.assert_close(verified.logits, expected[known - 1 :], atol=2e-4, rtol=2e-4)
        first = by_modules(pipe.model, tokens, hidden[:, : known - 1])
        torch.testing.assert_close(outputs[0], first[-1:], atol=2e-4, rtol=2e-4)
        normed = Drafts.of(pipe.model).norm(first[-1:])[None]
        given = torch.cat([hidden[:, : known - 1], normed], 1)
        second = by_modules(pipe.model, tried[:, : known + 1], given)
        torch.testing.assert_close(outputs[1], second[-1:], atol=2e-4, rtol=2e-4)
        runner.finish(accepted)
        tokens = tried[:, : known + accepted]
        logits = verified.logits[accepted : accepted + 1]
    assert cache.get_seq_length() == tokens.shape[1]
    hidden, _ = decoded(pipe.model, tokens)
    stored, keys = cache.unpacked(Drafts.of(pipe.model).index)[0], list[torch.Tensor]()
    by_modules(pipe.model, tokens, hidden[:, :-1], keys)
    torch.testing.assert_close(stored, keys[0], atol=2e-4, rtol=2e-4)


def decoded(model: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The decoder's (1, tokens, channels) output and the (tokens, vocabulary) logits."""
    output = model.get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
    return output, model.get_output_embeddings()(output)[0]


def by_modules(
    model: Any, tokens: torch.Tensor, hidden: torch.Tensor, keys: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Output of the draft module's layer, (tokens, channels).

    Args:
        hidden: (1, tokens - 1, channels): output of the decoder for the token before each.
        keys: receives the layer's keys.
    """
    decoder, drafts = model.get_decoder(), Drafts.of(model)
    before = torch.cat([torch.zeros_like(hidden[:, :1]), hidden], 1)
    embedded = drafts.pre_fc_norm_embedding(decoder.embed_tokens(tokens))
    x = drafts.fc(torch.cat([embedded, drafts.pre_fc_norm_hidden(before)], -1))
    places = torch.arange(tokens.shape[1])[None]
    angles, [layer] = decoder.rotary_emb(x, places), drafts.layers
    if keys is not None:
        attention, heads = layer.self_attn, (1, x.shape[1], -1, layer.self_attn.head_dim)
        own = attention.k_norm(attention.k_proj(layer.input_layernorm(x)).view(heads))
        own = own.transpose(1, 2)
        keys.append(apply_rotary_pos_emb(own, own, *angles)[1])
    return layer(x, position_embeddings=angles, attention_mask=None)[0]


def test_chats_with_drafts_answer_as_those_without(
    drafting: OscarVLPipeline, plain: OscarVLPipeline, tmp_path: Path
) -> None:
    """Turns with media, undo, forks and saved chats."""
    answers = list[list[Any]]()
    for pipe in (plain, drafting):
        chat, found = pipe.chat("Be kind."), list[Any]()
        how = {"max_new_tokens": 14}
        found.append(chat.ask(QUESTION, images=[noise(64, 96)], **how))
        found.append(chat.ask("And then?", **how))
        chat.undo()
        found.append(chat.ask("What else?", **how))
        fork = chat.fork()
        found += [one.ask("Why?", **how) for one in (fork, chat)]
        chat.save(tmp_path / "chat")
        found.append(pipe.load_chat(tmp_path / "chat").ask("Who?", **how))
        found.append(chat.ask("Who?", **how))
        (tmp_path / "chat").unlink()
        answers.append([answer.token_ids for answer in found])
        assert all(answer.drafts > 10 for answer in found) == (pipe is drafting)
    assert answers[0] == answers[1]


def test_a_turn_after_an_answer_that_ends_at_a_draft_is_as_without_drafts(
    dense: Path, plain: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in a pass an answer ends, the next turn is as without drafts."""
    monkeypatch.setattr(draft_runner, "graph_capture", lambda devices: Repeat())
    drafting, answer = pipeline(dense, drafts=True), ids(plain)
    new = [place for place, token in enumerate(answer) if answer.index(token) == place]
    for place in [place for place in new if place > 20][:3]:
        turns = list[tuple[list[int], list[int]]]()
        for pipe in (plain, drafting):
            chat = pipe.chat()
            with monkeypatch.context() as patch:
                Oracle(patch, answer)
                how = {"stop_token_ids": [answer[place]], "max_new_tokens": LENGTH}
                first = chat.ask(QUESTION, **how)
            second = chat.ask("And then?", max_new_tokens=8)
            turns.append((first.token_ids, second.token_ids))
            assert first.accepted_drafts > 8 or pipe is plain
        assert turns[0] == turns[1] and turns[0][0] == answer[:place]


def test_a_turn_after_a_cancelled_answer_is_as_without_drafts(
    dense: Path, plain: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer that is cancelled while the next pass is in flight keeps the tokens that this pass
    has read."""
    monkeypatch.setattr(draft_runner, "graph_capture", lambda devices: Repeat())
    drafting, expected = pipeline(dense, drafts=True), ids(plain)
    take, launch, rows = RequestState.take, DraftRunner.launch_following, list[Any]()

    def turns(pipe: OscarVLPipeline) -> tuple[list[int], list[int]]:
        chat = pipe.chat()
        stream = chat.stream(QUESTION, max_new_tokens=LENGTH)
        for _ in stream:
            pass
        first = rows[-1].tokens
        return first, chat.ask("And then?", max_new_tokens=8).token_ids

    def noted(row: Any, token: int, end: int = LENGTH) -> None:
        rows.append(row)
        if len(row.tokens) + 1 == end:
            row.cancel()
        take(row, token)

    def launched(runner: DraftRunner, *given: torch.Tensor) -> bool:
        found = launch(runner, *given)
        if found and len(rows[-1].tokens) > 30:
            rows[-1].cancel()
        return found

    with monkeypatch.context() as patch:
        Oracle(patch, expected, range(0, LENGTH, 5))
        patch.setattr(RequestState, "take", noted)
        patch.setattr(DraftRunner, "launch_following", launched)
        found = turns(drafting)
    with monkeypatch.context() as patch:
        patch.setattr(RequestState, "take", partialmethod(noted, end=len(found[0])))
        assert turns(plain) == found


@pytest.mark.daily("True")
@pytest.mark.parametrize("captured", [False, True])
def test_only_a_request_that_decodes_alone_drafts(
    captured: bool, dense: Path, plain: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests decode in ordinary steps; the one that is left goes on with drafts. Captured
    steps are planned ahead, those of steady rows as arrays."""
    drafting, repeat, steady = pipeline(dense, drafts=True), Repeat(), list[int]()
    if captured:
        for module in (graph_runner, draft_runner):
            monkeypatch.setattr(module, "graph_capture", lambda *_: repeat)
        take = SteadyRows.take
        monkeypatch.setattr(
            SteadyRows, "take", lambda rows, step: steady.append(len(step.rows)) or take(rows, step)
        )
    answers = list[list[Any]]()
    for pipe in (plain, drafting):
        long, short = (
            pipe.stream([], question, max_new_tokens=count)
            for question, count in ((QUESTION, 90), ("Who are you?", 40))
        )
        next(iter(long))
        answers.append([short.complete(), long.complete()])
        Oracle(monkeypatch, answers[0][1].token_ids, range(0, 90, 4))
    expected, found = answers
    assert [x.token_ids for x in found] == [x.token_ids for x in expected]
    short, long = found
    assert short.drafts <= 12 and 20 < long.accepted_drafts < long.drafts < 3 * 55
    assert not captured or (steady.count(2) > 10 and 1 in steady)


@torch.inference_mode()
def test_steps_store_what_drafts_read(drafting: OscarVLPipeline) -> None:
    """Steps on fixed tables, which pack at their end, store the drafts' keys and values as eager
    steps do."""
    _, cache, _ = prompt_of(drafting)
    caches, live = (cache, cache.fork()), torch.zeros(1, dtype=torch.bool)
    tokens, start = list((7 + torch.arange(2 * LENGTH)).split(1)), cache.get_seq_length()
    for one, capture in zip(caches, (Repeat(), None), strict=True):
        steps = GraphRunner(drafting.model, one, 1, (4,), torch.device("cpu"), capture)
        steps.place([start])
        for token, following in itertools.pairwise(tokens):
            steps(token, live)
            steps.ahead(following, live)
    found, expected = (x.unpacked(Drafts.of(drafting.model).index) for x in caches)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    "options", [{"grammar": Grammar.regex("[a-z]{20}")}, {"deterministic": True}]
)
def test_no_drafts_under_a_grammar_or_with_deterministic(
    options: dict[str, Any], drafting: OscarVLPipeline
) -> None:
    assert drafting([], QUESTION, max_new_tokens=8).drafts > 0
    assert drafting([], QUESTION, max_new_tokens=8, **options).drafts == 0


def changed(folder: Path, target: Path, change: Any) -> Path:
    """A copy of a checkpoint whose weights ``change`` has changed."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    weights = load_file(target / "model.safetensors")
    change(weights)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_checkpoints_without_a_valid_draft_module_are_refused(
    dense: Path, moe: Path, qwen3_5_folder: Path, qwen3_vl_folder: Path, tmp_path: Path
) -> None:
    refused = {
        "no weights mtp": qwen3_5_folder,
        "leave the argument out": qwen3_vl_folder,
        "mtp.norm.weight in .* is missing": changed(
            dense, tmp_path / "missing", lambda x: x.pop("mtp.norm.weight")
        ),
        r"mtp.fc.weight in .* has shape \(64, 64\), not \(64, 128\)": changed(
            dense, tmp_path / "shape", lambda x: x.update({"mtp.fc.weight": torch.zeros(64, 64)})
        ),
        "cannot be read": changed(
            moe, tmp_path / "expert", lambda x: x.pop("mtp.layers.0.mlp.experts.1.up_proj.weight")
        ),
    }
    for text, folder in refused.items():
        with pytest.raises(InputError, match=f"^drafts: .*{text}"):
            pipeline(folder, drafts=True)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose layers are wide enough for kernels."""
    folder: Path = tmp_path_factory.mktemp("wide")
    heads = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    qwen3_5(folder / "plain", seed=3, hidden_size=256, **heads)
    return with_drafts(folder / "plain", folder / "drafts")


@pytest.mark.parametrize(
    ("policy", "device"),
    [
        ("compact", "cpu"),
        *(pytest.param(policy, "cuda", marks=pytest.mark.gpu) for policy in ("compact", "bf16")),
    ],
)
@torch.inference_mode()
def test_passes_agree_with_steps(
    dense: Path, wide: Path, policy: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and states of captured and of eager passes, against steps with the same tokens."""
    folder, dtype = (dense, "float32") if device == "cpu" else (wide, "bfloat16")
    pipe = pipeline(folder, policy, device=device, dtype=dtype, drafts=True)
    known, place = torch.zeros(2, dtype=torch.long, device=device), itertools.cycle((0, 1))
    monkeypatch.setattr(FastDecoder, "draft", lambda *_: known[(n := next(place)) : n + 1])
    # Each has its own slots, so that no plan takes those of another.
    caches = [OscarCache(policy, model=pipe.model) for _ in range(3)]
    for cache in caches:
        prompt_of(pipe, cache)
    generator, where = torch.Generator().manual_seed(0), pipe.family.device
    text = 7 + torch.randperm(400, generator=generator)[:300]
    captures = "auto" if device == "cuda" else Repeat(), None
    captured, eager = (
        DraftRunner(pipe.model, one, (4,), where, 2, capture)
        for one, capture in zip(caches[:2], captures, strict=True)
    )
    others = [GraphRunner(pipe.model, one, 1, (4,), where, None) for one in caches]
    start = done = caches[0].get_seq_length()
    found_logits, expected_logits = list[torch.Tensor](), list[torch.Tensor]()
    passes, launched, unknown, live = 0, 0, 0, torch.zeros(1, dtype=torch.bool)

    def step(index: int) -> torch.Tensor:
        others[index].place([done])
        return others[index](text[done - start][None].to(where), live)

    own = text
    known.copy_(own[1:3])
    for accepted in (0, 2, 1, 2, 0, 1) * 15:
        found = [runner(int(own[0]), done) for runner in (captured, eager)]
        assert (found[0] is None) == (found[1] is None)
        passes += found[0] is not None
        for number in range(accepted + 1 if found[0] is not None else 1):
            expected = step(2)
            for index, verified in enumerate(found):
                if verified is None:
                    step(index)
                    continue
                found_logits.append(verified.logits[number].clone())
                expected_logits.append(expected[0].clone())
            done += 1
        own = text[done - start :]
        known.copy_(own[1:3])
        if found[0] is not None:
            # Now and then another token comes than the one whose pass was launched early.
            token = own[int(done % 5 == 0)]
            if done % 3:
                chosen = torch.zeros(3, dtype=torch.long)
                chosen[accepted] = token
                right = torch.tensor([accepted])
                unknown += captured.launch_following(chosen.to(where), right.to(where))
            captured.finish(accepted, int(token))
            eager.finish(accepted)
        launched += captured.is_ahead
        if done - start > 150:
            break
    assert passes > 30 and launched > 25
    # Without pages, pools grow in most passes, for which the host first waits for the tokens.
    assert unknown > 12 or policy == "bf16"
    check_close(torch.stack(found_logits), torch.stack(expected_logits))
    for cache in caches[:2]:
        assert cache.get_seq_length() == caches[2].get_seq_length() == done
        # Steps know what drafts read from their second token on only.
        for index, wanted in ((2, caches[2]), (3, caches[1])):
            for one, other in zip(cache.unpacked(index), wanted.unpacked(index), strict=True):
                check_close(one[0, 0], other[0, 0])
        for one, other in zip(cache.linear_layers, caches[2].linear_layers, strict=True):
            for state, wanted in zip(one.states, other.states, strict=True):
                assert relative_error(state.flatten(1), wanted.flatten(1)) <= 0.05


def check_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Compare rows with wide bounds: products of several rows are rounded differently, so that
    2-bit codes may differ, and those of most tokens do so in 16-bit precision."""
    errors = (found - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert errors.median() <= (0.02 if found.dtype == torch.float32 else 0.2), errors
    assert (errors > 0.6).float().mean() <= 0.02, errors
