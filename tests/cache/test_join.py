"""Join: rows of several caches go on in one batch as each would alone."""

import pytest
import torch

from oscar_mm import InputError, OscarCache
from oscar_mm.cache.join import can_join, join
from oscar_mm.cache.store import PageStore
from tests.checkpoints import build_decoder

LENGTHS = (300, 40, 0, 137)
NEW = (5, 3, 7, 1)


@pytest.fixture(scope="module")
def model():
    made = build_decoder("qwen3")
    made.set_attn_implementation("oscar")
    return made


def ids(count: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (1, count), generator=generator)


@torch.inference_mode()
def read(model, cache: OscarCache, tokens: torch.Tensor) -> torch.Tensor:
    past = cache.get_seq_length()
    place = torch.arange(past, past + tokens.shape[1])[None]
    return model(input_ids=tokens, position_ids=place, past_key_values=cache).logits[0, -1]


@pytest.mark.parametrize("policy", ["bf16", "compact"])
@torch.inference_mode()
def test_rows_go_on_as_alone(model, policy) -> None:
    store = PageStore(policy)
    caches = [OscarCache(policy, store=store) for _ in LENGTHS]
    for cache, length in zip(caches, LENGTHS, strict=True):
        if length:
            read(model, cache, ids(length, length))
    used = store.memory().used_bytes
    batch = join(caches)
    assert batch.get_seq_length() == max(LENGTHS)
    assert store.memory().used_bytes == used, "pages are shared"
    longest = max(NEW)
    tokens, places = torch.zeros(2, len(NEW), longest, dtype=torch.long)
    real = torch.zeros(len(NEW), longest, dtype=torch.bool)
    for row, (past, count) in enumerate(zip(LENGTHS, NEW, strict=True)):
        tokens[row, -count:], real[row, -count:] = ids(count, 1000 + row), True
        places[row, -count:] = torch.arange(past, past + count)
    batch.expect(torch.where(real, 0, -1))
    logits = model(input_ids=tokens, position_ids=places, past_key_values=batch).logits[:, -1]
    for row, cache in enumerate(caches):
        before = cache.get_seq_length()
        fork = cache.fork()
        alone = read(model, fork, ids(NEW[row], 1000 + row))
        torch.testing.assert_close(logits[row], alone, atol=2e-4, rtol=2e-4)
        assert cache.get_seq_length() == before == LENGTHS[row]
        fork.close()
    batch.close()
    for cache in caches:
        cache.close()
    assert store.memory().used_bytes == 0


def test_only_what_can_be_joined(model) -> None:
    with pytest.raises(InputError, match="different stores"):
        join([OscarCache("compact"), OscarCache("compact")])
    store = PageStore("compact")
    assert join([OscarCache("compact", store=store)]).get_seq_length() == 0
    plain = build_decoder("llama")
    plain.set_attn_implementation("oscar")
    one, same, other = (OscarCache("compact", store=store) for _ in range(3))
    read(plain, one, ids(200, 1))
    read(plain, same, ids(200, 1))
    read(plain, other, ids(200, 2))
    assert can_join([one, same, one.fork()])
    assert not can_join([one, other]), "balanced by different prompts"
    with pytest.raises(InputError, match="balanced by different prompts"):
        join([one, other])
