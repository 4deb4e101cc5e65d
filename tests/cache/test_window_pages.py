"""Layers with sliding windows store only what windows reach: same logits, fewer bytes."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from oscar_mm import KVPolicy, OscarCache, OscarVLPipeline
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.block_table import SlotPool
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.checked_file import read_checked, write_checked
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.saved_cache import load_cache, save_cache
from oscar_mm.cache.window_pages import WindowPages, windows_of
from oscar_mm.errors import InputError
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.policy import PLAIN
from tests.cache.invariants import STREAM
from tests.languages import CHATML, build_language_model

WINDOW, NEVER = 40, 1 << 20
EXTRA = {"sliding_window": WINDOW, "max_position_embeddings": 1 << 13}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "gemma 3": ("gemma3_text", {"layer_types": KINDS, "num_hidden_layers": 3}),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
POLICIES = {
    "stream": KVPolicy(bits=(3, 2), window=16, **STREAM),
    "whole pages": KVPolicy.preset("channel", window=16, sinks=2),
}


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, fields = MODELS[request.param]
    made = tmp_path_factory.mktemp("window_pages") / kind
    return build_language_model(kind, made, template=CHATML, **fields | EXTRA)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="oscar"
    ).eval()


@pytest.fixture(scope="module")
def wide(folder: Path) -> Any:
    """The model with windows of more than a page, which steps need beside the last one."""
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="oscar", sliding_window=150
    ).eval()


def store_for(model: Any, policy: KVPolicy, *, frees: bool) -> PageStore:
    store = PageStore(policy)
    if frees:
        store.free_outside_windows(windows_of(model.config))
    return store


def tokens(count: int, seed: int = 0, rows: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (rows, count), generator=generator)


@torch.inference_mode()
def read(model: Any, cache: OscarCache, ids: torch.Tensor, chunk: int = 200) -> torch.Tensor:
    """Return the logits of all tokens, which are read in chunks."""
    given = as_argument(cache)
    return torch.cat([model(part, **given).logits for part in ids.split(chunk, 1)], 1)


def poison(store: PageStore) -> None:
    """Fill all places with NaN that no sequence may read."""
    for places in store.window_pages:
        for index, pools in store.layers.items():
            if pools.places is not places:
                continue
            for bits, pool in pools.pages.items():
                found = places._places[bits]
                unused = [0, *found.free] if pool.capacity else []
                pool.storage[[x for x in unused if x < pool.capacity]] = 0xFF
                assert index in windows_of_store(store)


def windows_of_store(store: PageStore) -> dict[int, int]:
    return {index: x.places.window for index, x in store.layers.items() if x.places is not None}


def stored_pages(store: PageStore, bits: Any) -> list[int]:
    return [x.used(bits) for x in store.window_pages]


@pytest.mark.daily("mistral-stream", "gpt-oss-whole pages")
@pytest.mark.parametrize("policy", POLICIES)
def test_logits_are_those_of_all_pages(wide: Any, policy: str) -> None:
    """Bit for bit: prompts in chunks, decode steps, and a second prompt in between.

    Steps end a page of each sequence, and leave another one behind their windows.
    """
    found = []
    for frees in (False, True):
        store = store_for(wide, POLICIES[policy], frees=frees)
        one, other = (OscarCache(store.policy, model=wide, store=store) for _ in range(2))
        logits = [read(wide, one, tokens(750)), read(wide, other, tokens(490, 1))]
        for step in range(40):
            store.sweep()
            poison(store)
            logits += [read(wide, x, tokens(1, 2 + step)) for x in (one, other)]
            if step == 30:
                logits.append(read(wide, other, tokens(300, 7)))
        found.append(torch.cat(logits, 1))
    assert torch.equal(*found) and not found[0].isnan().any()


@pytest.mark.daily("mistral-stream", "gemma 3-whole pages", "gpt-oss-stream")
@pytest.mark.parametrize("policy", POLICIES)
def test_a_layer_does_not_grow_beyond_its_window(model: Any, policy: str) -> None:
    store = store_for(model, POLICIES[policy], frees=True)
    cache = OscarCache(store.policy, model=model, store=store)
    sizes = list[int]()
    for part in range(4):
        read(model, cache, tokens(600, part))
        cache.shrink()
        sliding = [x for index, x in store.layers.items() if index in windows_of(model.config)]
        sizes.append(sum(pool.storage.nbytes for x in sliding for pool in x.pages.values()))
        report = cache.memory()
        assert report.kv_bytes == sum(report.by_kind.values())
        assert store.memory().used_bytes == cache.slot_bytes
    # Bytes of three pages, and of two that belong to none.
    assert len({*sizes}) <= 2 and max(sizes) <= sum(
        5 * pool.bytes_each for x in sliding for pool in x.pages.values()
    )
    [bits] = {x for x in store.allocators if x.packed and store.allocators[x].used}
    assert store.allocators[bits].used >= 17 and max(stored_pages(store, bits)) <= 3


@pytest.mark.daily("gemma 3")
def test_rows_join_and_leave_captured_steps(wide: Any) -> None:
    """The same steps with early launches, as a graph runner makes them, and eagerly."""
    found = []
    for frees in (False, True):
        store = store_for(wide, POLICIES["stream"], frees=frees)
        caches = [OscarCache(store.policy, model=wide, store=store) for _ in range(3)]
        for row, cache in enumerate(caches):
            read(wide, cache, tokens(360 + 90 * row, row))
        logits = list[torch.Tensor]()
        for rows in ([0, 1], [0, 1, 2], [2, 1]):
            view = BatchView(store)
            view.set_rows([caches[row] for row in rows])
            runner = GraphRunner(wide, view, len(rows), (), torch.device("cpu"), lambda run, _: run)
            runner.place([caches[row].get_seq_length() for row in rows])
            going = torch.zeros(len(rows), dtype=torch.bool)
            for ids in tokens(40, 5, len(rows)).T:
                with torch.inference_mode():
                    store.sweep()
                    runner.ahead(ids, going)
                    poison(store)
                    logits.append(runner(ids, going).clone())
        found.append(torch.cat(logits))
    assert torch.equal(*found) and not found[0].isnan().any()


@pytest.mark.daily("mistral-whole pages", "gemma 3-stream")
@pytest.mark.parametrize("policy", POLICIES)
def test_crop_returns_to_marks_only(model: Any, policy: str) -> None:
    ids, found = tokens(900), list[torch.Tensor]()
    for frees in (False, True):
        store = store_for(model, POLICIES[policy], frees=frees)
        cache = OscarCache(store.policy, model=model, store=store)
        read(model, cache, ids[:, :400])
        cache.mark()
        read(model, cache, ids[:, 400:])
        cache.shrink()
        poison(store)
        if frees:
            lengths = 200, 400, 640, 900
            assert [cache.longest_crop(x) for x in lengths] == [0, 400, 400, 900]
            with pytest.raises(NotImplementedError, match="crop to 640 tokens: layers with slid"):
                cache.crop(640 - 900)
        cache.crop(400 - 900)
        found.append(read(model, cache, tokens(25, 9), 1))
        # Only some of the latest tokens, whose window is still there.
        cache.crop(-20)
        found[-1] = torch.cat([found[-1], read(model, cache, tokens(25, 6), 1)], 1)
    assert torch.equal(*found) and not found[0].isnan().any()


@pytest.mark.daily("gemma 3-whole pages", "gpt-oss-stream")
@pytest.mark.parametrize("policy", POLICIES)
def test_forgotten_tokens_and_their_pages(model: Any, policy: str) -> None:
    """The end of a stream is forgotten beyond the window, and its page is not continued."""
    found = []
    for frees in (False, True):
        store = store_for(model, POLICIES[policy], frees=frees)
        cache = OscarCache(store.policy, model=model, store=store)
        read(model, cache, tokens(640))
        cache.shrink()
        cache.forget(250, 640)
        found.append(read(model, cache, tokens(400, 4), 100))
        poison(store)
        found[-1] = torch.cat([found[-1], read(model, cache, tokens(30, 5), 1)], 1)
    assert not found[1].isnan().any()
    # Pages differ: where the last one is gone, tokens begin another.
    assert (found[0] - found[1]).abs().mean() < 0.1 * found[0].std()


@pytest.mark.daily("mistral-saved", "gemma 3-saved", "gpt-oss-pickled", "gemma 3-trimmed")
@pytest.mark.parametrize("way", ["saved", "pickled", "trimmed"])
def test_copies_continue_alike(model: Any, way: str, tmp_path: Path) -> None:
    store = store_for(model, POLICIES["stream"], frees=True)
    gone, cache = (OscarCache(store.policy, model=model, store=store) for _ in range(2))
    read(model, gone, tokens(500, 8))
    read(model, cache, tokens(900))
    expected = read(model, cache.fork(), tokens(200, 3), 50)
    if way == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    if way == "saved":
        save_cache(cache, tmp_path / "cache", fingerprint="x")
        other = store_for(model, store.policy, frees=True)
        cache, _ = load_cache(tmp_path / "cache", fingerprint="x", store=other)
        assert cache.longest_crop(500) == 0
        assert stored_pages(other, store.policy.packed_bits[0]) <= [4]
    if way == "trimmed":
        gone.close()
        store.trim()
        assert store.memory().free_bytes == 0
    assert torch.equal(read(model, cache, tokens(200, 3), 50), expected)


def test_a_file_without_all_pages_needs_a_store_with_windows(model: Any, tmp_path: Path) -> None:
    """A store that keeps all pages could return to any length, and would read zeros there."""
    frees, keeps = (store_for(model, POLICIES["stream"], frees=x) for x in (True, False))
    cache = OscarCache(frees.policy, model=model, store=frees)
    read(model, cache, tokens(30))
    save_cache(cache, tmp_path / "short", fingerprint="x")
    load_cache(tmp_path / "short", fingerprint="x", store=keeps)
    read(model, cache, tokens(600))
    save_cache(cache, tmp_path / "long", fingerprint="x")
    with pytest.raises(InputError, match=r"lacks pages .* without tensor parallelism"):
        load_cache(tmp_path / "long", fingerprint="x", store=keeps)


@pytest.mark.daily("mistral")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("windows", [700], "windows do not match its tokens"),
        ("windows", [40, 30], "windows do not match its tokens"),
        ("windows", {"a": 1}, "windows are not positive whole numbers"),
        ("lacks_pages", 1, "neither true nor false"),
    ],
)
def test_damaged_files_are_refused(
    model: Any, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    store = store_for(model, POLICIES["stream"], frees=True)
    cache = OscarCache(store.policy, model=model, store=store)
    read(model, cache, tokens(600))
    save_cache(cache, tmp_path / "cache", fingerprint="x")
    tensors, texts = read_checked(tmp_path / "cache", lambda *_: None)
    text = json.loads(texts["oscar_mm.cache"]) | {field: value}
    write_checked(tmp_path / "cache", tensors, {"oscar_mm.cache": json.dumps(text)})
    with pytest.raises(InputError, match=f"cache is damaged: .*{message}"):
        load_cache(tmp_path / "cache", fingerprint="x", store=store)


def test_sweeps_come_once_in_many_pages() -> None:
    """Also if all places stay in use, and with few places more than pages."""
    slots, sweeps, count = SlotPool(), list[int](), 1600
    [bits] = KVPolicy.preset("standard").packed_bits
    places = WindowPages(150, {bits: slots})
    for page in slots.allocate(count):
        places.begin(bits, [page], None, lambda page=page: sweeps.append(page))
    assert len(sweeps) < 100 and 0 not in {places.has(bits, page) for page in range(count)}
    assert places.capacity(bits) < 1.07 * count


@pytest.mark.daily("mistral", "gemma 3")
def test_layers_may_have_two_windows(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="oscar"
    ).eval()
    sliding = windows_of(model.config)
    windows = {index: WINDOW if index else 4 * WINDOW for index in sliding}
    found, store = list[torch.Tensor](), PageStore(POLICIES["stream"])
    store.free_outside_windows(windows)
    for one in (store, PageStore(POLICIES["stream"])):
        cache = OscarCache(one.policy, model=model, store=one)
        found.append(torch.cat([read(model, cache, tokens(n, n)) for n in (600, 1, 300, 1)], 1))
        one.sweep()
    assert torch.equal(*found)
    assert [x.window for x in store.window_pages] == sorted({*windows.values()})
    [bits] = [x for x in store.allocators if x != PLAIN and store.allocators[x].used]
    assert len(windows) == 1 or stored_pages(store, bits)[0] < stored_pages(store, bits)[1]


def chat_answers(folder: Path, tmp_path: Path) -> tuple[list[list[int]], OscarVLPipeline]:
    pipe = OscarVLPipeline(folder, policy=POLICIES["stream"], device="cpu")
    pipe.model.generation_config.eos_token_id = NEVER
    chat, found = pipe.chat(), list[list[int]]()

    def ask(text: str, count: int = 6) -> None:
        answer = chat.ask(text, max_new_tokens=count, temperature=0)
        found.append(answer.token_ids)

    ask("What does the bread cost, and which month was the wettest of all? " * 8)
    ask("Why? " * 80)
    ask("And the sign?")
    chat.undo()
    ask("What did the user ask about the sign? " * 20)
    chat.undo()
    chat.undo()
    ask("And then? " * 30, 140)
    twin = chat.fork()
    chat.save(tmp_path / "chat")
    chat = pipe.load_chat(tmp_path / "chat")
    ask("Tell me more of it.")
    chat.undo()
    chat = twin
    ask("Tell me more of it.")
    return found, pipe


@pytest.mark.daily("gemma 3")
def test_chats_answer_as_with_all_pages(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns, undo, forks and a saved chat; the latest turn can be undone however long it was."""
    found, pipe = chat_answers(folder, tmp_path)
    assert pipe.store.window_pages
    monkeypatch.setattr(PageStore, "free_outside_windows", lambda *_: None)
    expected, pipe = chat_answers(folder, tmp_path)
    assert found == expected and not pipe.store.window_pages


@pytest.mark.daily("gpt-oss")
def test_undo_of_too_early_turns_is_refused(folder: Path) -> None:
    pipe = OscarVLPipeline(folder, policy=POLICIES["stream"], device="cpu")
    chat = pipe.chat()
    for turn in range(9):
        chat.ask(f"{turn}? " * 150, max_new_tokens=2)
    with pytest.raises(InputError, match=r"undo: what layers with .* sliding windows"):
        for _ in range(9):
            chat.undo()
    assert 0 < len(chat.turns) < 7
    assert chat.ask("Why?", max_new_tokens=2).token_ids


@pytest.mark.daily("mistral")
def test_forecasts_bound_what_a_long_prompt_takes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forecast_and_growth() -> tuple[int, int]:
        options = {"device": "cpu", "prefill_chunk": 512}
        pipe = OscarVLPipeline(folder, policy=POLICIES["stream"], **options)
        chat = pipe.chat()
        chat.ask("Why?", max_new_tokens=2)
        before, forecasts = pipe.store.memory().used_bytes, list[int]()
        growth_bytes = pipe.admission.growth_bytes
        monkeypatch.setattr(
            type(pipe.admission),
            "reserve",
            lambda _, growth, *__: forecasts.append(growth_bytes(growth)),
        )
        chat.ask("What does the bread cost? " * 250, max_new_tokens=20)
        return forecasts[-1], pipe.store.memory().used_bytes - before

    with_windows = forecast_and_growth()
    monkeypatch.setattr(PageStore, "free_outside_windows", lambda *_: None)
    with_all = forecast_and_growth()
    assert with_windows[1] <= with_windows[0] < with_all[0]
    assert with_windows[1] < 0.8 * with_all[1]


@pytest.mark.daily("mistral")
def test_a_closed_chat_leaves_its_whole_budget(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that only a closed chat had are not in use, although layers still have places."""
    options = {"policy": POLICIES["stream"], "device": "cpu", "prefill_chunk": 512}
    question, forecasts = "What does the bread cost? " * 60, list[int]()
    pipe = OscarVLPipeline(folder, **options)
    growth_bytes = pipe.admission.growth_bytes
    with monkeypatch.context() as patch:
        patch.setattr(
            type(pipe.admission),
            "reserve",
            lambda _, growth, *__: forecasts.append(growth_bytes(growth)),
        )
        pipe.chat().ask(question, max_new_tokens=8)
    small = OscarVLPipeline(folder, kv_budget=forecasts[0], spill=False, **options)
    for _ in range(3):
        chat = small.chat()
        assert chat.ask(question, max_new_tokens=8).token_ids
        chat.close()
        assert small.store.memory().used_bytes == 0


@pytest.mark.daily("mistral-1", "gemma 3-3")
@pytest.mark.parametrize("rows", [1, 3])
def test_pages_from_which_others_begin_keep_their_places(folder: Path, rows: int) -> None:
    """Without a 16-bit window, a page takes its center from the one before, and rows that share
    their last page copy it; both may be outside of a tiny sliding window."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="oscar", sliding_window=2
    ).eval()
    policy, found = KVPolicy.preset("standard", window=0), list[torch.Tensor]()
    for frees in (False, True):
        store = PageStore(policy)
        if frees:
            store.free_outside_windows(dict.fromkeys(windows_of(model.config), 2))
        cache = OscarCache(policy, model=model, store=store)
        for count in (150, 129):
            read(model, cache, tokens(count, count))
        cache.batch_select_indices(torch.zeros(rows, dtype=torch.long))
        found.append(read(model, cache, tokens(40, 1, rows), 1))
    assert torch.equal(*found)
