"""A later turn on a kept cache is what a fresh prefill of the whole conversation is."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.engine.decode_runner import decode
from oscar_mm.engine.message import Message, first_turn
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import InputError
from oscar_mm.media.media import Media
from oscar_mm.modality import Modality
from oscar_mm.pipelines.families.llava_next import LlavaNext
from oscar_mm.pipelines.pipeline import Pipeline
from tests.prompts import clip, noise, tone

TURNS: dict[str, dict[str, list[Any]]] = {
    "text": {},
    "image": {"images": [noise(64, 96)]},
    "other image": {"images": [noise(90, 40, 1)]},
    "two images": {"images": [noise(40, 120, 2), noise(64, 64, 3)]},
    "video": {"videos": [clip(6)]},
    "audio": {"audio": [tone(1.3)]},
    "other audio": {"audio": [tone(2.2, 660)]},
    "image and audio": {"images": [noise(64, 64, 4)], "audio": [tone(0.7, 300)]},
    "everything": {"images": [noise(70, 70, 5)], "videos": [clip(4, 9)], "audio": [tone(1)]},
}

CONVERSATIONS = {
    "llava": [
        ["text", "image", "two images", "text"],
        ["image", "other image"],
    ],
    "vicuna": [["image", "text", "other image"]],
    "qwen": [
        ["text", "video", "image", "text"],
        ["image", "other image", "video"],
    ],
    "omni": [
        ["text", "audio", "image", "other audio"],
        ["image", "image and audio", "video", "text"],
        ["audio", "everything", "audio"],
    ],
}


def generated(pipe: Pipeline, prompt: Prompt, cache: OscarCache, count: int) -> list[int]:
    """``count`` tokens of an answer; none at all is an answer that ends at once."""
    everything = frozenset(range(pipe.model.config.get_text_config().vocab_size))
    steps = decode(
        pipe.model,
        prompt,
        cache,
        Sampling(max_new_tokens=count or 1),
        end_tokens=frozenset() if count else everything,
    )
    return [token for [token] in steps]


def fresh(pipe: Pipeline, prompts: Sequence[Prompt], answers: Sequence[list[int]]) -> torch.Tensor:
    """Logits of the last token of the whole conversation, positions by the model's own function."""
    ids, tensors = [], {}
    for prompt, answer in zip(prompts, [*answers, []], strict=True):
        ids += [prompt.inputs["input_ids"], torch.tensor([answer], dtype=torch.long)]
        for name, tensor in prompt.inputs.items():
            tensors.setdefault(name, []).append(tensor)
    whole = torch.cat(ids, dim=1)
    del tensors["input_ids"]
    if isinstance(pipe.family, LlavaNext):
        most = max((part.shape[1] for part in tensors.get("pixel_values", [])), default=0)
        tensors["pixel_values"] = [
            torch.nn.functional.pad(part, (0, 0) * 3 + (0, most - part.shape[1]))
            for part in tensors.get("pixel_values", [])
        ]
        joined = {name: torch.cat(parts) for name, parts in tensors.items() if parts}
        positions = torch.arange(whole.shape[1])[None]
    else:
        joined = {name: pipe.family.join_media(name, parts) for name, parts in tensors.items()}
        positions = by_the_model(pipe, whole, joined)
    with torch.inference_mode():
        output = pipe.model(input_ids=whole, position_ids=positions, use_cache=False, **joined)
    return output.logits[0, -1]


def by_the_model(pipe: Pipeline, ids: torch.Tensor, inputs: dict[str, torch.Tensor]) -> Any:
    mask = torch.ones_like(ids)
    grids = {name: inputs[name] for name in inputs if name.endswith("grid_thw")}
    if Modality.AUDIO in pipe.family.reads:
        audio = inputs.get("feature_attention_mask")
        positions, _ = pipe.model.get_rope_index(
            ids,
            attention_mask=mask,
            audio_seqlens=None if audio is None else audio.sum(-1),
            second_per_grids=inputs.get("video_second_per_grid"),
            **grids,
        )
        return positions
    if not grids:
        return torch.arange(ids.shape[1]).expand(3, 1, -1)
    types = sum(
        (ids == getattr(pipe.model.config, f"{kind}_token_id")) * value
        for kind, value in (("image", 1), ("video", 2))
    )
    return pipe.model.model.get_rope_index(
        ids, mm_token_type_ids=types, attention_mask=mask, **grids
    )[0]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [(name, kinds) for name, several in CONVERSATIONS.items() for kinds in several],
    ids=lambda value: ", ".join(value) if isinstance(value, list) else value,
)
def test_kept_cache_is_a_fresh_prefill(name: str, kinds: list[str], request) -> None:
    pipe = request.getfixturevalue(name)
    family, cache = pipe.family, OscarCache("bf16", model=pipe.model)
    prompts, answers = [], []
    # An answer cut short, an empty one, one of a single token, ...
    for kind, count in zip(kinds, (4, 0, 1, 3), strict=False):
        media = pipe.read_media(**TURNS[kind])
        question = f"What about the {kind}?"
        messages = first_turn(question, media.parts, None if prompts else "Be brief.")
        past = cache.get_seq_length()
        if not prompts:
            prompt = family.prompt(messages, media)
        else:
            held = past - sum(p.tokens for p in prompts) - sum(map(len, answers[:-1]))
            pending = answers[-1][held:]
            following = prompts[-1].next_position + held
            prompt = family.continuation(messages, media, past, following, pending)
            # Told in the list of answers already.
            answers[-1] = answers[-1][:held]
        prompts.append(prompt)
        assert prompt.positions.shape[-1] == prompt.tokens
        cache.expect(prompt.modalities)
        arguments = {**prompt.inputs, "position_ids": prompt.positions}
        with torch.inference_mode():
            logits = pipe.model(
                **arguments, **as_argument(cache), use_cache=True, logits_to_keep=1
            ).logits[0, -1]
        expected = fresh(pipe, prompts, answers)
        error = float((logits - expected).abs().max() / expected.abs().max())
        assert error < 1e-4, (kind, error)
        # Other requests on the same model in between leave their marks on it, not on the chat.
        pipe.model.generate(input_ids=prompts[0].inputs["input_ids"][:, :3], max_new_tokens=2)
        cache.crop(-prompt.tokens)
        answers.append(generated(pipe, prompt, cache, count))
    assert cache.get_seq_length() > sum(p.tokens for p in prompts) - 1


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokens_between_turns_are_those_of_the_template(name: str, request) -> None:
    pipe = request.getfixturevalue(name)
    family, none = pipe.family, Media()
    conversation = [
        *first_turn("What is on the sign?", none.parts),
        Message("assistant", ("It reads Stop.",)),
        *first_turn("And below?", none.parts),
    ]
    whole = family.prompt(conversation, none).inputs["input_ids"][0].tolist()
    later = family.continuation(conversation[-1:], none, 9, torch.tensor([9]))
    ids = later.inputs["input_ids"][0].tolist()
    assert whole[-len(ids) :] == ids and len(ids) > 5
    answer = pipe.processor.tokenizer.decode(whole[: -len(ids)])
    assert answer.endswith("It reads Stop.")
    pending = family.continuation(conversation[-1:], none, 9, torch.tensor([9]), [7, 8])
    assert pending.inputs["input_ids"][0].tolist() == [7, 8, *ids]
    assert torch.equal(
        pending.positions[..., 0, :],
        (9 + torch.arange(len(ids) + 2)).expand_as(pending.positions[..., 0, :]),
    )
    assert pending.next_position.tolist() == [9 + len(ids) + 2]


@pytest.mark.parametrize("answer", ["m.content", "m.content.strip()", "m.content[0].text"])
def test_templates_take_answers_in_their_own_ways(qwen3_vl_folder, qwen, answer: str) -> None:
    processor = AutoProcessor.from_pretrained(qwen3_vl_folder)
    processor.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ 'Q' + m.content[0].text }}"
        "{% else %}{{ 'A' + " + answer + " + '<|im_end|>' }}{% endif %}{% endfor %}A"
    )
    family = type(qwen.family)(qwen.model, processor)
    later = family.continuation(first_turn("why?"), Media(), 9, torch.tensor([9]))
    text = processor.tokenizer.decode(later.inputs["input_ids"][0])
    assert text == "<|im_end|>Qwhy?A"
    processor.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(InputError, match="omits answers"):
        family.continuation([], Media(), 9, torch.tensor([9]))


def test_positions_go_on_where_tokens_were_dropped(omni) -> None:
    """A chat that forgot media holds fewer tokens than its positions have come to."""
    media = omni.read_media([noise(64, 64)], audio=[tone(0.5)])
    messages = first_turn("And this?", media.parts)
    near = omni.family.continuation(messages, media, 10, torch.tensor([10.0]))
    far = omni.family.continuation(messages, media, 10, torch.tensor([500.0]))
    assert torch.equal(far.positions[1:], near.positions[1:] + 490)
    assert torch.equal(far.positions[0], near.positions[0])
    assert far.next_position.item() == near.next_position.item() + 490
    assert [span.start for span in far.media] == [span.start for span in near.media]
