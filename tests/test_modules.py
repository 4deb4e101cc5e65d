"""Whatever changes how modules run, or the weights that they run with, is seen."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from transformers.activations import GELUActivation
from transformers.models.qwen3_vl import modeling_qwen3_vl as qwen

from oscar_mm import OscarOmniPipeline, OscarVLPipeline, modules
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.modules import WeightsWatch
from tests.pipelines.conftest import NEVER
from tests.watched_weights import watched_key


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return OscarVLPipeline("pocket-vl", device="cpu").model


def doubled(function: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper that says it is what it wraps."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return 2 * function(*args, **kwargs)

    return run


def backwards(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.wraps(function)(lambda q, k, cosine, sine: function(q, k, cosine, -sine))


def of_another(self: Any, x: torch.Tensor) -> torch.Tensor:
    return x


REPLACED = {
    "MLP": (qwen.Qwen3VLTextMLP, "forward", doubled(qwen.Qwen3VLTextMLP.forward)),
    "of another class": (qwen.Qwen3VLTextMLP, "forward", qwen.Qwen3VLVisionMLP.forward),
    "norm": (qwen.Qwen3VLTextRMSNorm, "forward", of_another),
    "attention": (
        qwen.Qwen3VLTextAttention,
        "forward",
        doubled(qwen.Qwen3VLTextAttention.forward),
    ),
    "layer": (
        qwen.Qwen3VLTextDecoderLayer,
        "forward",
        doubled(qwen.Qwen3VLTextDecoderLayer.forward),
    ),
    "frequencies": (qwen.Qwen3VLTextRotaryEmbedding, "forward", of_another),
    "product": (nn.Linear, "forward", doubled(nn.Linear.forward)),
    "any call": (nn.Module, "__call__", doubled(nn.Module.__call__)),
    "call of a class": (qwen.Qwen3VLTextMLP, "__call__", of_another),
    "rotation": (qwen, "apply_rotary_pos_emb", backwards(qwen.apply_rotary_pos_emb)),
}


@pytest.mark.parametrize("name", REPLACED)
def test_code_that_was_replaced(model, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, attribute, function = REPLACED[name]
    key = watched_key(model)
    before = key()
    monkeypatch.setattr(owner, attribute, function)
    assert not supports(model) and key() != before
    monkeypatch.undo()
    assert supports(model) and key() == before


@pytest.mark.parametrize(
    "register", [register_module_forward_hook, register_module_forward_pre_hook]
)
def test_hooks_on_all_modules(model, register: Callable[..., Any]) -> None:
    key = watched_key(model)
    before = key()
    hook = register(lambda *_: None)
    try:
        assert not supports(model) and key() != before
    finally:
        hook.remove()
    assert supports(model) and key() == before


def test_a_kernel_in_an_instance(model) -> None:
    """As ``kernels.kernelize`` puts them in."""
    mlp = model.get_decoder().layers[1].mlp
    key = watched_key(model)
    before = key()
    mlp.forward = of_another.__get__(mlp)
    assert not supports(model) and key() != before
    del mlp.forward
    assert supports(model)


def test_parts_of_other_arithmetic(model) -> None:
    for name, part in (
        ("mlp.act_fn", GELUActivation()),
        ("input_layernorm", nn.RMSNorm(256)),
        ("self_attn.q_norm", nn.Identity()),
    ):
        changed = copy.deepcopy(model)
        changed.get_decoder().layers[1].set_submodule(name, part)
        assert not supports(changed), name


def test_gates_of_experts() -> None:
    model = OscarOmniPipeline("pocket-omni", device="cpu").model
    assert supports(model)
    model.get_decoder().layers[0].mlp.experts.act_fn = GELUActivation()
    assert not supports(model)


@torch.inference_mode()
def greedy(plain: Any, prompt: Prompt, tokens: int) -> list[int]:
    """What plain transformers answers, without a cache."""
    ids, positions = prompt.inputs["input_ids"], prompt.positions
    for _ in range(tokens):
        logits = plain(input_ids=ids, position_ids=positions, use_cache=False).logits[:, -1:]
        ids = torch.cat([ids, logits.argmax(-1)], dim=1)
        positions = torch.cat([positions, positions[..., -1:] + 1], dim=-1)
    return ids[0, -tokens:].tolist()


@pytest.mark.daily("norm")
@pytest.mark.parametrize("name", ["MLP", "norm", "rotation"])
def test_answers_obey_what_was_replaced(qwen3_vl_folder, name: str, monkeypatch) -> None:
    """Modules are replaced after an answer: then prompt and answer run by the same code."""
    pipe = OscarVLPipeline(qwen3_vl_folder, device="cpu", policy="bf16")
    pipe.model.generation_config.eos_token_id = NEVER
    plain = copy.deepcopy(pipe.model)
    plain.set_attn_implementation("sdpa")
    ask = {"images": None, "prompt": "What did the user ask about the sign?", "max_new_tokens": 8}
    prompt = pipe.read_request(first_turn(ask["prompt"]))
    before = pipe(**ask).token_ids
    assert before == greedy(plain, prompt, 8)
    owner, attribute, function = REPLACED[name]
    monkeypatch.setattr(owner, attribute, function)
    found = pipe(**ask).token_ids
    assert found == greedy(plain, prompt, 8) != before
    monkeypatch.undo()
    assert pipe(**ask).token_ids == before


def another_tensor(model: Any) -> None:
    linear = model.get_decoder().layers[0].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.clone())


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda model: model.lm_head.weight.detach().mul_(1.5),
    "loaded": lambda model: model.load_state_dict(model.state_dict()),
    "another tensor": another_tensor,
}


@pytest.mark.parametrize("name", CHANGES)
def test_weights_that_were_written_to(model, name: str) -> None:
    changed = copy.deepcopy(model)
    key = watched_key(changed)
    before = key()
    assert key() == before
    CHANGES[name](changed)
    assert key() != before
    assert supports(changed)


def test_a_tensor_at_the_address_of_one_that_is_gone(model) -> None:
    changed = copy.deepcopy(model)
    linear, keys = changed.get_decoder().layers[0].mlp.up_proj, []
    key = watched_key(changed)
    for _ in range(20):
        linear.weight = None
        linear.weight = nn.Parameter(torch.zeros(512, 256))
        keys.append(key())
    assert len(set(keys)) == len(keys)


def test_a_key_is_the_same_object_until_something_changes(
    model, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = WeightsWatch(model)
    key = watch.key
    monkeypatch.setattr(modules, "weights_key", lambda model: pytest.fail("a key is made anew"))
    assert watch.key is key


def other_child(model: Any) -> None:
    model.get_decoder().layers[0].mlp.up_proj = nn.Linear(256, 512, bias=False)


def swapped_children(model: Any) -> None:
    layers = model.get_decoder().layers
    layers[0], layers[1] = layers[1], layers[0]


STRUCTURES: dict[str, Callable[[Any], object]] = {
    "another child": other_child,
    "a further child": lambda model: model.get_decoder().layers.append(nn.Identity()),
    "a child less": lambda model: model.get_decoder().layers.__delitem__(-1),
    "children in another order": swapped_children,
    "a weight less": lambda model: model.lm_head.register_parameter("weight", None),
}


def test_a_second_thread_never_gets_the_key_before_a_change(model, monkeypatch) -> None:
    watch, key_of, found = WeightsWatch(model), modules.weights_key, list[object]()
    before = watch.key
    with torch.no_grad():
        next(model.parameters()).mul_(2)

    def meanwhile(changed: nn.Module) -> tuple[object, ...]:
        monkeypatch.setattr(modules, "weights_key", key_of)
        found.append(watch.key)  # While the first thread computes the key.
        return key_of(changed)

    monkeypatch.setattr(modules, "weights_key", meanwhile)
    found.append(watch.key)
    assert found == [key_of(model)] * 2 and found[0] != before


@pytest.mark.parametrize("name", STRUCTURES)
def test_modules_that_were_exchanged(model, name: str) -> None:
    changed = copy.deepcopy(model)
    key = watched_key(changed)
    before = key()
    STRUCTURES[name](changed)
    assert key() != before


def test_a_watch_does_not_keep_modules_alive(model) -> None:
    changed = copy.deepcopy(model)
    watch = WeightsWatch(changed)
    _, old = watch.key, weakref.ref(changed.get_decoder().layers[0].mlp.up_proj.weight)
    other_child(changed)
    gc.collect()
    assert old() is None


def test_a_child_that_went_to_the_next_module() -> None:
    model = nn.ModuleList([nn.ModuleList([nn.ReLU(), nn.Tanh()]), nn.ModuleList([nn.ELU()])])
    key = watched_key(model)
    before = key()
    [relu, tanh], [elu] = model
    model[0]._modules, model[1]._modules = {"0": relu}, {"0": tanh, "1": elu}
    assert key() != before
