"""Decode steps of language models with sliding windows: batches and graphs for all lengths."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, AutoTokenizer

from oscar_mm import KVPolicy, OscarCache, OscarVLPipeline, attention
from oscar_mm.cache.batch_view import BatchView
from oscar_mm.cache.cache import as_argument
from oscar_mm.cache.page_store import PageStore
from oscar_mm.engine import decode_runner
from oscar_mm.fast_decode.graph_runner import GraphRunner
from tests.cache.invariants import STREAM
from tests.languages import CHATML, build_language_model

WINDOW, TOKENS, NEVER = 40, 72, 1 << 20
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "gemma 3": (
        "gemma3_text",
        {
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "num_hidden_layers": 3,
        },
    ),
    "gpt-oss": ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
QUESTIONS = (
    "Why?",
    "How much does the bread cost, and which month was the wettest? " * 3,
    "What did the user ask about the sign? ",
)
"""Questions whose prompts are shorter than the window, longer, and of about its length."""
POLICIES = {
    "bf16": KVPolicy.preset("bf16"),
    "stream": KVPolicy(bits=(3, 2), window=16, **STREAM),
    "whole pages": KVPolicy.preset("channel", window=16, sinks=2),
}


class Operations(TorchDispatchMode):
    """Lists operations with the shapes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shapes = [x.shape for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self.found.append((func, *shapes))
        return func(*args, **(kwargs or {}))


class Capture:
    """Stands in for CUDA graphs: repeats a step, which must consist of the captured operations."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, function: Callable[[], Any], _: torch.device) -> Callable[[], Any]:
        self.captures += 1
        first: list[Any] = []

        def replay() -> Any:
            self.replays += 1
            with Operations() as operations:
                result = function()
            first[:] = first or operations.found
            assert operations.found == first
            return result

        return replay


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> Capture:
    made = Capture()
    runner = partial(GraphRunner, capture=made)
    monkeypatch.setattr(decode_runner, "GraphRunner", runner)
    return made


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    kind, fields = MODELS[request.param]
    made = tmp_path_factory.mktemp("windows") / kind
    return build_language_model(kind, made, template=CHATML, sliding_window=WINDOW, **fields)


def pipeline(folder: Path, policy: str | KVPolicy = "bf16", **options: Any) -> OscarVLPipeline:
    pipe = OscarVLPipeline(folder, policy=policy, **{"device": "cpu"} | options)
    pipe.model.generation_config.eos_token_id = NEVER
    return pipe


def asked(**options: Any) -> list[dict[str, Any]]:
    """Requests whose answers end one after the other."""
    return [
        {"prompt": question, "max_new_tokens": TOKENS - 9 * row} | options
        for row, question in enumerate(QUESTIONS)
    ]


def answers(pipe: OscarVLPipeline) -> list[list[int]]:
    return [one.answer.token_ids for one in pipe.batch(asked())]


def prompt_of(folder: Path, question: str) -> torch.Tensor:
    turn = [{"role": "user", "content": question}]
    template = AutoTokenizer.from_pretrained(folder).apply_chat_template
    found = template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return found["input_ids"]


@pytest.mark.daily("gpt-oss")
def test_rows_of_all_lengths_share_steps(folder: Path, capture: Capture) -> None:
    """Answers are those of transformers, token by token, from before the window to beyond it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = answers(pipeline(folder))
    for question, tokens in zip(QUESTIONS, found, strict=True):
        said = torch.cat([prompt_of(folder, question), torch.tensor([tokens])], 1)
        with torch.no_grad():
            logits = model(said, use_cache=False).logits[0, -len(tokens) - 1 : -1]
        assert logits.argmax(1).tolist() == tokens
    lengths = [prompt_of(folder, question).shape[1] for question in QUESTIONS]
    assert min(lengths) < WINDOW < max(lengths) - 20
    # Pools grow now and then, and move on a CPU.
    assert 3 * capture.captures < capture.replays and capture.replays > TOKENS // 2


@pytest.mark.daily("gemma 3-stream")
@pytest.mark.parametrize("policy", POLICIES)
@torch.inference_mode()
def test_captured_steps_equal_eager_ones(folder: Path, policy: str) -> None:
    """Bit for bit, with pages that begin within the window and before it, and with a fork."""
    model, store = pipeline(folder).model, PageStore(POLICIES[policy])
    caches = [OscarCache(store.policy, model=model, store=store) for _ in QUESTIONS]
    for question, cache in zip(QUESTIONS, caches, strict=True):
        model(prompt_of(folder, question), **as_argument(cache))
    twins = [cache.fork() for cache in caches]
    generator, found = torch.Generator().manual_seed(3), list[list[torch.Tensor]]()
    steps = torch.randint(3, 300, (2 * WINDOW, len(caches)), generator=generator)
    going = torch.zeros(len(caches), dtype=torch.bool)
    for rows, record in ((caches, None), (twins, capture := Capture())):
        view = BatchView(store)
        view.set_rows(rows)
        runner = GraphRunner(model, view, len(rows), (), torch.device("cpu"), record)
        runner.place([cache.get_seq_length() for cache in rows])
        found.append([])
        for tokens in steps:
            runner.ahead(tokens, going)
            found[-1].append(runner(tokens, going).clone())
    assert all(map(torch.equal, *found))
    packed = [sum(x.packed for x in cache.kv_manager.streams()) for cache in twins]
    assert (min(packed) > 0) == (policy == "stream") and capture.replays > WINDOW


def test_prompts_do_not_share_a_pass(folder: Path) -> None:
    """The windows of one would extend into the one before."""
    pipe, passes = pipeline(folder), list[int]()
    layer = pipe.model.get_decoder().layers[0]
    layer.register_forward_pre_hook(lambda _, given: passes.append(given[0].shape[1]))
    pipe.batch([{"prompt": question, "max_new_tokens": 1} for question in QUESTIONS])
    assert sorted(passes) == sorted(prompt_of(folder, x).shape[1] for x in QUESTIONS)


@pytest.mark.daily("mistral")
def test_windows_that_no_configuration_names_are_of_one_row(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mask has the length of one row, so answers that decode together would be wrong."""
    monkeypatch.setattr(attention, "_slides", lambda *_: False)
    pipe = pipeline(folder)
    assert pipe(**asked()[1]).token_ids == pipeline(folder)(**asked()[1]).token_ids
    errors = [result.error for result in pipe.batch(asked())]
    assert all(isinstance(error, NotImplementedError) for error in errors)
    assert "local attention to 40 tokens" in str(errors[0])


@torch.no_grad()
def logprobs_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probability of each token but the first, without a cache."""
    logits = model(ids.to(model.device), use_cache=False).logits[0, :-1].float().cpu()
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mistral", "gemma 3"])
@pytest.mark.parametrize("policy", ["bf16", "standard:bits=4"])
def test_graphs_have_the_logits_of_transformers(
    name: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several answers in one graph, with an error like that of rounded weights without a cache."""
    kind, fields = MODELS[name]
    fields |= {"sliding_window": WINDOW, "template": CHATML}
    folder = build_language_model(kind, tmp_path / kind, **fields)
    replays, replayed = [], OscarCache.replayed
    monkeypatch.setattr(
        OscarCache, "replayed", lambda *step: (replays.append(step), replayed(*step))[1]
    )
    pipe = pipeline(folder, policy, device="cuda", dtype="bfloat16")
    found = [one.answer for one in pipe.batch(asked(temperature=0, logprobs=0))]
    assert len(replays) >= TOKENS // 2
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rounded = deepcopy(model).to("cuda", torch.bfloat16)
    for question, answer in zip(QUESTIONS, found, strict=True):
        said = torch.tensor([answer.token_ids])
        ids = torch.cat([prompt_of(folder, question), said], 1)
        expected, with_rounding = (
            logprobs_of(one, ids)[-said.shape[1] :] for one in (model, rounded)
        )
        usual = (with_rounding - expected).abs()
        error = (torch.tensor([one.logprob for one in answer.logprobs or ()]) - expected).abs()
        bound = 2 * usual.mean() + (0.01 if policy == "bf16" else 0.1)
        assert error.mean() < bound, (error, usual)
