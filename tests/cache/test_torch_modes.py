"""OscarCache equals transformers' own cache under ``torch.autocast`` and ``torch.compile``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from oscar_mm import OscarCache
from oscar_mm.cache.cache import as_argument
from tests.cache.test_generate import IMPLEMENTATIONS, generate, logits, padded, prompt
from tests.checkpoints import build_decoder
from tests.pairs import pairs

DTYPES = (torch.bfloat16, torch.float16)
SHORT = {"single": {"input_ids": prompt(40)}, "padded": padded(40, 40, 21, 3)}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    made = {name: build_decoder(name, num_hidden_layers=2) for name in ("llama", "qwen3")}
    # As peft prepares a model for training: norms in float32 around weights in 16-bit precision.
    mixed = made["mixed"] = build_decoder("qwen3", num_hidden_layers=2).bfloat16()
    for name, module in mixed.named_modules():
        if name.endswith("norm"):
            module.float()
    return made


def two_turns(
    model: PreTrainedModel, cache: object, inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens of an answer, and the logits of a second turn."""
    ids = generate(model, cache, inputs)
    new = torch.cat([ids[:, -1:], prompt(9, batch=len(ids), seed=1)], dim=1)
    mask = torch.ones(len(ids), ids.shape[1] + 9, dtype=torch.long)
    if "attention_mask" in inputs:
        mask[:, : inputs["attention_mask"].shape[1]] = inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1)[:, -10:]
    return ids, logits(model, cache, new, attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize(
    ("name", "dtype", "inputs", "implementation"),
    pairs(("llama", "mixed"), DTYPES, SHORT, IMPLEMENTATIONS),
)
def test_autocast(models, name: str, dtype, inputs: str, implementation: str) -> None:
    model = models[name]
    with torch.autocast("cpu", dtype):
        model.set_attn_implementation("sdpa" if implementation == "oscar" else implementation)
        expected = two_turns(model, DynamicCache(config=model.config), SHORT[inputs])
        model.set_attn_implementation(implementation)
        cache = OscarCache("bf16", model=model)
        found = two_turns(model, cache, SHORT[inputs])
    assert torch.equal(found[0], expected[0])
    size = expected[1].abs().max()
    assert (found[1] - expected[1]).abs().max() < 8 * torch.finfo(dtype).eps * size
    assert cache.layers[0].dtype == dtype  # As attention reads them.
    assert cache.layers[0].recent.storage.dtype == dtype


@pytest.mark.parametrize("implementation", ["sdpa", "oscar"])
@pytest.mark.parametrize("policy", ["standard", "channel"])
def test_pages_are_packed_as_precisely_under_autocast(models, policy: str, implementation) -> None:
    """Packing keeps its dtypes; products in 16-bit precision would lose bits of keys."""
    model = models["qwen3"]
    model.set_attn_implementation(implementation)

    plain = DynamicCache(config=model.config)
    logits(model, plain, prompt(300))
    exact = plain.layers[0].keys

    def error(dtype: torch.dtype | None) -> float:
        cache = OscarCache(policy, model=model)
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            logits(model, cache, prompt(300))
            keys = cache.unpacked(0)[0]
        assert keys.dtype == (dtype or torch.float32)
        return float((keys.float() - exact).norm())

    for dtype in DTYPES:
        assert error(dtype) == pytest.approx(error(None), rel=0.01)


@pytest.mark.parametrize(
    ("policy", "implementation", "first"),
    pairs(("bf16", "standard"), IMPLEMENTATIONS, (True, False)),
)
def test_autocast_in_one_turn_only(models, policy: str, implementation: str, first: bool) -> None:
    model, ids = models["llama"], prompt(200)
    model.set_attn_implementation(implementation)
    exact, mixed = OscarCache(policy, model=model), OscarCache(policy, model=model)
    for number, part in enumerate((ids[:, :180], ids[:, 180:199], ids[:, 199:])):
        expected = logits(model, exact, part)
        with torch.autocast("cpu", torch.bfloat16, enabled=(number == 0) is first):
            found = logits(model, mixed, part).float()
    assert (found - expected).norm() < (0.1 if policy == "standard" else 0.02) * expected.norm()


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_forward(fresh_dynamo) -> None:
    model = build_decoder("llama", num_hidden_layers=1)
    options = {"max_new_tokens": 2, "min_new_tokens": 2}
    expected = generate(model, DynamicCache(config=model.config), SHORT["padded"], **options)
    model.set_attn_implementation("oscar")
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(
        generate(model, OscarCache("bf16", model=model), SHORT["padded"], **options), expected
    )
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.slow
def test_compiled_module(fresh_dynamo) -> None:
    """Its ``generate`` calls the original module, which is not compiled."""
    model = build_decoder("llama", num_hidden_layers=1)
    expected = logits(model, DynamicCache(config=model.config), prompt(30))
    compiled, cache = torch.compile(model, backend="eager"), OscarCache("bf16", model=model)
    found = [logits(compiled, cache, part) for part in prompt(30).split([20, 10], dim=1)]
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-4)
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


@pytest.mark.slow
def test_one_graph_cannot_hold_a_cache(fresh_dynamo) -> None:
    model = build_decoder("llama", num_hidden_layers=1)
    forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"OscarCache.*fullgraph=False"):
        forward(prompt(5), **as_argument(OscarCache("bf16", model=model)))
