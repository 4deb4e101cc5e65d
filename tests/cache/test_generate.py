"""OscarCache in decoders: equal to transformers' cache in 16-bit precision, close with 2 bits."""

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel, Qwen3VLTextConfig, Qwen3VLTextModel

from oscar_mm import KVPolicy, OscarCache
from oscar_mm.cache.cache import as_argument
from tests.checkpoints import build_decoder
from tests.pairs import pairs
from tests.tiny import randomize

DECODERS = ("llama", "mistral", "mistral_window", "qwen2", "qwen3")
IMPLEMENTATIONS = ("sdpa", "eager", "oscar")
PACKED = ("channel", "oscar", "kivi", "quarot")


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    made = {name: build_decoder(name) for name in ("llama", "mistral", "qwen2", "qwen3")}
    return made | {"mistral_window": build_decoder("mistral", sliding_window=60)}


def prompt(tokens: int, *, batch: int = 1, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 300, (batch, tokens), generator=generator)


def padded(tokens: int, *lengths: int) -> dict[str, torch.Tensor]:
    ids = prompt(tokens, batch=len(lengths))
    mask = torch.ones_like(ids)
    for row, length in enumerate(lengths):
        ids[row, : tokens - length] = mask[row, : tokens - length] = 0
    return {"input_ids": ids, "attention_mask": mask}


INPUTS = {
    "single": {"input_ids": prompt(150)},
    "padded": padded(150, 150, 61, 3),
}


def generate(
    model: PreTrainedModel, cache: object, inputs: dict, **options: object
) -> torch.Tensor:
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False} | options
    if isinstance(cache, OscarCache) and "attention_mask" in inputs:
        cache.expect(attention_mask=inputs["attention_mask"])
    return model.generate(**inputs, **as_argument(cache), **options)


def logits(model: PreTrainedModel, cache: object, ids: torch.Tensor, **inputs) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **as_argument(cache), use_cache=True, **inputs).logits


@pytest.fixture(scope="module")
def plain(models) -> Callable[..., torch.Tensor]:
    """Generate with transformers' own cache and attention."""

    @functools.cache
    def generated(name: str, inputs: str, **options: object) -> torch.Tensor:
        model = models[name]
        model.set_attn_implementation("sdpa")
        torch.manual_seed(0)
        return generate(model, DynamicCache(config=model.config), INPUTS[inputs], **options)

    return generated


@pytest.mark.parametrize(
    ("name", "implementation", "inputs"), pairs(DECODERS, IMPLEMENTATIONS, INPUTS)
)
def test_16_bit_greedy(models, plain, name: str, inputs: str, implementation: str) -> None:
    expected = plain(name, inputs)
    models[name].set_attn_implementation(implementation)
    found = generate(models[name], OscarCache("bf16"), INPUTS[inputs])
    assert torch.equal(found, expected)


# Of transformers' own implementations one is enough here: the cache hands both the same.
@pytest.mark.filterwarnings("ignore:OscarCache. expect.attention_mask")
@pytest.mark.parametrize(
    ("options", "inputs", "implementation"),
    pairs(
        (
            {"num_beams": 3, "early_stopping": True},
            {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 20, "min_new_tokens": 20},
            {"do_sample": True, "top_k": 20},
            {"do_sample": True, "top_p": 0.8, "num_return_sequences": 3},
        ),
        INPUTS,
        ("sdpa", "oscar"),
    ),
)
def test_16_bit_beams_and_sampling(
    models, plain, inputs: str, options: dict, implementation: str
) -> None:
    expected = plain("llama", inputs, **options)
    models["llama"].set_attn_implementation(implementation)
    torch.manual_seed(0)
    found = generate(models["llama"], OscarCache("bf16"), INPUTS[inputs], **options)
    assert torch.equal(found, expected)


@pytest.mark.daily("oscar-channel")
@pytest.mark.parametrize(
    ("implementation", "policy"), [("sdpa", "bf16"), ("oscar", "bf16"), ("oscar", "channel")]
)
def test_assisted_decoding(models, policy: str, implementation: str) -> None:
    """Rejected candidates are removed by crop; the answer equals that of greedy decoding."""
    model = models["llama"]
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        for weight in assistant.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    model.set_attn_implementation(implementation)
    options = {"max_new_tokens": 40, "min_new_tokens": 40}
    expected = generate(model, OscarCache(policy, model=model), INPUTS["single"], **options)
    cache = OscarCache(policy, model=model)
    found = generate(model, cache, INPUTS["single"], assistant_model=assistant, **options)
    assert found.shape == expected.shape
    if policy == "bf16":
        assert torch.equal(found, expected)
        assert cache.get_seq_length() in (found.shape[1] - 1, found.shape[1])
    else:  # chunks of candidates leave the window together, so pages begin a little earlier
        assert torch.equal(found[:, :151], expected[:, :151])


@pytest.mark.parametrize(
    ("name", "policy"),
    [*((name, "channel") for name in DECODERS), *(("llama", policy) for policy in PACKED[1:])],
)
def test_packed_attention_is_unpacked_attention(models, name: str, policy: str) -> None:
    """Attention "oscar" and "sdpa" agree over the same state; the prompt's logits are exact."""
    model = models[name]
    model.set_attn_implementation("sdpa")
    ids, new = prompt(420), prompt(9, seed=1)
    exact = logits(model, DynamicCache(config=model.config), ids)
    model.set_attn_implementation("oscar")
    cache = OscarCache(policy, model=model)
    torch.testing.assert_close(logits(model, cache, ids), exact, rtol=1e-4, atol=1e-4)
    twin = copy.deepcopy(cache)
    for part in (new[:, :1], new[:, 1:8], new[:, 8:]):
        model.set_attn_implementation("oscar")
        found = logits(model, cache, part)
        model.set_attn_implementation("sdpa")
        torch.testing.assert_close(found, logits(model, twin, part), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("policy", ["channel", "quarot"])
def test_packed_batch_is_its_rows(models, policy: str) -> None:
    """Padding has no effect: a row of a padded batch gives the same answer as alone."""
    model = models["llama"]
    model.set_attn_implementation("oscar")
    policy = KVPolicy.preset(policy, balance=None)
    inputs = padded(400, 400, 250, 30)
    batch = generate(model, OscarCache(policy, model=model), inputs)
    for row, length in enumerate((400, 250, 30)):
        alone = {"input_ids": inputs["input_ids"][row : row + 1, 400 - length :]}
        assert torch.equal(
            generate(model, OscarCache(policy, model=model), alone)[0, length:], batch[row, 400:]
        )


@pytest.mark.parametrize(
    ("name", "implementation"),
    [*((name, "oscar") for name in DECODERS), ("llama", "sdpa"), ("mistral_window", "eager")],
)
def test_second_turn(models, name: str, implementation: str) -> None:
    model = models[name]
    model.set_attn_implementation(implementation)
    cache = OscarCache("bf16", model=model)
    first = generate(model, cache, INPUTS["single"])
    past = cache.get_seq_length()
    whole = torch.cat([first, prompt(70, seed=2)], dim=1)
    found = logits(model, cache, whole[:, past:])
    model.set_attn_implementation("sdpa")
    expected = logits(model, DynamicCache(config=model.config), whole)[:, past:]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_second_turn_of_a_batch(models) -> None:
    """Pads are on the left and after a row that ended early; only real positions are compared."""
    model = models["qwen3"]
    model.set_attn_implementation("oscar")
    inputs = padded(150, 150, 61, 3)
    tail = prompt(40, batch=3, seed=3)
    tail_mask = torch.ones_like(tail)
    tail_mask[1, :7] = 0
    mask = torch.cat([inputs["attention_mask"], tail_mask], dim=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    caches = (OscarCache("bf16", model=model), DynamicCache())
    whole = torch.cat([inputs["input_ids"], tail], dim=1)
    logits(
        model,
        caches[0],
        whole[:, :150],
        attention_mask=mask[:, :150],
        position_ids=positions[:, :150],
    )
    found = logits(model, caches[0], tail, attention_mask=mask, position_ids=positions[:, 150:])
    model.set_attn_implementation("sdpa")
    expected = logits(model, caches[1], whole, attention_mask=mask, position_ids=positions)
    real = tail_mask.bool()
    torch.testing.assert_close(found[real], expected[:, 150:][real], rtol=1e-4, atol=1e-4)


@functools.cache
def logarithms(size: float, policy: str | KVPolicy) -> torch.Tensor:
    """Return log-probabilities of 40 tokens after 1000, for three prompts, by a biased model."""
    model, found = biased(size), []
    for seed in range(3):
        cache = OscarCache(policy, model=model)
        logits(model, cache, prompt(1000, seed=seed))
        found.append(logits(model, cache, prompt(40, seed=seed + 50)).log_softmax(-1))
    return torch.stack(found)


def divergence(size: float, policy: str | KVPolicy) -> float:
    """Return the mean KL divergence from 16-bit precision."""
    exact, found = logarithms(size, "bf16"), logarithms(size, policy)
    return float((exact.exp() * (exact - found)).sum(-1).mean())


@functools.cache
def biased(size: float) -> PreTrainedModel:
    """Return a Qwen2 with key biases of this size in the two slowest rotary pairs of each head."""
    model = build_decoder("qwen2")
    for layer in model.model.layers:
        bias = layer.self_attn.k_proj.bias
        with torch.no_grad():
            bias.zero_()
            bias.view(2, 64)[:, [30, 31, 62, 63]] = size * torch.tensor([1.0, -1.0, 0.7, -1.3])
    model.set_attn_implementation("oscar")
    return model


@pytest.mark.daily("100")
@pytest.mark.parametrize("size", [30, 100])
@pytest.mark.parametrize(
    "policy", ["oscar", "kivi", KVPolicy.preset("channel", balance=None)], ids=str
)
def test_large_key_biases(policy: str | KVPolicy, size: float) -> None:
    """Zero points remove constants, also rotated ones; keys quantized per token are ruined."""
    found = divergence(size, policy)
    assert found < 0.2
    assert divergence(size, "quarot") > 10 * found


def test_large_key_biases_balanced() -> None:
    assert divergence(30, "channel") < 0.2


def test_larger_key_biases_balanced() -> None:
    assert divergence(100, "channel") < 1.2 * divergence(
        100, KVPolicy.preset("channel", balance=None)
    )


def test_language_model_of_qwen3_vl() -> None:
    """Its rotary embedding and positions differ, which must not affect the cache."""
    config = Qwen3VLTextConfig(
        vocab_size=300,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    )
    model = Qwen3VLTextModel(config).float().eval()
    randomize(model, 0)
    ids = prompt(300)

    def states(cache: object, implementation: str) -> torch.Tensor:
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            parts = [
                model(part, **as_argument(cache), use_cache=True).last_hidden_state
                for part in ids.split([250, 49, 1], dim=1)
            ]
        return torch.cat(parts, dim=1)

    expected = states(DynamicCache(), "sdpa")
    for implementation in IMPLEMENTATIONS:
        found = states(OscarCache("bf16", model=model), implementation)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    cache = OscarCache("channel", model=model)
    packed = states(cache, "oscar")
    torch.testing.assert_close(packed[:, :250], expected[:, :250], rtol=1e-4, atol=1e-4)
    assert cache.layers[0].sigma.shape == (1, 32)  # from the QK-norm weights


@pytest.mark.parametrize("where", ["attention", "mlp"])
@pytest.mark.parametrize("implementation", ["sdpa", "oscar"])
def test_exception_in_the_middle_layer(implementation: str, where: str) -> None:
    model = build_decoder("llama", num_hidden_layers=3)
    model.set_attn_implementation(implementation)
    middle: nn.Module = model.model.layers[1]
    module = middle.self_attn.k_proj if where == "attention" else middle.mlp

    def broken(*_: object) -> None:
        raise KeyboardInterrupt

    for past in (0, 150):
        cache = OscarCache("channel", model=model)
        if past:
            logits(model, cache, prompt(past))
        hook = module.register_forward_hook(broken)
        with pytest.raises(KeyboardInterrupt):
            logits(model, cache, prompt(5))
        hook.remove()
        for tokens in (5, 1):
            with pytest.raises(RuntimeError, match=r"reset\(\)"):
                logits(model, cache, prompt(tokens))
        cache.reset()
        found = logits(model, cache, prompt(20))
        assert torch.equal(found, logits(model, OscarCache("channel", model=model), prompt(20)))
