"""One token through a decoder: ``TokenLayers`` against transformers' own modules."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from torch import nn
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrizations
from transformers.integrations.finegrained_fp8 import FP8Linear

from oscar_mm import OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.prefill import MAX_TOKENS, in_pieces
from oscar_mm.fast_decode.decoder import FastDecoder, _Part, supports
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.modality import Modality
from oscar_mm.pipelines.families.qwen3_vl import Qwen3VL
from tests.watched_weights import watched_key

PIPELINES = {
    "pocket-vl": OscarVLPipeline,
    "pocket-llava": OscarVLPipeline,
    "pocket-omni": OscarOmniPipeline,
}
ROWS, PAST = 3, 40


@pytest.fixture(scope="module", params=PIPELINES)
def model(request) -> nn.Module:
    name = request.param
    return PIPELINES[name](name, device="cpu", dtype="float32").model


def axes(model: nn.Module) -> tuple[int, ...]:
    rope = model.config.get_text_config(decoder=True).rope_parameters
    return (4,) if "mrope_section" in rope else ()


def filled(model: nn.Module, policy: str) -> OscarCache:
    """A cache of random tokens, rows of unequal length."""
    cache = OscarCache(policy, model=model)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, 60, (ROWS, PAST), generator=generator)
    modalities = torch.full((ROWS, PAST), int(Modality.TEXT))
    modalities[1, :7] = -1
    cache.expect(modalities)
    positions = torch.arange(PAST).expand(*axes(model), ROWS, PAST)
    model(input_ids=ids, position_ids=positions, **as_argument(cache), use_cache=True)
    return cache


def both(
    model: nn.Module,
    layers: FastDecoder,
    caches: list[OscarCache],
    ids: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a step, by the modules on the first cache and by the layers on the second."""
    for cache in caches:
        cache.expect(torch.zeros(len(ids), 1, dtype=torch.long))
    expected = model(
        input_ids=ids, position_ids=positions, **as_argument(caches[0]), use_cache=True
    ).logits[:, -1]
    return expected, layers(ids, positions, caches[1])


@pytest.mark.daily("bf16", "pocket-vl-channel")
@pytest.mark.parametrize("policy", ["bf16", "channel"])
@torch.inference_mode()
def test_logits_are_those_of_the_modules(model, policy: str) -> None:
    assert supports(model)
    layers, steps = FastDecoder(model), 4
    caches = [filled(model, policy) for _ in range(2)]
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        ids = torch.randint(20, 60, (ROWS, 1), generator=generator)
        # A picture's positions differ from axis to axis.
        positions = torch.full((*axes(model), ROWS, 1), PAST + step)
        if positions.ndim == 3:
            positions[1:] += torch.arange(3)[:, None, None]
        expected, found = both(model, layers, caches, ids, positions)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    keys = [
        cache.layers[-1].unpacked(cache.kv_manager.sequences, PAST + steps)[0] for cache in caches
    ]
    assert (keys[0] - keys[1]).abs().max() < 1e-4 * keys[0].abs().max()


@pytest.mark.daily("pocket-vl")
def test_layers_on_two_devices_are_those_on_one(model) -> None:
    """What is on the second of them comes over, eagerly and in what is recorded."""
    # Tensors on "cpu:0" say that they are on "cpu", so everything comes over every time.
    second = torch.device("cpu", 0)
    whole, parted = FastDecoder(model), FastDecoder(model)
    [part] = parted._parts
    parted._parts = [replace(part, layers=part.layers[:1]), _Part(second, part.layers[1:])]
    caches = [filled(model, "bf16") for _ in range(3)]
    ids, positions = torch.tensor([[21], [22], [23]]), torch.full((*axes(model), ROWS, 1), PAST)
    recorded, devices = None, []

    def record(function, device):
        devices.append(device)
        return function

    for _ in range(4):
        for cache in caches:
            cache.expect(torch.zeros(ROWS, 1, dtype=torch.long))
        expected = whole(ids, positions, caches[0])
        assert torch.equal(parted(ids, positions, caches[1]), expected)
        if recorded is None:
            recorded = parted.captured(record, ids, positions, caches[2])
        assert torch.equal(recorded(), expected)
        ids += 3
        positions += 1
    assert devices == [torch.device("cpu"), second]


def test_what_accelerate_puts_around_modules_is_known_where_weights_stay(model) -> None:
    stays, comes_and_goes = copy.deepcopy(model), copy.deepcopy(model)
    names = [name for name, _ in stays.named_children()]
    dispatch_model(stays, dict.fromkeys(names, "cpu"), main_device="cpu", force_hooks=True)
    assert hasattr(stays.get_decoder(), "_hf_hook") or hasattr(stays, "_hf_hook")
    assert supports(stays)
    cpu_offload(comes_and_goes, torch.device("cpu"))
    assert not supports(comes_and_goes)


def test_layers_that_are_sharded_otherwise_are_left_to_their_modules(model) -> None:
    attention = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}

    def known(divided: dict[str, int]) -> bool:
        copied = copy.deepcopy(model)
        for layer in copied.get_decoder().layers:
            for name, dimension in divided.items():
                getattr(layer.self_attn, name).weight.placements = (Shard(dimension),)
        return supports(copied)

    assert known({}) and known(attention)
    assert not known(attention | {"o_proj": 0})
    assert not known({name: 1 - dimension for name, dimension in attention.items()})
    del attention["k_proj"]
    assert not known(attention)


class Packed(nn.Module):
    """Shaped like the layers of GPTQ and AWQ: codes and scales as buffers, no ``weight``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scales = linear.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qweight * self.scales, self.bias)


class Adapted(nn.Module):
    """Shaped like a layer of PEFT: it shows the weight that it goes beyond."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.lora = linear, nn.Linear(linear.in_features, linear.out_features)

    @property
    def weight(self) -> torch.Tensor:
        return self.base_layer.weight

    @property
    def bias(self) -> torch.Tensor | None:
        return self.base_layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora(x)


@pytest.mark.daily("pocket-vl")
@pytest.mark.parametrize("kind", [Packed, Adapted, FP8Linear])
def test_layers_of_others_are_left_to_their_modules(model, kind: type[nn.Module]) -> None:
    changed = copy.deepcopy(model)
    attention = changed.get_decoder().layers[1].self_attn
    linear = attention.o_proj
    given = (linear.in_features, linear.out_features) if kind is FP8Linear else (linear,)
    attention.o_proj = kind(*given)
    assert not supports(changed)
    if kind is FP8Linear:
        return  # Its kernels need a GPU.
    caches = [OscarCache("bf16", model=model) for _ in range(2)]
    ids = torch.randint(20, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(12).expand(*axes(changed), 1, -1)
    for cache in caches:
        changed(input_ids=ids, position_ids=positions, **as_argument(cache), use_cache=True)
    step = {"input_ids": ids[:, :1], "position_ids": positions[..., :1] + 12, "use_cache": True}
    expected = changed(**step, **as_argument(caches[0])).logits[:, -1]
    steps = GraphRunner(changed, caches[1], 1, axes(changed) and (4,), torch.device("cpu"))
    steps.place([12])
    found = steps(ids[0, :1], torch.tensor([False]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_code_that_read_hidden_states_changes_nothing() -> None:
    """transformers leaves hooks behind, which do nothing until somebody asks again."""
    model, ids = OscarVLPipeline("pocket-vl", device="cpu").model, torch.tensor([[30, 31, 32]])
    asked = {"output_hidden_states": True, "output_attentions": False}
    hidden = model(input_ids=ids, **asked).hidden_states
    assert any(module._forward_hooks for module in model.modules())
    assert supports(model)
    again = model(
        input_ids=ids, **as_argument(OscarCache("bf16", model=model)), **asked
    ).hidden_states
    assert len(again) == len(hidden) and torch.allclose(again[-1], hidden[-1], atol=1e-5)


@pytest.mark.daily("pocket-vl")
def test_a_changed_model_is_left_to_its_modules(model) -> None:
    def watched(copied: nn.Module) -> None:
        copied.register_forward_hook(lambda *_: None)

    def hooked(copied: nn.Module) -> None:
        copied.get_decoder().layers[1].self_attn.register_forward_hook(lambda *_: None)

    def replaced(copied: nn.Module) -> None:
        copied.get_decoder().norm.forward = lambda x: x

    def adapted(copied: nn.Module) -> None:
        attention = copied.get_decoder().layers[0].self_attn
        attention.q_proj = type("Adapted", (nn.Linear,), {})(256, 512, bias=False)

    def unknown(copied: nn.Module) -> None:
        copied.get_decoder().layers[2].__class__ = type("OtherLayer", (nn.Module,), {})

    def parametrized(copied: nn.Module) -> None:
        parametrizations.weight_norm(copied.get_decoder().layers[0].self_attn.q_proj)

    def narrow(copied: nn.Module) -> None:
        linear = copied.get_decoder().layers[0].self_attn.q_proj
        linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn))

    for change in (watched, hooked, replaced, adapted, unknown, parametrized, narrow):
        changed = copy.deepcopy(model)
        key = watched_key(changed)
        before = key()
        assert key() == before
        change(changed)
        assert not supports(changed), change.__name__
        assert key() != before, change.__name__


def test_our_own_hooks_and_layers_change_no_key(model) -> None:
    key = watched_key(model)
    before = key()
    with (
        PromptLayers(model, 64).reading(OscarCache("bf16", model=model)),
        in_pieces(model, MAX_TOKENS + 1, Qwen3VL.layout),
    ):
        assert any("forward" in vars(layer) for layer in model.get_decoder().layers)
        assert key() == before
    moved = copy.deepcopy(model)
    key = watched_key(moved)
    before = key()
    moved.get_decoder().norm.weight.data = moved.get_decoder().norm.weight.clone()
    assert key() != before, "weights at another address"
