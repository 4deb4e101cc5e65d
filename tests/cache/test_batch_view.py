"""BatchView: rows of several caches continue in one pass as each would alone."""

from functools import partial

import numpy as np
import pytest
import torch

from oscar_mm import InputError, OscarCache
from oscar_mm.cache import paged_attention, varlen_attention
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.page_store import PageStore
from tests.checkpoints import build_decoder

LENGTHS = (300, 40, 0, 137)
NEW = (30, 3, 7, 1)
POLICIES = ("bf16", "channel", "standard")


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
    place = torch.arange(past, past + tokens.shape[1], device=tokens.device)[None]
    return model(input_ids=tokens, position_ids=place, **as_argument(cache)).logits[0, -1]


@torch.inference_mode()
def prefill_varlen(model, view: BatchView, tokens: list[torch.Tensor], pasts) -> torch.Tensor:
    """Return the logits of the last token of each row."""
    view.begin([np.zeros(row.shape[1], np.int8) for row in tokens])
    places = [
        torch.arange(past, past + x.shape[1], device=x.device)
        for past, x in zip(pasts, tokens, strict=True)
    ]
    output = model(
        input_ids=torch.cat(tokens, dim=1),
        position_ids=torch.cat(places)[None],
        **as_argument(view),
    )
    view.settle()
    return output.logits[0, np.cumsum([x.shape[1] for x in tokens]) - 1]


def caches_of(model, store: PageStore, lengths=LENGTHS) -> list[OscarCache]:
    caches = [OscarCache(store.policy, store=store, model=model) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        if length:
            read(model, cache, ids(length, length))
    return caches


def flash_by_sdpa(
    queries,
    keys,
    values,
    run: varlen_attention.VarlenBatch,
    scaling: float,
    *,
    upper_left: bool = False,
) -> torch.Tensor:
    """Compute what flash attention returns for concatenated rows, given the ends of rows."""
    found = []
    ends = zip(*(x.tolist() for x in (run.query_ends, run.key_ends)), strict=True)
    first, stop = next(ends), None
    for stop in ends:
        query = queries[first[0] : stop[0]].transpose(0, 1)
        key, value = (x[first[1] : stop[1]].transpose(0, 1) for x in (keys, values))
        seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
        seen = seen.tril(0 if upper_left else key.shape[1] - query.shape[1])
        found.append(
            torch.nn.functional.scaled_dot_product_attention(
                *(query[None], key[None], value[None], seen), scale=scaling, enable_gqa=True
            )[0].transpose(0, 1)
        )
        first = stop
    return torch.cat(found)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_is_checked_before_it_is_used(
    dtype: torch.dtype, head_dim: int, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    ways = {
        "right": flash_by_sdpa,
        "upper left": partial(flash_by_sdpa, upper_left=True),
        "as if alike": lambda queries, *_: queries,
        "missing": varlen_attention._by_flash,  # There is none on a CPU.
    }
    for way, flash in ways.items():
        monkeypatch.setattr(varlen_attention, "_by_flash", flash)
        found = varlen_attention._agrees.__wrapped__(torch.device("cpu"), dtype, head_dim)
        assert found == (way == "right")
    assert len(caplog.records) == 3


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_flash_attention_agrees(dtype: torch.dtype, head_dim: int) -> None:
    assert varlen_attention._agrees.__wrapped__(torch.device("cuda", 0), dtype, head_dim)


@pytest.fixture(params=["row by row", "in one launch", "in two", "with a long row"])
def launches(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Select how varlen attention runs; return whether it runs by launches, as on a GPU."""
    if request.param == "row by row":
        return False
    monkeypatch.setattr(varlen_attention, "causal_varlen", flash_by_sdpa)
    by_rows = paged_attention._ChunkAttention.by_rows
    monkeypatch.setattr(
        paged_attention._ChunkAttention,
        "by_rows",
        lambda chunk: chunk.varlen() if chunk.step.lengths is not None else by_rows(chunk),
    )
    most = {"in one launch": 600, "in two": 310, "with a long row": 200}[request.param]
    monkeypatch.setattr(varlen_attention, "_MAX_KEYS", most)
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("policy", POLICIES)
def test_concatenated_prompts_on_a_gpu(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row equals itself alone, up to rounding; free slots are NaN."""
    made = build_decoder("qwen3").to("cuda", torch.bfloat16)
    made.set_attn_implementation("oscar")
    store = PageStore(policy)
    torch.full((1 << 28,), torch.nan, dtype=torch.bfloat16, device="cuda")
    lengths, counts = (300, 40, 0, 137, 1, 0, 700), (5, 30, 70, 1, 129, 1, 40)
    caches = [OscarCache(store.policy, store=store) for _ in lengths]
    for cache, length in zip(caches, lengths, strict=True):
        if length:
            read(made, cache, ids(length, length).cuda())
    new = [ids(count, 1000 + row).cuda() for row, count in enumerate(counts)]
    alone = [cache.fork() for cache in caches]
    expected = torch.stack([read(made, *one) for one in zip(alone, new, strict=True)])
    for most in (16384, 400, 100):
        monkeypatch.setattr(varlen_attention, "_MAX_KEYS", most)
        view, rows = BatchView(store), [cache.fork() for cache in caches]
        view.set_rows(rows)
        found = prefill_varlen(made, view, new, lengths)
        error = (found - expected).float().norm(dim=1) / expected.float().norm(dim=1)
        assert error.max() < 0.05


def test_concatenated_prompts_without_a_past_are_as_alone(model, launches: bool) -> None:
    lengths, counts = (0,) * 3, (130, 1, 40)
    caches = caches_of(model, PageStore("standard"), lengths)
    view = BatchView(caches[0].store)
    view.set_rows(caches)
    new = [ids(count, row) for row, count in enumerate(counts)]
    found = prefill_varlen(model, view, new, lengths)
    for row, cache in enumerate(caches_of(model, PageStore("standard"), lengths)):
        expected = read(model, cache, new[row])
        torch.testing.assert_close(found[row], expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize(
    ("policy", "launches"),
    [
        *(("standard", "row by row"), ("bf16", "row by row"), ("channel", "in one launch")),
        *(("standard", "in two"), ("bf16", "with a long row")),
    ],
    indirect=["launches"],
)
def test_concatenated_prompts_and_steps_continue_as_alone(
    model, policy: str, launches: bool
) -> None:
    store = PageStore(policy)
    caches = caches_of(model, store)
    alone = [cache.fork() for cache in caches]
    view = BatchView(store)
    view.set_rows(caches)
    new = [ids(count, 1000 + row) for row, count in enumerate(NEW)]
    found = prefill_varlen(model, view, new, LENGTHS)
    for row, fork in enumerate(alone):
        expected = read(model, fork, new[row])
        torch.testing.assert_close(found[row], expected, atol=2e-4, rtol=2e-4)
    lengths = [past + count for past, count in zip(LENGTHS, NEW, strict=True)]
    assert [cache.get_seq_length() for cache in caches] == lengths
    # Steps of one token, with a padding row and another order. Launches apply to prompts only, so a
    # few steps suffice to read what the prompts have stored.
    order = [3, 0, 2, 1]
    view.set_rows([caches[row] for row in order] + [None])
    for step in range(10 if launches else 24):
        tokens = torch.cat([ids(1, 77 * step + row) for row in range(5)])
        places = torch.tensor([[lengths[row] + step] for row in order] + [[0]])
        view.expect(torch.tensor([[0]] * 4 + [[-1]]))
        with torch.inference_mode():
            arguments = {"input_ids": tokens, "position_ids": places}
            logits = model(**arguments, **as_argument(view)).logits[:, -1]
        for place, row in enumerate(order):
            expected = read(model, alone[row], tokens[place : place + 1])
            # Rounding to 16 bits turns the smallest difference into 0.4% of a key or value.
            torch.testing.assert_close(logits[place], expected, atol=5e-3, rtol=5e-3)
    assert not view.pop_overflow()
    for cache, fork in zip(caches, alone, strict=True):
        cache.check_complete()
        assert cache.memory().tokens == fork.memory().tokens
        assert cache.get_seq_length() == fork.get_seq_length()
    for cache in (*caches, *alone):
        cache.close()
    del view
    assert store.memory().used_bytes == 0


def test_what_a_layer_could_not_store_is_reported_once(model) -> None:
    """On a GPU a layer sets a flag, which is read later."""
    store = PageStore("standard")
    [cache] = caches_of(model, store, (50,))
    view = BatchView(store)
    view.set_rows([cache])
    prefill_varlen(model, view, [ids(3, 1)], [50])
    for layers in ((), (1,), (0, 1)):
        for index in layers:
            view.packed_layers[index].overflow.fill_(1)
        view.unchecked = True
        assert [view.pop_overflow(), view.pop_overflow()] == [bool(layers), False]
        assert not any(bool(layer.overflow) for layer in view.packed_layers)
    cache.check_complete()
    cache.packed_layers[1].overflow.fill_(1)
    cache.unchecked = True
    with pytest.raises(FloatingPointError, match="layer 1: "):
        cache.check_complete()


def test_forks_have_overflow_flags_of_their_own(model) -> None:
    [cache] = caches_of(model, PageStore("standard"), (50,))
    fork = cache.fork()
    twin = fork.fork()  # The flags of its layers are in one tensor, those of ``cache`` are not.
    fork.packed_layers[1].overflow.fill_(1)
    found = [[bool(x.overflow) for x in one.packed_layers] for one in (cache, fork, twin)]
    none = [False] * len(cache.packed_layers)
    assert found == [none, [x == 1 for x in range(len(none))], none]
    later = fork.fork()
    assert [bool(x.overflow) for x in later.packed_layers] == found[1]


def test_a_step_that_stops_leaves_all_rows_incomplete(model) -> None:
    store = PageStore("standard")
    caches = caches_of(model, store, (50, 60, 70))
    view = BatchView(store)
    view.set_rows(caches[:2])
    view.begin(np.zeros((2, 1), np.int8))
    for cache in caches[:2]:
        with pytest.raises(RuntimeError, match="did not reach layer 0"):
            cache.fork()
    read(model, caches[2], ids(4, 1))
    for cache in caches:
        cache.close()
    assert store.memory().used_bytes == 0


@pytest.mark.parametrize("gone", ["closed", "dropped"])
def test_a_row_that_leaves_takes_its_slots_along(model, gone: str) -> None:
    store = PageStore("standard")
    caches = caches_of(model, store, (200, 90))
    other = caches_of(model, PageStore("standard"), (90,))[0]
    view = BatchView(store)
    view.set_rows(caches)
    view.clear_row(0)
    if gone == "closed":
        caches[0].close()
    caches[0] = None
    for step in range(30):
        view.expect(torch.tensor([[-1], [0]]))
        tokens, place = ids(1, step), torch.tensor([[0], [90 + step]])
        with torch.inference_mode():
            found = model(
                input_ids=tokens.expand(2, 1), position_ids=place, **as_argument(view)
            ).logits[1, -1]
        torch.testing.assert_close(found, read(model, other, tokens), atol=5e-4, rtol=5e-4)
    assert store.memory().used_bytes == other.store.memory().used_bytes


def test_a_cache_takes_the_row_of_one_that_left(model) -> None:
    store = PageStore("standard")
    caches, alone = caches_of(model, store, (200, 90, 137)), PageStore("standard")
    others = caches_of(model, alone, (137, 90))
    view = BatchView(store)
    view.set_rows(caches[:2])
    view.clear_row(0)
    caches[0].close()
    view.set_row(0, caches[2])
    for step in range(30):
        tokens, place = ids(1, step), torch.tensor([[137 + step], [90 + step]])
        with torch.inference_mode():
            found = model(
                input_ids=tokens.expand(2, 1), position_ids=place, **as_argument(view)
            ).logits[:, -1]
        expected = torch.stack([read(model, other, tokens) for other in others])
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=5e-4)
    assert store.memory().used_bytes == alone.memory().used_bytes


def test_what_is_no_row(model) -> None:
    store = PageStore("channel")
    view = BatchView(store)
    assert view.can_take(OscarCache("channel", store=store, model=model))
    assert not view.can_take(OscarCache("channel", model=model))
    with pytest.raises(InputError, match="fork the caches"):
        view.fork()


def test_rows_have_one_balancing(model) -> None:
    """A cache saved by an earlier version keeps the balancing of that version."""
    store = PageStore("standard")
    caches = caches_of(model, store, (200, 90))
    old = caches_of(model, store, (90,))[0]
    for layer in old.layers:
        layer.sigma = 2 * layer.sigma
    view = BatchView(store)
    view.sigmas = caches[0].sigmas
    assert all(view.can_take(cache) for cache in caches) and not view.can_take(old)
    view.set_rows(caches)
    assert view.can_take(caches[1].fork()) and not view.can_take(old)
    assert view.can_take(OscarCache("standard", store=store, model=model))
