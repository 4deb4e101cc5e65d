"""What one process and each of several is asked, for their answers to be compared."""

import json
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from socket import socket
from typing import Any
from unittest.mock import Mock, patch

import torch
from torch import distributed

from oscar_mm import InputError, OscarCache, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine import decode_runner
from oscar_mm.fast_decode import graph_runner, layers
from oscar_mm.fast_decode.decoder import supports
from oscar_mm.fast_decode.experts_torch import experts_by_torch
from oscar_mm.fast_decode.graph_runner import GraphRunner
from oscar_mm.tensor_parallel import local_shard
from tests.models.test_answers import CARDS, CLIPS
from tests.processes import Forked

ROOT = Path(__file__).parents[2]
CARDS_OF = {
    "pocket-vl": 8,
    "pocket-llava": 3,
    "pocket-omni": 8,
    "vl with biases": 1,
    "vl with experts": 1,
    "omni with a talker": 1,
    "hybrid": 1,
    "hybrid with experts": 1,
    "hybrid language model": 0,
}
"""How many cards each is shown: of the pocket models so many that pages are packed."""
ODD_EXPERTS = "experts of an odd width"
QUESTION = "What is the code in picture 5?"


def pipeline(
    name: str, model: str, dtype: str = "float32", **arguments: Any
) -> OscarVLPipeline | OscarOmniPipeline:
    kind = OscarOmniPipeline if "omni" in name else OscarVLPipeline
    return kind(model, dtype=dtype, **arguments)


@contextmanager
def captures() -> Iterator[list[torch.device]]:
    """The devices that graphs were captured on meanwhile."""
    found: list[torch.device] = []

    def noted(function: Callable[[], Any], device: torch.device, **how: Any) -> Callable[[], Any]:
        replay = record(function, device, **how)
        found.append(device)
        return replay

    record = graph_runner.capture_cuda_graph
    with patch.object(graph_runner, "capture_cuda_graph", noted):
        yield found


@contextmanager
def ranks_of(function: Callable[..., None], *arguments: Any) -> Iterator[list[Forked]]:
    """Two processes that call a function, and may divide a model between them."""
    with socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The variables of torchrun, which tests/benchmarks/test_several_gpus.py starts.
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                Forked(
                    function,
                    *arguments,
                    environment=group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                )
            )
            for rank in range(2)
        ]


def run(folder: Path, dtype: str, models: dict[str, str]) -> tuple[list[dict[str, Any]], str]:
    """What each of two processes found, and what the example printed in both of them."""
    with ranks_of(ask_all, folder, dtype, models) as processes:
        # Of both, before one is judged: where one fails, the other only says that it is gone.
        ended = [process.end() for process in processes]
    failed = [
        f"rank {rank} ended with {code}:\n{errors.decode()[-3000:]}"
        for rank, (code, _, errors) in enumerate(ended)
        if code
    ]
    assert not failed, "\n".join(failed)
    printed = "".join(out.decode() for _, out, _ in ended)
    found = [json.loads((folder / f"rank {rank}.json").read_text()) for rank in range(2)]
    return found, printed


def asked(pipe: OscarVLPipeline | OscarOmniPipeline, cards: int) -> dict[str, Any]:
    """Token ids of two turns, and what the first one held."""
    with pipe.chat() as chat:
        first = chat.ask("Write all codes.", images=CARDS[:cards], max_new_tokens=10)
        second = chat.ask(QUESTION, max_new_tokens=6)
    return {
        "turns": [first.token_ids, second.token_ids],
        "memory": first.memory.to_dict(),
        "printed": str(first.memory),
    }


def asked_more(pipe: OscarVLPipeline, saved: Path) -> dict[str, Any]:
    """Token ids of what continues a fork and from a file, after a medium was forgotten; of a
    batch of unequal length; and of what is sampled without a seed."""
    with pipe.chat() as chat:
        chat.ask("What is the code in picture 2?", images=CARDS[:8], max_new_tokens=6)
        chat.forget(2)
        chat.save(saved)
        with chat.fork() as fork:
            forked = fork.ask(QUESTION, max_new_tokens=6).token_ids
    with pipe.load_chat(saved) as chat:
        loaded = chat.ask(QUESTION, max_new_tokens=6).token_ids
    requests = [
        {"images": CARDS[:3], "prompt": "What is the code in picture 2?", "max_new_tokens": 8},
        {"images": CARDS[4:5], "prompt": "What is the code?", "max_new_tokens": 4},
    ]
    sampled = {"temperature": 5.0, "repetition_penalty": 1.1, "max_new_tokens": 12}
    media = {"images": CARDS[:1]}
    return {
        "gone on": [forked, loaded],
        "batch": [result.answer.token_ids for result in pipe.batch(requests)],
        "sampled": [pipe(prompt="Go on.", **media, **sampled).token_ids for _ in range(2)],
    }


def asked_of_states(pipe: OscarVLPipeline, cards: int, saved: Path) -> dict[str, list[list[int]]]:
    """Token ids of turns of a model with states: after an undo, of a fork and of a loaded chat, and
    of answers that decode together, of unequal length, while one joins and others end."""
    questions = ("What is in it?", "And where?", "Why?")
    with pipe.chat() as chat:
        for question in questions:
            shown = [] if chat.turns else CARDS[:cards]
            chat.ask(question, images=shown, max_new_tokens=6)
        chat.undo(2)
        again = chat.ask(questions[2], max_new_tokens=6).token_ids
        chat.save(saved)
        with chat.fork() as fork, pipe.load_chat(saved) as loaded:
            after = [one.ask(questions[1], max_new_tokens=6).token_ids for one in (fork, loaded)]
    requests = [
        {"images": CARDS[count : count + cards], "prompt": prompt, "max_new_tokens": 4 + 5 * count}
        for count, prompt in enumerate(questions)
    ]
    batch = [result.answer.token_ids for result in pipe.batch(requests)]
    return {"turns": [again, *after], "batch": batch}


def asked_with_mixtures(
    pipe: OscarVLPipeline, cards: int, broken_rank: int | None
) -> dict[str, Any]:
    """Token ids where mixtures of experts run as on a GPU, with PyTorch operations for their
    kernels; and how many there were.

    Args:
        broken_rank: which has no kernels.
    """
    mixture = Mock(wraps=experts_by_torch)
    kernels = None if distributed.get_rank() == broken_rank else mixture
    with patch.object(layers, "expert_kernels", lambda *_, **__: kernels):
        turns = asked(pipe.with_policy(pipe.policy), cards)["turns"]
    return {"turns": turns, "mixtures": mixture.call_count}


def asked_with_overflow(pipe: OscarVLPipeline) -> list[str]:
    """Why a long prompt fails on this rank, if one of the ranks cannot store its values."""
    layers = pipe.model.get_decoder().layers
    attention = next(one.self_attn for one in layers if hasattr(one, "self_attn"))
    weight = local_shard(attention.v_proj.weight)
    whole = weight.detach().clone()
    found = []
    with torch.no_grad():
        if distributed.get_rank() == 1:
            weight.mul_(1e9)
        try:
            pipe(prompt="One and two. " * 100, max_new_tokens=4)
        except FloatingPointError as error:
            found.append(str(error))
        weight.copy_(whole)
    return found


def asked_on_records(pipe: OscarVLPipeline, cards: int, broken_rank: int | None) -> dict[str, Any]:
    """Token ids where steps are recorded, with the same function for a graph; and how many calls.

    Args:
        broken_rank: which cannot record.
    """
    calls: list[str] = []

    def record(function: Callable[[], Any], _: torch.device) -> Callable[[], Any]:
        if distributed.get_rank() == broken_rank:
            raise RuntimeError("operation not permitted when stream is capturing")

        def again() -> Any:
            calls.append("replay")
            return function()

        return again

    with patch.object(decode_runner, "GraphRunner", partial(GraphRunner, capture=record)):
        turns = asked(pipe.with_policy(pipe.policy), cards)["turns"]
        return {"turns": turns, "replays": len(calls)}


def heard(pipe: OscarOmniPipeline) -> list[int]:
    return pipe(prompt="What was said in clip 2?", audio=CLIPS[:3], max_new_tokens=12).token_ids


def asked_of_odd_experts(model: str, dtype: str) -> dict[str, Any]:
    """Why experts are not divided by an odd width, and the token ids of what is done instead."""
    try:
        pipeline(ODD_EXPERTS, model, dtype, tp_plan="auto")
    except InputError as error:
        why = str(error)
    return {
        "refused": why,
        "turns": asked(by_eager_experts(model, dtype, tp_plan="auto"), 0)["turns"],
    }


def by_eager_experts(model: str, dtype: str, **arguments: Any) -> OscarVLPipeline:
    eager = {"experts_implementation": "eager"}
    return OscarVLPipeline(model, dtype=dtype, model_kwargs=eager, **arguments)


def refused(pipe: OscarVLPipeline) -> list[str]:
    """One norm for the heads of all ranks, in a pipeline and in a model's own ``generate``."""
    found = []
    for ask in (
        lambda: pipe.with_policy("oscar"),
        lambda: pipe.model.generate(
            torch.tensor([[1, 2, 3]]),
            **as_argument(OscarCache("oscar", model=pipe.model)),
            max_new_tokens=2,
        ),
    ):
        try:
            ask()
        except InputError as error:
            found.append(str(error))
    return found


def ask_all(folder: Path, dtype: str, models: dict[str, str]) -> None:
    """As one of these processes: write down what is found, then run the example."""
    results: dict[str, Any] = {}
    for name, model in models.items():
        if name == ODD_EXPERTS:
            results[name] = asked_of_odd_experts(model, dtype)
            continue
        pipe = pipeline(name, model, dtype, tp_plan="auto")
        with captures() as devices:
            results[name] = asked(pipe, CARDS_OF[name])
        results[name]["captures"] = len(devices)
        results[name]["known"] = supports(pipe.model)
        if name == "pocket-vl":
            results[name] |= asked_more(pipe, folder / "chat.safetensors")
            results[name]["refused"] = refused(pipe)
            results[name]["recorded"] = asked_on_records(pipe, CARDS_OF[name], None)
            results[name]["half recorded"] = asked_on_records(pipe, CARDS_OF[name], 1)
        if name == "pocket-omni":
            results[name]["heard"] = heard(pipe)
        if "hybrid" in name:
            saved = folder / f"{name}.safetensors"
            results[name]["of states"] = asked_of_states(pipe, CARDS_OF[name], saved)
            results[name]["overflow"] = asked_with_overflow(pipe)
            for how, broken_rank in (("fused", None), ("half fused", 1)):
                results[name][how] = asked_with_mixtures(pipe, CARDS_OF[name], broken_rank)
            results[name]["recorded"] = asked_on_records(pipe, CARDS_OF[name], None)
        if name == "omni with a talker":
            try:
                pipe(prompt="Who speaks?", images=CARDS[:1], speak=True)
            except InputError as error:
                results[name]["refused"] = str(error)
        pipe.release_graphs()
    (folder / f"rank {distributed.get_rank()}.json").write_text(json.dumps(results))
    example = ROOT / "examples" / "several_gpus.py"
    sys.argv = [str(example), "pocket-vl", *map(str, CARDS[:3])]
    runpy.run_path(str(example), run_name="__main__")
