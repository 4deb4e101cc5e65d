"""Keys with large biases on slow rotary pairs, as those of Qwen2.5-1.5B have in their first layer
(up to 354): a page's center takes the bias out, and balancing must not count it."""

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from oscar_mm import KVPolicy, OscarCache, roundtrip
from oscar_mm.cache import layer as layer_module
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.persist import load_cache, save_cache
from oscar_mm.quant.basis import sigma_from_prompt
from tests.checkpoints import build_decoder

PROMPT, ANSWER = 300, 32
IDS = torch.randint(3, 300, (1, PROMPT + ANSWER), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    made = build_decoder("qwen2", num_hidden_layers=1, rope_parameters=rope)
    bias = torch.zeros(2, 2, 32)  # KV heads, halves of rotary pairs, pairs from the fastest on
    bias[:, :, 20:] = 300 * torch.randn(2, 2, 12, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        made.model.layers[0].self_attn.k_proj.bias.copy_(bias.flatten())
    return made


@torch.no_grad()
def log_probs(model: PreTrainedModel, cache: OscarCache | DynamicCache) -> torch.Tensor:
    """Of the answer's tokens, read one by one after the prompt."""
    model.set_attn_implementation("oscar" if isinstance(cache, OscarCache) else "sdpa")
    model(IDS[:, :PROMPT], **as_argument(cache), logits_to_keep=1)
    steps = [model(x, **as_argument(cache)).logits[0] for x in IDS[:, PROMPT:].split(1, dim=1)]
    return torch.cat(steps).log_softmax(-1)


@pytest.fixture(scope="module")
def exact(model: PreTrainedModel) -> torch.Tensor:
    return log_probs(model, DynamicCache())


@pytest.mark.parametrize(
    ("policy", "most"),
    [("standard", 0.2), ("standard:window=0", 0.2), ("compact", 0.3), ("compact:window=2", 0.3)],
)
def test_answers_hold(model, exact, policy: str, most: float) -> None:
    """Of 0.6 and 3 with the bias in sigma; not balanced, 0.14 and 0.2."""
    found = log_probs(model, OscarCache(policy))
    divergence = float((exact.exp() * (exact - found)).sum(-1).mean())
    plain = log_probs(model, OscarCache(KVPolicy.preset(policy, balance=None)))
    assert divergence < most
    assert divergence < 1.3 * float((exact.exp() * (exact - plain)).sum(-1).mean())


def prompt_states(model: PreTrainedModel) -> list[torch.Tensor]:
    """Queries, keys and values of the prompt, by plain transformers."""
    model.set_attn_implementation("eager")
    cache, layer = DynamicCache(), model.model.layers[0]
    with torch.no_grad():
        model(IDS[:, :PROMPT], **as_argument(cache))
        hidden = layer.input_layernorm(model.model.embed_tokens(IDS[:, :PROMPT]))
        queries = layer.self_attn.q_proj(hidden).view(1, PROMPT, 4, 64).transpose(1, 2)
        cos, sin = model.model.rotary_emb(hidden, torch.arange(PROMPT)[None])
    one, other = queries.chunk(2, -1)
    queries = queries * cos + torch.cat([-other, one], -1) * sin
    return [queries, cache.layers[0].keys, cache.layers[0].values]


@pytest.mark.parametrize("policy", ["standard", "compact", "channel"])
def test_scores_of_what_a_round_trip_gives_back(model, policy: str) -> None:
    queries, keys, values = prompt_states(model)
    exact = queries.reshape(2, -1, 64) @ keys[0].mT / 8
    errors = []
    for given in (queries, None):
        back = roundtrip(keys, values, policy, q=given).k[0]
        error = queries.reshape(2, -1, 64) @ back.mT / 8 - exact
        errors.append(float((error - error.mean(-1, keepdim=True)).square().mean()))
    balanced, plain = errors
    assert balanced < 1.3 * plain


def test_without_a_center_the_bias_counts(model) -> None:
    """Nothing takes it out there, so that keys cost what their rms is."""
    cache = OscarCache("standard:center=false")
    log_probs(model, cache)
    queries, keys, _ = prompt_states(model)
    expected = sigma_from_prompt(queries, keys, centered=False)
    assert cache.layers[0].sigma is not None
    torch.testing.assert_close(cache.layers[0].sigma, expected, rtol=2**-7, atol=0)


def test_a_chat_of_before_goes_on_as_it_is_stored(model, tmp_path: Path, monkeypatch) -> None:
    """Its sigma is of the rms of keys, and its pages are read with that one."""

    def of_rms(queries, keys, tokens=None, *, centered=True):
        return sigma_from_prompt(queries, keys, tokens, centered=False)

    monkeypatch.setattr(layer_module, "sigma_from_prompt", of_rms)
    cache = OscarCache("standard")
    log_probs(model, cache)
    monkeypatch.undo()
    old = cache.layers[0].sigma
    assert not torch.equal(old, sigma_from_prompt(*prompt_states(model)[:2]))
    save_cache(cache, tmp_path / "chat", fingerprint="f")
    loaded, _ = load_cache(tmp_path / "chat", fingerprint="f")
    with torch.no_grad():
        for token in IDS[:, :40].split(1, dim=1):
            model.set_attn_implementation("oscar")
            one, other = (model(token, **as_argument(x)).logits for x in (cache, loaded))
            assert torch.equal(one, other)
    assert torch.equal(loaded.layers[0].sigma, old)
