"""LoRA adapters and quantized weights in the fast decoder, against the modules."""

import copy

import pytest
import torch
from torch import nn

from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.fast_decode.decoder import FastDecoder, supports
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.modality import Modality
from oscar_mm.pipelines.weight_formats import quantize
from tests.fast_decode.test_decoder import PAST, ROWS, axes, both, filled

peft = pytest.importorskip("peft")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
TARGETS = {
    "queries and values": ["q_proj", "v_proj"],
    "all": [*ATTENTION, "gate_proj", "up_proj", "down_proj"],
    "up and down": ["up_proj", "down_proj"],
}


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return OscarVLPipeline("pocket-vl", device="cpu", dtype="float32").model


def adapted(model: nn.Module, targets: list[str], **options) -> tuple[nn.Module, nn.Module]:
    """A copy with two adapters, "default" and "b": PEFT's model, and the model within."""
    torch.manual_seed(0)
    pattern = rf".*language_model.*\.({'|'.join(targets)})"
    configs = [
        peft.LoraConfig(
            r=r, lora_alpha=24, target_modules=pattern, init_lora_weights=False, **options
        )
        for r in (4, 6)
    ]
    whole = peft.get_peft_model(copy.deepcopy(model), configs[0]).eval()
    whole.add_adapter("b", configs[1])
    return whole, whole.base_model.model


def steps(model: nn.Module) -> float:
    """Largest relative difference of logits between the fast decoder and the modules."""
    layers, worst = FastDecoder(model), 0.0
    caches = [filled(model, "bf16") for _ in range(2)]
    for step in range(3):
        ids = torch.arange(20, 20 + ROWS)[:, None] + step
        positions = torch.full((*axes(model), ROWS, 1), PAST + step)
        expected, found = both(model, layers, caches, ids, positions)
        worst = max(worst, float((found - expected).abs().max() / expected.abs().max()))
    return worst


def logits(model: nn.Module, reading: bool) -> torch.Tensor:
    """Logits of a prompt, by our prompt layers or by the modules."""
    cache = OscarCache("bf16", model=model)
    cache.expect(torch.full((1, 40), int(Modality.TEXT)))
    ids = torch.arange(20, 60)[None]
    arguments = {"input_ids": ids, **as_argument(cache), "use_cache": True}
    if reading:
        with PromptLayers(model, 16, capture=None).reading(cache):
            return model(**arguments).logits
    return model(**arguments).logits


@pytest.mark.daily("all")
@pytest.mark.parametrize("targets", TARGETS)
@torch.inference_mode()
def test_adapters_add_what_they_add_in_peft(plain, targets) -> None:
    whole, model = adapted(plain, TARGETS[targets])
    base = logits(plain, reading=False)
    seen = [base]
    for active in (["default"], ["b"], ["default", "b"]):
        whole.base_model.set_adapter(active)
        assert supports(model)
        assert steps(model) < 1e-5
        expected = logits(model, reading=False)
        torch.testing.assert_close(logits(model, reading=True), expected, rtol=1e-4, atol=1e-4)
        assert all((expected - other).abs().max() > 1e-2 for other in seen), "each acts"
        seen.append(expected)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("b", 0.5)
    assert steps(model) < 1e-5
    whole.base_model.disable_adapter_layers()
    assert supports(model) and steps(model) < 1e-5
    torch.testing.assert_close(logits(model, reading=True), base, rtol=1e-4, atol=1e-4)
    whole.base_model.enable_adapter_layers()
    whole.merge_adapter()
    assert supports(model) and steps(model) < 1e-5


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True}])
@torch.inference_mode()
def test_other_adapters_run_as_their_modules(plain, options) -> None:
    _, model = adapted(plain, ["q_proj"], **options)
    assert not supports(model)


@torch.inference_mode()
def test_dropout_and_hooks_are_left_to_the_modules(plain) -> None:
    whole, model = adapted(plain, ["q_proj"], lora_dropout=0.5)
    assert supports(model) and steps(model) < 1e-5, "in eval mode, nothing is dropped"
    whole.train()
    assert not supports(model)
    whole.eval()
    hooked = model.get_decoder().layers[0].self_attn.q_proj
    handle = hooked.register_forward_hook(lambda *_: None)
    assert not supports(model)
    handle.remove()
    assert supports(model)


@pytest.mark.parametrize("weights", ["fp8", "int4"])
@torch.inference_mode()
def test_quantized_weights(plain, weights) -> None:
    model = copy.deepcopy(plain)
    quantize(model, model.get_decoder(), weights)
    assert supports(model) and steps(model) < 1e-5
    torch.testing.assert_close(
        logits(model, reading=True), logits(model, reading=False), rtol=1e-4, atol=1e-4
    )
    whole, adapted_model = adapted(model, TARGETS["all"])
    assert supports(adapted_model) and steps(adapted_model) < 1e-5
    before = logits(adapted_model, reading=True)
    whole.base_model.disable_adapter_layers()
    assert (logits(adapted_model, reading=True) - before).abs().max() > 1e-2
