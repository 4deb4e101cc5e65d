"""Each field of a saved chat changed in turn, and the checksum computed anew."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from oscar_mm import InputError, OscarOmniPipeline, OscarVLPipeline
from oscar_mm.cache.checked_file import write_checked
from tests.pipelines.conftest import NEVER
from tests.prompts import clip, noise, tone

FAMILIES = {
    "llava": (OscarVLPipeline, "llava_next_folder", {"images": [noise(90, 130)]}),
    "qwen": (OscarVLPipeline, "qwen3_vl_folder", {"images": [noise(300, 260)], "videos": clip(6)}),
    "omni": (OscarOmniPipeline, "qwen3_omni_folder", {"audio": [tone(3)]}),
}
CANNOT_BE_CHECKED = {
    # Texts, names and digests: nothing else tells them.
    *("given.system", "given.turns[].answer", "given.turns[].reasoning"),
    *(f"given.turns[].messages[].{name}" for name in ("parts[]", "tool_call_id", "name")),
    *("given.turns[].media[].label", "given.turns[].media[].digest"),
    # Tokens of text, and keys and values, which only the model could make anew.
    *("tensor given.token_ids", "given.pending[]"),
    *("tensor layer.N.recent", "tensor layer.N.pages", "tensor layer.N.sigma"),
}


def read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with safe_open(path, "pt") as file:
        return load_file(path), json.loads(file.metadata()["oscar_mm.cache"])


def write(path: Path, tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> None:
    write_checked(path, tensors, {"oscar_mm.cache": json.dumps(text)})


def saved(kind: Any, folder: Path, media: dict[str, Any], path: Path, policy: str) -> Any:
    """A pipeline, and the file of three turns with media, one of which is forgotten."""
    pipe = kind(folder, device="cpu", policy=policy)
    pipe.model.generation_config.eos_token_id = NEVER
    with pipe.chat("Be brief.") as chat:
        chat.ask("What? " * 40, **media, max_new_tokens=4)
        chat.ask("And this?", images=[noise(64, 96, 5)], max_new_tokens=4)
        chat.ask("And these?", images=[noise(96, 64, 6), noise(64, 64, 7)], max_new_tokens=4)
        chat.forget(next(one.index for one in chat.segments if one.turn == 1 and one.modality))
        chat.save(path)
    return pipe


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, list[Any]]]:
    """Name and way of every value of nested objects and lists."""
    items: Any = ()
    if isinstance(value, dict):
        items = [(key, f"{name}.{key}" if name else key, one) for key, one in value.items()]
    elif isinstance(value, list):
        items = [(index, f"{name}[]", one) for index, one in enumerate(value)]
    for key, inner, one in items:
        if not isinstance(one, dict | list):
            yield inner, [key]
        for found, way in leaves(one, inner):
            yield found, [key, *way]


def another(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if value is None:
        return ["x"]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [value + 1, value - 1]
    if len(value) == 64:
        return [("0" if value[0] != "0" else "1") + value[1:]]
    return [value + "x"]


def forgeries(tensors: dict[str, torch.Tensor], text: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each field's name, and the file with another value of it."""
    for name, way in leaves(text):
        *path, last = way
        for index in range(2):
            changed = copy.deepcopy(text)
            place: Any = changed
            for step in path:
                place = place[step]
            values = another(place[last])
            if index < len(values):
                place[last] = values[index]
                yield name, (tensors, changed)
    for name, tensor in tensors.items():
        flat = tensor.flatten()
        short = name if not name.startswith("layer.") else f"layer.N.{name.split('.')[2]}"
        for place in {0, len(flat) // 2, len(flat) - 1} if len(flat) else ():
            new = flat.clone()
            new[place] = new[place] + 1 if new.dtype != torch.uint8 else new[place] ^ 1
            yield f"tensor {short}", ({**tensors, name: new.view_as(tensor)}, text)


@pytest.fixture(scope="module", params=["standard", "channel"])
def chat(request, qwen3_vl_folder, tmp_path_factory) -> tuple[Any, Path]:
    path = tmp_path_factory.mktemp("forged") / "chat"
    kind, _, media = FAMILIES["qwen"]
    return saved(kind, qwen3_vl_folder, media, path, request.param), path


@pytest.mark.daily("channel")
def test_each_field(chat, tmp_path) -> None:
    """A changed field is only accepted if nothing else in the file implies its right value."""
    pipe, path = chat
    tensors, text = read(path)
    loaded, tried = set(), set()
    for name, content in forgeries(tensors, text):
        forged = tmp_path / "forged"
        write(forged, *content)
        tried.add(name)
        try:
            pipe.load_chat(forged).close()
            loaded.add(name)
        except InputError as error:
            assert str(forged) in str(error) and "\n" not in str(error)
    assert len(tried) > 35
    assert loaded <= CANNOT_BE_CHECKED, sorted(loaded - CANNOT_BE_CHECKED)
    assert {"given.turns[].messages[].parts[]", "tensor layer.N.recent"} <= loaded
    pipe.load_chat(path).close()


@pytest.mark.daily("-1-llava", "1000-omni", "7-qwen")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("by", [-1, 1, 7, 1000])
def test_positions(name: str, by: int, tmp_path, request) -> None:
    """Positions of the next token, of a turn, and of all turns from one on are forged."""
    kind, fixture, media = FAMILIES[name]
    path = tmp_path / "chat"
    pipe = saved(kind, request.getfixturevalue(fixture), media, path, "standard")
    tensors, text = read(path)
    pipe.load_chat(path).close()

    def moved(first: int) -> Any:
        changed = copy.deepcopy(text)
        for turn in changed["given"]["turns"][first:]:
            turn["position"] += by
        return {**tensors, "given.next_position": tensors["given.next_position"] + by}, changed

    changes: list[Callable[[], Any]] = [lambda first=first: moved(first) for first in range(4)]
    for change in changes:
        write(path, *change())
        with pytest.raises(InputError, match=r"position"):
            pipe.load_chat(path)


def test_turns_that_contradict_the_tables(chat, tmp_path) -> None:
    pipe, path = chat
    tensors, text = read(path)

    def turns(change: Callable[[list[dict]], None]) -> Any:
        changed = copy.deepcopy(text)
        change(changed["given"]["turns"])
        return tensors, changed

    def forget_another(turns: list[dict]) -> None:
        # As many tokens as the one that is forgotten.
        turns[1]["forgotten"], turns[2]["forgotten"] = [False], [True, False]

    def name_no_media(turns: list[dict]) -> None:
        turns[0].update(media=[], forgotten=[])
        turns[0]["messages"][0]["parts"] = ["What?"]

    ids = tensors["given.token_ids"].clone()
    span = text["given"]["turns"][0]["media"][0]
    ids[0, span["start"]] = 5
    forged = {
        "forgotten tokens": turns(forget_another),
        "a different modality": turns(lambda x: x[0]["media"][0].update(modality=3)),
        "disagree on modalities": ({**tensors, "given.token_ids": ids}, text),
        "the end of the previous answer": turns(lambda x: x[1].update(pending=[1, 2])),
        "unknown finish_reason": turns(lambda x: x[1].update(finish_reason="cat")),
        "belong to no media item": turns(name_no_media),
        "digest": turns(lambda x: x[0]["media"][0].update(digest="x")),
    }
    for said, content in forged.items():
        write(tmp_path / "forged", *content)
        with pytest.raises(InputError, match=said):
            pipe.load_chat(tmp_path / "forged")


def test_balancing_of_pages(chat, tmp_path) -> None:
    pipe, path = chat
    tensors, text = read(path)
    undecided = copy.deepcopy(text)
    for layer in undecided["layers"]:
        layer["balanced"] = False
    write(tmp_path / "forged", tensors, undecided)
    with pytest.raises(InputError, match="has pages, but it is not known whether"):
        pipe.load_chat(tmp_path / "forged")
