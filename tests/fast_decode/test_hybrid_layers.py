"""Decode steps of hybrids in few launches, against transformers' own modules."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oscar_mm import OscarCache, OscarVLPipeline
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.states import StateTable
from oscar_mm.engine import decode_runner
from oscar_mm.engine.message import first_turn
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.fast_decode import delta as delta_module
from oscar_mm.fast_decode import graph_runner, hybrid_layers
from oscar_mm.fast_decode import layers as layers_module
from oscar_mm.fast_decode.centered_norm import CenteredNorm, CenteredNormKernel
from oscar_mm.fast_decode.decoder import FastDecoder, supports
from oscar_mm.fast_decode.experts_torch import MixtureArguments, experts_by_torch
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.fast_decode.hybrid_layers import DeltaLayer
from oscar_mm.fast_decode.prompt_layers import PromptLayers
from oscar_mm.kernels.launch import ELEMENTS
from oscar_mm.kernels.self_check import relative_error
from tests.checkpoints import build_decoder
from tests.fast_decode.test_graph_runner import Repeat
from tests.lora import save_adapter
from tests.pipelines.conftest import NEVER, exact
from tests.pipelines.test_text_models import MODELS
from tests.prompts import REQUESTS
from tests.tiny_qwen3_5 import qwen3_5

HEADS = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
"""Sizes of heads that the kernel takes."""


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "qwen3_next", "qwen3_5_text"])
def model(request) -> Any:
    if request.param in MODELS:
        kind, fields = MODELS[request.param]
        made = build_decoder(kind, **fields).eval()
    else:
        folder = request.getfixturevalue(f"{request.param}_folder")
        made = exact(OscarVLPipeline, folder).model
    made.set_attn_implementation("oscar")
    return made


@torch.inference_mode()
def both(model: Any, rows: int, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Logits of steps, and states at their end, by fast layers and by modules."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(0)

    def ids(tokens: int) -> torch.Tensor:
        return torch.randint(5, 200, (rows, tokens), generator=generator).to(device)

    axes = (3,) if hasattr(model.config, "vision_config") else ()
    caches, prompt, layers = [OscarCache("bf16") for _ in range(2)], ids(7), FastDecoder(model)
    for cache in caches:
        model(input_ids=prompt, **as_argument(cache), use_cache=True)
    found = []
    for number in range(steps):
        tokens, positions = ids(1), torch.full((*axes, rows, 1), 7 + number, device=device)
        fast = layers(tokens, positions, caches[0])
        inputs = {"input_ids": tokens, "position_ids": positions}
        output = model(**inputs, **as_argument(caches[1]), use_cache=True)
        found.append((fast, output.logits[:, -1]))
    return found + list(zip(*(cache.states for cache in caches), strict=True))


@pytest.mark.daily("qwen3_5_moe", "qwen3_next")
def test_steps_are_those_of_the_modules(model) -> None:
    assert supports(model) and not PromptLayers.takes(model)
    for rows in (1, 3):
        for found, expected in both(model, rows, 4):
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


def test_gates_of_another_format_have_their_own_launch(
    model, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = model.get_decoder().layers[0]
    together = hybrid_layers.hybrid_launches(layer)
    monkeypatch.setattr(hybrid_layers, "weight_bits", id)  # Each module has its own format.
    apart = hybrid_layers.hybrid_launches(layer)
    assert len(together) == 1 and len(apart) == 2 and together[0] == apart[0] + apart[1]
    for found, expected in both(model, 2, 2):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("kind", ["fp8", "int4", "adapter"])
def test_other_weights(kind: str, qwen3_5_folder: Path, tmp_path: Path) -> None:
    """Quantized weights, and LoRA around the products of a linear-attention layer."""
    source, options = qwen3_5_folder, {"weights": kind}
    if kind == "adapter":
        pytest.importorskip("peft")
        targets = ["q_proj", "in_proj_qkv", "in_proj_z", "in_proj_a", "out_proj", "down_proj"]
        source, options = save_adapter(source, tmp_path, target_modules=targets), {}
    model = OscarVLPipeline(source, policy="bf16", device="cpu", **options).model
    assert supports(model)
    for found, expected in both(model, 3, 2):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("weights", [None, "fp8", "int4"])
def test_a_shared_expert_in_few_launches(
    weights: str | None, qwen3_5_moe_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, with PyTorch operations for the kernels."""
    model = OscarVLPipeline(
        qwen3_5_moe_folder, policy="bf16", device="cpu", dtype="float32", weights=weights
    ).model
    calls = list[MixtureArguments]()

    def mixture(arguments: MixtureArguments) -> torch.Tensor:
        calls.append(arguments)
        return experts_by_torch(arguments)

    monkeypatch.setattr(layers_module, "expert_kernels", lambda *_, **__: mixture)
    for rows in (1, 3):
        for found, expected in both(model, rows, 4):
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert len(calls) == 2 * 4 * 3
    assert all(one.norm is None and one.residual is not None for one in calls)
    # An adapter around one of its products, or a bias, leave the mixture to its module.
    mlp = model.get_decoder().layers[0].mlp
    mlp.shared_expert.down_proj.bias = torch.nn.Parameter(torch.zeros(64))
    assert DeltaLayer.of(model.get_decoder().layers[0], StateTable()).experts is None


def test_other_parts_run_as_modules(model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of the convolution, another activation, and norms that are not centered."""
    mixer = model.get_decoder().layers[0].linear_attn
    monkeypatch.setattr(mixer, "activation", "gelu")
    assert not supports(model)
    monkeypatch.undo()
    monkeypatch.setattr(mixer.conv1d, "bias", torch.nn.Parameter(torch.zeros(1)))
    assert not supports(model)
    monkeypatch.undo()
    monkeypatch.delattr(model.get_decoder().layers[0].input_layernorm, "eps")
    assert not supports(model)


def test_a_centered_norm_keeps_all_bits_of_its_weight() -> None:
    weight = torch.tensor([2.0**-9, -(2.0**-9), 1.0, 0.0]).bfloat16()
    x = torch.tensor([[256.0, 256.0, 2.0, -256.0]]).bfloat16()
    scaled = x.double() / x.double().square().mean().sqrt()
    expected = (scaled * (1 + weight.double())).bfloat16()
    assert torch.equal(CenteredNorm(weight, 0.0).at_once(x), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ELEMENTS)
@pytest.mark.parametrize(("rows", "width"), [(1, 8), (5, 4096), (300, 16384)])
def test_centered_norm_on_a_gpu(dtype: torch.dtype, rows: int, width: int) -> None:
    assert CenteredNormKernel.of(dtype, torch.device("cuda", 0)) is not None
    x = torch.randn(rows, width, device="cuda").to(dtype)
    norm = CenteredNorm(torch.randn(width, device="cuda").to(dtype), 1e-6)
    wide = x.double()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    expected *= 1 + norm.weight.double()
    error = (norm.at_once(x).double() - expected).abs()
    assert bool((error <= torch.finfo(dtype).eps * expected.abs() + 1e-6).all())


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def on_gpu(request, tmp_path_factory: pytest.TempPathFactory) -> OscarVLPipeline:
    folder: Path = tmp_path_factory.mktemp("gpu") / "qwen3_5"
    # Experts of sizes that the kernels take, and all of them for each token: rounding would change
    # which are chosen.
    experts = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 256)
    experts["num_experts_per_tok"] = 4
    sizes = HEADS | (experts if request.param else {})
    qwen3_5(folder, seed=3, moe=request.param, hidden_size=256, **sizes)
    pipe = OscarVLPipeline(folder, device="cuda", dtype="bfloat16", policy="compact")
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


@pytest.mark.gpu
def test_steps_on_a_gpu(on_gpu: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits and states, by the kernels and by modules in the same precision."""
    calls = []
    monkeypatch.setattr(
        delta_module.DeltaKernel,
        "__call__",
        lambda self, given, run=delta_module.DeltaKernel.__call__: (
            calls.append(given) or run(self, given)
        ),
    )
    for rows in (1, 3, 17):
        for found, expected in both(on_gpu.model, rows, 4):
            assert relative_error(found.flatten(1), expected.flatten(1)) <= 0.05
    assert len(calls) >= 3 * 2 * 4


def states_of(cache: OscarCache) -> list[torch.Tensor]:
    return [state for layer in cache.linear_layers for state in layer.states]


def steps_of_a_batch(pipe: OscarVLPipeline, caches: list[OscarCache], capture: Any) -> list[Any]:
    """Logits of rows that join, move, end and leave, and the states of their caches at the end.

    Captured steps are launched early, before it is known which rows have ended.
    """
    view, found = BatchView(pipe.store), []
    view.sigmas = caches[0].sigmas
    runner = GraphRunner(pipe.model, view, 4, (4,), pipe.family.device, capture)
    first, second, third = caches
    for rows, ended, since in (
        ([first, second, None, None], (), 0),
        ([second, third, None, first], (1,), 3),
        ([None, first, second, None], (2,), 0),
    ):
        view.set_rows(rows)
        runner.place([0 if cache is None else cache.get_seq_length() for cache in rows])
        given = [torch.arange(4, device=pipe.family.device) + 7 * number for number in range(6)]
        for number, tokens in enumerate(given[:5]):
            over = [
                cache is None or (place in ended and number >= since)
                for place, cache in enumerate(rows)
            ]
            if number == since:
                ending = [x.clone() for place in ended for x in states_of(rows[place])]
            logits = runner(tokens, torch.tensor(over))
            found += [logits[place].clone() for place in range(4) if not over[place]]
            if capture is not None:
                runner.ahead(given[number + 1], torch.tensor(over))
        for place in ended:
            assert all(map(torch.equal, ending, states_of(rows[place])))
    assert runner.captures == (capture is not None)
    return found + [state for cache in caches for state in states_of(cache)]


@torch.inference_mode()
def check_batch(pipe: OscarVLPipeline, captures: tuple[Any, ...]) -> list[list[torch.Tensor]]:
    """Compare the steps of a batch bit for bit, by several capture functions, and return them."""
    caches = []
    for name in ("text", "image", "video"):
        request, cache = REQUESTS[name], pipe.new_cache()
        media = pipe.read_media(request.images, request.videos)
        prompt = pipe.family.prompt(first_turn(request.prompt, media.parts), media)
        read_prompt(pipe.model, prompt.to(pipe.family.device), cache)
        caches.append(cache)
    found = [
        steps_of_a_batch(pipe, [cache.fork() for cache in caches], capture) for capture in captures
    ]
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))
    return found


def test_steps_on_fixed_addresses(
    qwen3_5_folder: Path, monkeypatch: pytest.MonkeyPatch, guesses: list[bool]
) -> None:
    """As eager steps, and as modules, which take the states of the batch in one tensor."""
    pipe, repeat = exact(OscarVLPipeline, qwen3_5_folder), Repeat()
    steps, _ = check_batch(pipe, (repeat, None))
    assert repeat.replays > 10 and sum(guesses) >= 8
    monkeypatch.setattr(graph_runner, "supports", lambda model: False)
    [by_modules] = check_batch(pipe, (None,))
    for found, expected in zip(steps, by_modules, strict=True):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)


@pytest.mark.gpu
def test_graphs_repeat_steps_bit_for_bit(on_gpu: OscarVLPipeline) -> None:
    on_gpu.engine.call(lambda: check_batch(on_gpu, ("auto", Repeat())), runs_model=True)


@pytest.mark.gpu
def test_turns_with_graphs(
    on_gpu: OscarVLPipeline, monkeypatch: pytest.MonkeyPatch, guesses: list[bool]
) -> None:
    """Turns, forks and turns after an undo, as with steps that run again on the same tables, and
    with steps that wait for their tokens."""

    def answers() -> list[list[int]]:
        # In fewer bits, tokens that an undone turn has packed stay packed.
        pipe = OscarVLPipeline(on_gpu.model, processor=on_gpu.processor, policy="bf16")
        chat = pipe.chat()
        found = [chat.ask("Why?", max_new_tokens=12).token_ids for _ in range(2)]
        stream = chat.stream("Who?", max_new_tokens=12)
        next(stream)
        stream.close()
        chat.undo()
        fork = chat.fork()
        found += [one.ask("How?", max_new_tokens=12).token_ids for one in (chat, fork)]
        chat.undo()
        found.append(chat.ask("How?", max_new_tokens=12).token_ids)
        for one in (chat, fork):
            one.close()
        return found

    captured = answers()
    assert captured[-1] == captured[-2] == captured[-3]
    assert guesses.count(True) > 20
    guesses.clear()
    with monkeypatch.context() as waiting:
        waiting.setattr(BatchView, "can_spare_states", lambda *_: False)
        assert answers() == captured and not guesses
    runner, repeat = GraphRunner, Repeat()
    monkeypatch.setattr(decode_runner, "GraphRunner", partial(runner, capture=repeat))
    assert answers() == captured and repeat.replays > 20
