"""OscarCache in decoders beyond plain causal attention, against transformers' own caches."""

from __future__ import annotations

import copy
import functools
import pickle
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DynamicCache,
    EncoderDecoderCache,
    Gemma3Config,
    Gemma3Model,
    PaliGemmaConfig,
    PaliGemmaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import LinearAttentionLayer

from oscar_mm import InputError, OscarCache
from oscar_mm.cache import states as states_module
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.page_store import PageStore
from oscar_mm.cache.saved_cache import save_cache
from tests.checkpoints import build_decoder
from tests.tiny import randomize

ALTERNATING = ["linear_attention", "full_attention"] * 2
LINEAR = {
    "num_hidden_layers": 4,
    "layer_types": ALTERNATING,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama4_text": {  # chunks of 40 tokens in three layers of four
        "num_hidden_layers": 4,
        "intermediate_size_mlp": 64,
        "num_local_experts": 1,
        "moe_layers": [],
        "attention_chunk_size": 40,
        "no_rope_layers": [1, 1, 1, 0],
    },
    "gemma3_text": {
        "num_hidden_layers": 2,
        "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_next": LINEAR | {"num_experts": 0, "mlp_only_layers": [0, 1, 2, 3]},
    "qwen3_5_text": LINEAR,
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
}
HYBRIDS = ("qwen3_next", "qwen3_5_text", "jamba")


@functools.cache
def decoder(name: str) -> PreTrainedModel:
    return build_decoder(name, **OVERRIDES[name])


def prompt(tokens: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (batch, tokens), generator=generator)


def generate(model: PreTrainedModel, cache: object, **inputs: Any) -> torch.Tensor:
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    return model.generate(**options | inputs, **as_argument(cache))


def states(model: PreTrainedModel, cache: object, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        output = model(ids, **as_argument(cache), use_cache=True, **inputs)
    return output.logits if "logits" in output else output.last_hidden_state


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "oscar") for name in OVERRIDES), (next(iter(OVERRIDES)), "sdpa")],
)
def test_16_bit_greedy(name: str, implementation: str) -> None:
    """Covers a single row and rows of unequal length, over several chunks and windows."""
    model = decoder(name)
    ids = prompt(100, batch=2)
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    for inputs in ({"input_ids": ids[:1]}, {"input_ids": ids, "attention_mask": mask}):
        model.set_attn_implementation("sdpa")
        expected = generate(model, DynamicCache(config=model.config), **inputs)
        model.set_attn_implementation(implementation)
        cache = OscarCache("bf16", model=model)
        if "attention_mask" in inputs:
            cache.expect(attention_mask=mask)
        assert torch.equal(generate(model, cache, **inputs), expected)


@pytest.mark.parametrize("name", OVERRIDES)
def test_packed_attention_is_that_over_the_unpacked_copy(name: str) -> None:
    """The prompt's logits are exact; later logits equal those with transformers' attention."""
    model = decoder(name)
    ids, new = prompt(300), prompt(9, seed=1)
    model.set_attn_implementation("sdpa")
    exact = states(model, DynamicCache(config=model.config), ids)
    model.set_attn_implementation("oscar")
    cache = OscarCache("channel", model=model)
    assert_near(states(model, cache, ids), exact)
    twin = cache.fork()
    for part in (new[:, :1], new[:, 1:]):
        model.set_attn_implementation("oscar")
        found = states(model, cache, part)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, states(model, twin, part), rtol=1e-3, atol=1e-3)


def gemma3() -> PreTrainedModel:
    config = Gemma3Config(
        text_config=decoder("gemma3_text").config.to_dict(),
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        mm_tokens_per_image=4,
        image_token_index=299,
    )
    return Gemma3Model(config)


def paligemma() -> PreTrainedModel:
    config = PaliGemmaConfig(
        text_config={
            "model_type": "gemma",
            "vocab_size": 300,
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
        },
        vision_config=gemma3().config.vision_config.to_dict(),
        projection_dim=64,
        image_token_index=299,
    )
    return PaliGemmaModel(config)


@pytest.mark.parametrize("build", [gemma3, paligemma])
def test_tokens_of_an_image_see_each_other(build: Any) -> None:
    """Covers a prompt, and images of a later turn after a past and padding."""
    model = build().float().eval()
    randomize(model, 0)
    ids = prompt(160, batch=2).clamp(max=290)
    kinds = torch.ones_like(ids) if build is paligemma else torch.zeros_like(ids)
    kinds[:, 20:60] = kinds[:, 110:130] = 1 - kinds[0, 0]
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    found = {}
    for implementation in ("sdpa", "oscar"):
        model.set_attn_implementation(implementation)
        cache = DynamicCache() if implementation == "sdpa" else OscarCache("bf16", model=model)
        found[implementation] = torch.cat(
            [
                states(
                    model,
                    cache,
                    ids[:, start:stop],
                    attention_mask=mask[:, :stop],
                    # Kinds of all tokens that there are; transformers looks them up by position.
                    token_type_ids=kinds[:, :stop],
                )
                for start, stop in ((0, 100), (100, 159), (159, 160))
            ],
            dim=1,
        )
    real = mask.bool()
    assert_near(found["oscar"][real], found["sdpa"][real])
    model.set_attn_implementation("sdpa")
    causal = states(model, DynamicCache(), ids[:, :100], attention_mask=mask[:, :100])
    assert (causal - found["sdpa"][:, :100])[real[:, :100]].abs().max() > 0.01


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_a_mask_hides_stored_tokens(name: str) -> None:
    """Zeros over the past apply to that pass only, in a chunk, a step and a padded batch."""
    model = build_decoder(name, sliding_window=60) if name == "mistral" else build_decoder(name)
    ids = prompt(170, batch=2)
    caches = {"sdpa": DynamicCache(config=model.config), "oscar": OscarCache("bf16", model=model)}
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    for start, stop, hidden in (
        (0, 150, ()),
        (150, 168, (30, 100)),
        (168, 169, (140, 160)),
        (169, 170, ()),
    ):
        seen = mask[:, :stop].clone()
        if hidden:
            seen[0, slice(*hidden)] = 0
        found = {}
        for implementation, cache in caches.items():
            model.set_attn_implementation(implementation)
            positions = (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            found[implementation] = states(
                model, cache, ids[:, start:stop], attention_mask=seen, position_ids=positions
            )
        real = mask[:, start:stop].bool()
        assert_near(found["oscar"][real], found["sdpa"][real])


@pytest.mark.gpu
@pytest.mark.parametrize("name", OVERRIDES)
def test_masks_and_states_on_a_gpu(name: str) -> None:
    """Covers a padded prompt, a chunk that hides part of the past, and a step after a fork."""
    model = copy.deepcopy(decoder(name)).cuda()
    ids = prompt(120, batch=2).cuda()
    mask = torch.ones_like(ids)
    mask[1, :13] = 0
    hiding = mask.clone()
    if name not in HYBRIDS:  # States cannot hide what they have seen.
        hiding[0, 30:80] = 0
    found = {}
    caches = {"sdpa": DynamicCache(config=model.config), "oscar": OscarCache("bf16", model=model)}
    for implementation, cache in caches.items():
        model.set_attn_implementation(implementation)
        parts = []
        for start, stop, seen in ((0, 100, mask), (100, 119, hiding), (119, 120, mask)):
            parts.append(states(model, cache, ids[:, start:stop], attention_mask=seen[:, :stop]))
            cache = cache.fork() if implementation == "oscar" else cache
        found[implementation] = torch.cat(parts, dim=1)
    real = mask.bool()
    torch.testing.assert_close(found["oscar"][real], found["sdpa"][real], rtol=1e-3, atol=1e-3)


def test_a_mask_of_new_tokens() -> None:
    """A mask of the new tokens' length is accepted; any other length is refused."""
    model = build_decoder("mistral", sliding_window=15)
    model.set_attn_implementation("oscar")
    new, mask = prompt(5, batch=2), torch.tensor([[1] * 5, [0] * 2 + [1] * 3])
    positions = (mask.cumsum(1) - 1).clamp(min=0) + 20
    found = []
    for given in (mask, torch.cat([torch.ones(2, 20, dtype=torch.long), mask], dim=1)):
        cache = OscarCache("bf16", model=model)
        states(model, cache, prompt(20, batch=2))
        found.append(states(model, cache, new, attention_mask=given, position_ids=positions))
    assert torch.equal(*found)
    with pytest.raises(InputError, match=r"covers 7 tokens; it must cover the 5 new.* 30"):
        states(model, cache, new, attention_mask=torch.ones(2, 7))


def test_a_mask_of_four_dimensions() -> None:
    """Its pass is not announced, whatever the previous pass was."""
    model = build_decoder("llama")
    ids = prompt(60)
    visible = torch.ones(1, 1, 60, 60, dtype=torch.bool).tril()
    visible[..., 10:, 3:8] = False
    found = {}
    for implementation, cache in (
        ("sdpa", DynamicCache()),
        ("oscar", OscarCache("bf16", model=model)),
    ):
        model.set_attn_implementation(implementation)
        parts = [states(model, cache, ids[:, :20], attention_mask=visible[..., :20, :20])]
        parts.append(states(model, cache, ids[:, 20:40]))
        parts.append(states(model, cache, ids[:, 40:], attention_mask=visible[..., 40:, :]))
        found[implementation] = torch.cat(parts, dim=1)
    assert_near(found["oscar"], found["sdpa"])


def test_a_bidirectional_decoder() -> None:
    model = build_decoder("llama", is_causal=False)
    found = {}
    for implementation, cache in (
        ("sdpa", DynamicCache()),
        ("oscar", OscarCache("bf16", model=model)),
    ):
        model.set_attn_implementation(implementation)
        ids = prompt(40)
        found[implementation] = [states(model, cache, part) for part in ids.split([30, 10], 1)]
    for one, other in zip(found["oscar"], found["sdpa"], strict=True):
        assert_near(one, other)


def test_output_attentions_are_refused() -> None:
    model = build_decoder("llama")
    model.set_attn_implementation("oscar")
    for ask in (generate, states):
        given = {"input_ids": prompt(5)} if ask is generate else {"ids": prompt(5)}
        options = {"return_dict_in_generate": True} if ask is generate else {}
        with pytest.raises(NotImplementedError, match=r"output_attentions.*eager"):
            ask(model, OscarCache(model=model), **given, output_attentions=True, **options)
    model.set_attn_implementation("eager")
    weights = model(
        prompt(5), **as_argument(OscarCache(model=model)), output_attentions=True
    ).attentions
    assert [x.shape for x in weights] == [(1, 4, 5, 5)] * 2


@pytest.mark.filterwarnings("ignore:OscarCache. expect.attention_mask")
@pytest.mark.parametrize("implementation", ["sdpa", "eager", "oscar"])
def test_encoder_decoders(implementation: str) -> None:
    """The decoder's own past may be packed; states of the encoder are not."""
    bart = BartForConditionalGeneration(
        BartConfig(
            vocab_size=300, d_model=64, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=2, decoder_attention_heads=2,
            encoder_ffn_dim=64, decoder_ffn_dim=64, init_std=0.5,
        )
    )  # fmt: skip
    t5 = T5ForConditionalGeneration(
        T5Config(
            vocab_size=300, d_model=64, d_kv=32, num_layers=2, num_heads=2, d_ff=64,
            decoder_start_token_id=0,
        )
    )  # fmt: skip
    ids = prompt(20, batch=2)
    for model in (bart.eval(), t5.eval()):
        model.set_attn_implementation("sdpa")
        expected = generate(model, None, input_ids=ids)
        model.set_attn_implementation(implementation)
        cache = EncoderDecoderCache(OscarCache("bf16", model=model), DynamicCache())
        # Older transformers leave the decoder of T5 at its own attention.
        if model is t5 and t5.decoder.config._attn_implementation == "oscar":
            with pytest.raises(NotImplementedError, match=r"position_bias.*eager"):
                generate(model, cache, input_ids=ids)
            continue
        assert torch.equal(generate(model, cache, input_ids=ids), expected)
        with pytest.raises(RuntimeError, match=r"EncoderDecoderCache\(OscarCache"):
            generate(model, OscarCache("bf16", model=model), input_ids=ids)
        cache = EncoderDecoderCache(DynamicCache(), OscarCache("bf16", model=model))
        with pytest.raises(NotImplementedError, match=r"OscarLayer\.keys.*DynamicCache"):
            generate(model, cache, input_ids=ids)


@pytest.mark.parametrize("name", HYBRIDS)
def test_states_of_linear_attention(name: str) -> None:
    """States are stored as in transformers, counted exactly, and removed by reset."""
    model = decoder(name)
    model.set_attn_implementation("oscar")
    cache, plain = OscarCache("bf16", model=model), DynamicCache(config=model.config)
    assert not cache.has_previous_state() and not cache.is_initialized and cache.batch_size == -1
    for one in (cache, plain):
        states(model, one, prompt(50, batch=2))
    assert cache.has_previous_state() and cache.is_initialized and cache.batch_size == 2
    assert cache.has_previous_state(0) and not cache.has_previous_state(1)
    assert cache.is_linear == plain.is_linear and cache.get_seq_length() == 50
    total = 0
    for layer, other in zip(cache.layers, plain.layers, strict=True):
        if isinstance(other, LinearAttentionLayer):
            for mine, theirs in (
                (layer.conv_states[0], other.conv_states[0]),
                (layer.recurrent_states[0], other.recurrent_states[0]),
            ):
                assert torch.equal(mine, theirs)
                total += mine.nbytes
    report = cache.memory()
    assert report.by_kind["states"] == total > 0
    assert sum(report.by_kind.values()) == report.kv_bytes == sum(report.by_modality.values())
    assert report.bf16_bytes == 2 * report.values + total
    assert "states, tables" in str(report)
    with pytest.raises(InputError, match="forget: the states of linear-attention layers"):
        cache.forget(0, 3)
    with pytest.raises(NotImplementedError, match=r"crop to 49 tokens: .*marked lengths \(none\)"):
        cache.crop(-1)
    cache.crop(0)
    cache.reset()
    assert cache.memory().kv_bytes == cache.memory().by_kind["states"] == 0
    assert not cache.has_previous_state()


def test_rows_and_forks_of_a_hybrid() -> None:
    """Beams, repeated and selected rows, and forks each have their own states."""
    model = decoder("qwen3_next")
    ids = prompt(40, batch=2)
    model.set_attn_implementation("sdpa")
    options = {"input_ids": ids, "num_beams": 3}
    expected = generate(model, DynamicCache(config=model.config), **options)
    model.set_attn_implementation("oscar")
    assert torch.equal(generate(model, OscarCache("bf16", model=model), **options), expected)

    alone = [OscarCache("bf16", model=model) for _ in ids]
    for row, one in zip(ids, alone, strict=True):
        states(model, one, row[None])
    new = prompt(3, seed=1)
    after = [states(model, one.fork(), new) for one in alone]
    cache = OscarCache("bf16", model=model)
    states(model, cache, ids)
    cache.batch_repeat_interleave(2)
    twin = cache.fork()
    cache.batch_select_indices(torch.tensor([3, 0, 2]))
    assert_near(states(model, cache, new.expand(3, -1)), torch.cat([after[1], after[0], after[1]]))
    twin.batch_select_indices(torch.tensor([True, False, False, True]))
    assert_near(states(model, twin, new.expand(2, -1)), torch.cat(after))


def step(model: PreTrainedModel, cache: OscarCache, tokens: list[int]) -> torch.Tensor:
    """Logits of (rows, 1) tokens; a token of -1 is padding."""
    ids = torch.tensor([tokens]).T
    places = torch.tensor([[len(row.codes)] for row in cache.kv_manager.sequences])
    cache.expect(torch.where(ids < 0, -1, 0))
    with torch.inference_mode():
        return model(
            ids.clamp(min=0), position_ids=places, **as_argument(cache), use_cache=True
        ).logits


@pytest.mark.parametrize("name", HYBRIDS)
def test_rows_of_a_batch_have_their_own_states(name: str) -> None:
    """Rows join and leave; padding, a row that left and a fork change no other row."""
    model = decoder(name)
    model.set_attn_implementation("oscar")
    store = PageStore("bf16")
    caches = [OscarCache("bf16", model=model, store=store) for _ in range(3)]
    for seed, cache in enumerate(caches):
        states(model, cache, prompt(20 + 7 * seed, seed=seed))
    alone = [cache.fork() for cache in caches]
    one, two, three = caches
    view = BatchView(store)
    assert all(map(view.can_take, caches))

    def check(rows: list[OscarCache | None], tokens: list[int]) -> None:
        found = step(model, view, tokens)
        for place, (cache, token) in enumerate(zip(rows, tokens, strict=True)):
            if cache is not None and token >= 0:
                twin = alone[caches.index(cache)]
                assert_near(found[place], step(model, twin, [token])[0])
                for mine, theirs in zip(cache.states, twin.states, strict=True):
                    assert_near(mine, theirs)

    view.set_rows([one, two])
    check([one, two], [5, 6])
    fork = one.fork()
    before = [state.clone() for state in fork.states]
    view.set_rows([two, three, None, one])
    check([two, three, None, one], [7, 8, -1, 9])
    check([two, three, None, one], [10, -1, -1, 11])
    view.clear_row(0)
    left = [state.clone() for state in two.states]
    check([None, three, None, one], [-1, -1, -1, 12])
    assert all(map(torch.equal, fork.states, before)) and all(map(torch.equal, two.states, left))
    view.set_rows([two])
    check([two], [13])
    # Twins, the fork and row three have their own, row two that of the view, and row one is all
    # that is left of a batch of four.
    each = sum(state.nbytes for state in fork.states)
    assert store.memory().state_bytes == (3 + 1 + 1 + 1 + 4) * each


@pytest.mark.parametrize("name", HYBRIDS)
def test_marked_states_come_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States return in the cache, a fork and a pickled copy, up to the bytes that a cache keeps."""
    model = decoder(name)
    model.set_attn_implementation("oscar")
    cache, plain = OscarCache("bf16", model=model), OscarCache("bf16", model=model)
    ids = prompt(30)
    states(model, cache, ids[:, :10])
    cache.mark()
    states(model, cache, ids[:, 10:20])
    cache.mark()
    states(model, cache, ids[:, 20:])
    each = sum(layer.nbytes for one in cache.linear_layers for layer in one.states)
    report = cache.memory()
    assert (report.by_kind["states"], report.by_kind["marks"]) == (each, 2 * each)
    assert cache.state_bytes == 3 * each and report.bf16_bytes == 2 * report.values + each
    assert sum(report.by_kind.values()) == report.kv_bytes == sum(report.by_modality.values())
    lengths = (30, 29, 20, 19, 10, 9, 0)
    assert [*map(cache.longest_crop, lengths)] == [30, 20, 20, 10, 10, 0, 0]
    pickled = pickle.loads(pickle.dumps(cache))
    twin = cache.fork()
    assert cache.store.memory().state_bytes == 4 * each  # The fork shares the marks.
    states(model, plain, ids[:, :10])
    expected = states(model, plain.fork(), ids[:, 10:])
    for one in (cache, twin, pickled):
        one.crop(-20)
        assert one.longest_crop(20) == one.get_seq_length() == 10
        for _ in range(2):
            assert_near(states(model, one, ids[:, 10:]), expected)
            one.crop(-20)
    cache.crop(-10)
    assert not cache.has_previous_state() and cache.get_seq_length() == 0
    assert_near(states(model, cache, ids[:, :10]), states(model, OscarCache("bf16"), ids[:, :10]))

    # Padding at the end has changed no states of a row in a batch.
    view = BatchView(twin.store)
    view.set_rows([twin])
    step(model, view, [5])
    before = [state.clone() for state in twin.states]
    step(model, view, [-1])
    view.clear_row(0)
    assert twin.get_seq_length() == 12 and twin.kv_manager.stored_length == 11
    assert [*map(twin.longest_crop, (12, 11, 10, 9))] == [12, 11, 10, 0]
    twin.crop(-1)
    assert all(map(torch.equal, twin.states, before)) and twin.longest_crop(11) == 11
    twin.crop(-1)

    monkeypatch.setattr(states_module, "MARK_BYTES", 2 * each)
    for _ in range(4):
        twin.mark()
        states(model, twin, ids[:, :3])
    assert sorted(twin.marks.kept) == [16, 19]
    monkeypatch.setattr(states_module, "MARK_BYTES", 0)
    twin.mark()
    assert sorted(twin.marks.kept) == [22]
    states(model, twin, ids[:, :3])
    twin.reorder_cache(torch.tensor([0]))
    assert twin.longest_crop(24) == 0


def test_what_a_hybrid_cannot(tmp_path) -> None:
    model = decoder("jamba")
    cache = OscarCache("bf16", model=model)
    states(model, cache, prompt(5))
    with pytest.raises(NotImplementedError, match=r"a\.safetensors.*Gated DeltaNet"):
        save_cache(cache, tmp_path / "a.safetensors", fingerprint="")
    state = torch.zeros(1, 2, 3)
    keys = torch.zeros(1, 2, 1, 64)
    with pytest.raises(NotImplementedError, match="layer 1 has attention and a linear-attention"):
        cache.update_conv_state(state, 1)
    with pytest.raises(NotImplementedError, match="layer 0 has attention and a linear-attention"):
        cache.update(keys, keys, 0)
    with pytest.raises(NotImplementedError, match="several linear-attention states"):
        cache.update_recurrent_state(state, 0, state_idx=1)
    with pytest.raises(InputError, match="layer 0 has linear attention"):
        cache.unpacked(0)
    cache.close()
    with pytest.raises(RuntimeError, match="closed"):
        cache.update_conv_state(state, 0)
