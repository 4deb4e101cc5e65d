"""Decoding in batches, and OscarCache in transformers' generate, equal plain transformers."""

import pytest
import torch

from oscar_mm import OscarCache
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.decode_runner import DecodeRunner, decode
from oscar_mm.engine.sampling import Sampling
from oscar_mm.modality import token_modalities
from tests.prompts import REQUESTS, Reference

NEVER = 1 << 20
BATCH = list(REQUESTS.values())


@pytest.fixture(scope="module", params=["qwen3_vl", "qwen3_vl_moe"])
def reference(request: pytest.FixtureRequest) -> Reference:
    return Reference(request.getfixturevalue(f"{request.param}_folder"))


@pytest.fixture(scope="module")
def plain(reference: Reference) -> dict[int | None, tuple[list[list[int]], dict[str, int]]]:
    """Return answers with transformers' own cache, and their options, by ``end``."""
    inputs, options = reference.inputs(BATCH), {"max_new_tokens": 64, "eos_token_id": NEVER}
    reference.model.set_attn_implementation({"text_config": "sdpa"})
    whole = reference.generate(inputs, **options)
    # A token that some rows choose early and others late or never.
    early = options | {"eos_token_id": whole[0][3]}
    ended = reference.generate(inputs, **early)
    assert len(ended[0]) <= 3 and max(map(len, ended)) > 3
    return {NEVER: (whole, options), None: (ended, early)}


def run(oscar: Reference, requests, *, policy="bf16", ends=frozenset(), tokens=24, **how):
    """Return the tokens of each row, and the cache."""
    cache = OscarCache(policy, model=oscar.model)
    steps = list(
        decode(
            oscar.model,
            oscar.prompt(requests),
            cache,
            Sampling(max_new_tokens=tokens, **how),
            end_tokens=frozenset(ends),
        )
    )
    rows = [list(row) for row in zip(*steps, strict=True)] or [[] for _ in requests]
    for row in rows:
        # Once ended, a row never starts again.
        count = sum(token is not None for token in row)
        assert all(token is None for token in row[count:])
    return [[token for token in row if token is not None] for row in rows], cache


@pytest.mark.daily("qwen3_vl-oscar-1048576", "qwen3_vl_moe-oscar-None", "qwen3_vl-sdpa")
@pytest.mark.parametrize(
    ("attention", "end"), [("oscar", NEVER), ("oscar", None), ("sdpa", NEVER), ("eager", NEVER)]
)
def test_generate_with_a_padded_batch(reference, plain, attention: str, end: int | None) -> None:
    inputs = reference.inputs(BATCH)
    assert (inputs["attention_mask"] == 0).any() and not inputs["attention_mask"][:, 0].all()
    expected, options = plain[end]
    reference.model.set_attn_implementation({"text_config": attention})
    cache = OscarCache("bf16")
    cache.expect(
        token_modalities(
            inputs["input_ids"],
            mm_token_type_ids=inputs["mm_token_type_ids"],
            attention_mask=inputs["attention_mask"],
        )
    )
    assert reference.generate(inputs, **as_argument(cache), **options) == expected
    tokens = cache.memory().tokens
    assert tokens["image"] == int((inputs["mm_token_type_ids"] == 1).sum())
    assert tokens["video"] == int((inputs["mm_token_type_ids"] == 2).sum())


def test_generate_without_expect_learns_of_padding_from_attention_oscar(oscar) -> None:
    inputs = oscar.inputs(BATCH)
    plain = oscar.generate(inputs, max_new_tokens=16)
    assert oscar.generate(inputs, **as_argument(OscarCache("bf16")), max_new_tokens=16) == plain


def test_batch_equals_one_by_one(oscar) -> None:
    together, cache = run(oscar, BATCH)
    assert together == [run(oscar, [request])[0][0] for request in BATCH]
    inputs = oscar.inputs(BATCH)
    assert together == oscar.generate(inputs, max_new_tokens=24, eos_token_id=NEVER)
    real = int(inputs["attention_mask"].sum()) + 23 * len(BATCH)
    assert sum(cache.memory().tokens.values()) == real


def test_rows_that_end_early(oscar) -> None:
    free, _ = run(oscar, BATCH)
    # Rows end at the first step, in the middle, and never.
    ends = {free[1][0], free[3][9]}
    together, cache = run(oscar, BATCH, ends=ends)
    alone = [run(oscar, [request], ends=ends)[0][0] for request in BATCH]
    assert together == alone
    assert together[1] == [] and len(together[3]) <= 9
    assert len({len(row) for row in together}) > 2
    # A row that has ended stores nothing more; of others all tokens but the last are stored.
    prompt = int(oscar.inputs(BATCH)["attention_mask"].sum())
    longest = max(map(len, together))
    stored = sum(len(row) - (len(row) == longest) for row in together)
    assert sum(cache.memory().tokens.values()) == prompt + stored


def test_all_rows_end_at_once(oscar) -> None:
    free, _ = run(oscar, BATCH, tokens=1)
    assert run(oscar, BATCH, ends={row[0] for row in free})[0] == [[]] * len(BATCH)


@pytest.mark.daily("channel", "quarot")
@pytest.mark.parametrize("policy", ["channel", "oscar", "kivi", "quarot"])
def test_packed_batch_equals_one_by_one(oscar, policy: str) -> None:
    request = REQUESTS["two images"]
    long = type(request)("Compare the two pictures. " * 40, request.images)
    batch = [long, REQUESTS["video"]]
    together, cache = run(oscar, batch, policy=policy, tokens=24)
    assert cache.memory().by_kind["codes"]
    alone = [run(oscar, [one], policy=policy, tokens=24)[0][0] for one in batch]
    assert together == alone
    assert [len(row) for row in together] == [24, 24]


def test_only_what_was_given_is_stored(oscar) -> None:
    prompt = oscar.prompt([REQUESTS["image"]])
    for tokens in (1, 2, 5):
        [row], cache = run(oscar, [REQUESTS["image"]], tokens=tokens)
        assert len(row) == tokens
        assert cache.get_seq_length() == prompt.tokens + tokens - 1


def test_tokens_come_as_they_are_chosen(oscar) -> None:
    cache = OscarCache("bf16")
    prompt = oscar.prompt([REQUESTS["image"]])
    steps = decode(oscar.model, prompt, cache, Sampling(max_new_tokens=9), end_tokens=frozenset())
    assert cache.get_seq_length() == 0
    next(steps)
    assert cache.get_seq_length() == prompt.tokens
    next(steps)
    assert cache.get_seq_length() == prompt.tokens + 1
    assert not torch.is_inference_mode_enabled()


def test_seed_decides(oscar) -> None:
    request = [REQUESTS["image"]]
    sampled = {"temperature": 1.0, "tokens": 24}
    [one], _ = run(oscar, request, seed=7, **sampled)
    torch.manual_seed(0)
    assert run(oscar, request, seed=7, **sampled)[0] == [one]
    assert run(oscar, request, seed=8, **sampled)[0] != [one]
    # Unseeded answers follow torch's own seed and leave seeded ones alone.
    torch.manual_seed(3)
    unseeded = run(oscar, request, **sampled)[0]
    assert run(oscar, request, **sampled)[0] != unseeded
    torch.manual_seed(3)
    assert run(oscar, request, **sampled)[0] == unseeded


def test_broken_weights_are_reported(qwen3_vl_folder) -> None:
    broken = Reference(qwen3_vl_folder, attention={"text_config": "oscar"})
    with torch.no_grad():
        broken.model.lm_head.weight[5] = float("nan")
    with pytest.raises(FloatingPointError, match="NaN"):
        run(broken, [REQUESTS["text"]])


def test_batches_beside_prompts_have_few_sizes_of_captured_steps(oscar, monkeypatch) -> None:
    monkeypatch.setattr(DecodeRunner, "captures", True)
    runner = DecodeRunner(oscar.model, OscarCache("standard"), (), torch.device("cpu"))
    sizes = {rows: runner.size_for(rows, beside_prompts=True) for rows in range(1, 257)}
    assert all(rows <= size < rows + 32 for rows, size in sizes.items())
    assert len({*sizes.values()}) < 16 and {*sizes.values()} <= {*runner.captured_sizes(256)}
    assert runner.size_for(300, beside_prompts=True) == runner.size_for(300) == 512
