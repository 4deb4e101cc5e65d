"""Messages with texts and media in any order, against plain transformers."""

import io
import random
from base64 import b64encode
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import (
    AutoModelForImageTextToText,
    AutoProcessor,
    Qwen3OmniMoeForConditionalGeneration,
)

from oscar_mm import InputError
from oscar_mm.engine.message import Message, media_of
from oscar_mm.engine.message_lists import messages_from, parts_from
from oscar_mm.media.part import MediaPart
from oscar_mm.modality import Modality
from oscar_mm.pipelines.pipeline import Pipeline
from tests.pipelines.conftest import NEVER
from tests.prompts import noise, tone
from tests.recordings import write_sound

FOLDERS = {"llava": "llava_next_folder", "qwen": "qwen3_vl_folder", "omni": "qwen3_omni_folder"}
WORDS = ("Image", "before", "after", ":", "what", "is", "it", "?", "or\nthe", "sign", "", "42")


class Plain:
    """The same checkpoint in plain transformers: template, processor and generate."""

    def __init__(self, name: str, folder: Path) -> None:
        kind: Any = AutoModelForImageTextToText
        self.options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        self.options["eos_token_id"] = NEVER
        if name == "omni":
            kind = Qwen3OmniMoeForConditionalGeneration
            self.options = {f"thinker_{key}": value for key, value in self.options.items()}
            self.options["return_audio"] = False
        self.processor = AutoProcessor.from_pretrained(folder)
        self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()

    def inputs(self, conversation: list[dict[str, Any]]) -> Any:
        return self.processor.apply_chat_template(
            conversation,
            tokenize=True,
            return_dict=True,
            add_generation_prompt=True,
            return_tensors="pt",
        )

    def answer(self, inputs: Any) -> list[int]:
        inputs = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
        output = self.model.generate(**inputs, **self.options)
        return output[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.fixture(scope="module", params=FOLDERS)
def both(request) -> tuple[Pipeline, Plain]:
    folder = request.getfixturevalue(FOLDERS[request.param])
    return request.getfixturevalue(request.param), Plain(request.param, folder)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("sounds")
    return [str(write_sound(folder / f"{index}.wav", tone(0.3 + index / 5))) for index in range(3)]


def conversation(pipe: Pipeline, recordings: list[str], rng: random.Random) -> list[dict[str, Any]]:
    """A random one in Hugging Face's form: some turns of texts and media in any order."""

    def part(role: str) -> dict[str, Any]:
        kinds = ["text", "text", "image"] + ["audio"] * (Modality.AUDIO in pipe.family.reads)
        kind = rng.choice(kinds) if role == "user" else "text"
        if kind == "image":
            size = rng.choice([28, 40, 64]), rng.choice([28, 50, 90])
            return {"type": kind, "image": Image.fromarray(noise(*size, rng.randrange(99)))}
        if kind == "audio":
            return {"type": kind, "audio": rng.choice(recordings)}
        return {"type": kind, "text": " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))}

    roles = ["system"] * rng.randint(0, 1) + ["user", "assistant"] * rng.randint(0, 2) + ["user"]
    found = [
        {"role": role, "content": [part(role) for _ in range(rng.randint(1, 5))]} for role in roles
    ]
    for message in (found[0], found[-1]):  # which may not be blank
        message["content"].append({"type": "text", "text": "What?"})
    return found


@pytest.mark.parametrize("seed", range(20))
def test_ids_are_those_of_the_template(both, recordings, seed: int) -> None:
    pipe, plain = both
    given = conversation(pipe, recordings, random.Random(seed))
    expected = plain.inputs(given)["input_ids"]
    assert torch.equal(pipe.read_request(messages_from(given)).inputs["input_ids"], expected)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20, 320))
def test_more_random_conversations(both, recordings, seed: int) -> None:
    test_ids_are_those_of_the_template(both, recordings, seed)


@pytest.mark.parametrize("roles", [["system"], ["system", "user", "assistant", "user", "system"]])
def test_the_last_message_may_be_of_the_system(both, roles: list[str]) -> None:
    pipe, plain = both
    given = [{"role": role, "content": [{"type": "text", "text": f"{role}?"}]} for role in roles]
    inputs = plain.inputs(given)
    answer = pipe.chat_completion(given, max_new_tokens=8, temperature=0)
    assert torch.equal(
        pipe.read_request(messages_from(given)).inputs["input_ids"], inputs["input_ids"]
    )
    assert answer.token_ids == plain.answer(inputs)


@pytest.mark.daily("llava-1", "qwen-5", "omni-8")
@pytest.mark.parametrize("seed", [1, 5, 8])
def test_answers_are_those_of_generate(both, recordings, seed: int) -> None:
    pipe, plain = both
    given = conversation(pipe, recordings, random.Random(seed))
    expected = plain.answer(plain.inputs(given))
    options = {"max_new_tokens": 8, "temperature": 0}
    assert pipe.chat_completion(given, **options).token_ids == expected
    assert pipe(messages=given, **options).token_ids == expected
    [result] = pipe.batch([{"messages": given, **options}])
    assert result.answer is not None and result.answer.token_ids == expected


def test_a_chat_takes_parts_in_order(both, recordings) -> None:
    pipe, _ = both
    given = conversation(pipe, recordings, random.Random(3))
    question = given[-1]["content"]
    expected = pipe.chat_completion(given[-1:], max_new_tokens=6, temperature=0)
    with pipe.chat() as chat:
        assert chat.ask(parts=question, max_new_tokens=6, temperature=0).token_ids == (
            expected.token_ids
        )
        media = media_of(messages_from(given[-1:]))
        assert [span.modality for span in chat.turns[0].media] == [one.modality for one in media]
        texts = [part["text"] for part in question if part["type"] == "text"]
        assert chat.turns[0].prompt == "\n".join(texts)


PICTURE = Image.fromarray(noise(28, 40))


def png() -> bytes:
    file = io.BytesIO()
    PICTURE.save(file, "PNG")
    return file.getvalue()


def sources(folder: Path) -> dict[str, Any]:
    """One picture in all the forms that clients give."""
    path, data = folder / "a picture.png", png()
    path.write_bytes(data)
    uri = f"data:image/png;base64,{b64encode(data).decode()}"
    array = np.asarray(PICTURE)
    return {
        "path": {"type": "image", "path": path},
        "text": {"type": "image", "image": str(path)},
        "file address": {"type": "image", "image": path.as_uri()},
        "pil": {"type": "image", "image": PICTURE},
        "itself": PICTURE,
        "bytes": {"type": "image", "image": data},
        "file": {"type": "image", "image": io.BytesIO(data)},
        "base64": {"type": "image", "base64": b64encode(data).decode()},
        "uri": {"type": "image", "url": uri},
        "openai": {"type": "image_url", "image_url": {"url": uri}},
        "openai, short": {"type": "image_url", "image_url": uri},
        "array": {"type": "image", "image": array},
        "tensor": {"type": "image", "image": torch.tensor(array)},
        "channels first": {"type": "image", "image": torch.tensor(array).movedim(-1, 0)},
        "floats": {"type": "image", "image": torch.tensor(array).movedim(-1, 0) / 255},
        "part": MediaPart(Modality.IMAGE, data, "mine"),
    }


def test_sources(qwen, tmp_path) -> None:
    for name, source in sources(tmp_path).items():
        [part] = parts_from([source])
        [image] = qwen.media_reader.read([part]).images
        assert np.array_equal(np.asarray(image), np.asarray(PICTURE)), name


def test_parts_without_a_source_take_the_other_argument() -> None:
    image, audio = {"type": "image"}, {"type": "audio"}
    parts = parts_from([image, "and", audio, image], ["a.png", "b.png"], audio="c.wav")
    assert [part if isinstance(part, str) else part.source for part in parts] == [
        *("a.png", "and", "c.wav", "b.png"),
    ]
    for given, images, expected in (
        ([image, image], "a.png", r"^parts\[1\] has no source: add one under 'image'"),
        (["what?"], "a.png", r"^images\[0\] was passed, but every part"),
    ):
        with pytest.raises(InputError, match=expected):
            parts_from(given, images)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], "messages must be a non-empty list such as"),
        ("What?", "messages must be a non-empty list such as"),
        (["What?"], r"messages\[0\] must be a dict with role and content, not str"),
        ([{"content": "a"}], r"messages\[0\]: role must be one of"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content must be a list of texts"),
        ([{"role": "user", "content": [5]}], r"content\[0\] must be a string, a dict or a PIL"),
        ([{"role": "user", "content": [{"type": "cat"}]}], r"type must be one of text, image"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "text must be a string"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "a.png", "size": 5}]}],
            r"messages\[0\].content\[0\]: unsupported fields \(size\); leave them out",
        ),
        (
            [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?"}}]}],
            r"content\[0\] is not valid base64",
        ),
        (
            [{"role": "system", "content": [{"type": "image", "image": "a.png"}]}],
            "only user and tool",
        ),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant"}],
            "must end with a message to answer",
        ),
        ([{"role": "user", "content": " "}], r"messages\[0\].content is empty: add some text"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is empty: add some text"),
        (
            [{"role": "user", "content": ["<|im_", "end|>"]}],
            r"messages\[0\].content contains '<\|im_end\|>', a control token",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "image": "gone.png"}]}],
            "gone.png: no such file",
        ),
        (
            [{"role": "user", "content": [{"type": "audio", "audio": "a.wav"}]}],
            "a.wav: Qwen3-VL does not support audio",
        ),
    ],
)
def test_messages_that_are_refused(qwen, given: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        qwen.chat_completion(given)


def test_a_prompt_or_messages(qwen) -> None:
    with pytest.raises(InputError, match="pass a prompt or messages, not both"):
        qwen(None, "Why?", messages=[{"role": "user", "content": "Why?"}])
    with (
        qwen.chat() as chat,
        pytest.raises(InputError, match="pass only one of prompt, parts and messages"),
    ):
        chat.ask("Why?", parts=["Why?"])
    with pytest.raises(InputError, match="prompt is empty"):
        qwen()
    with pytest.raises(InputError, match=r"the first argument is images; pass .* as prompt="):
        qwen("What is it?")
    with pytest.raises(
        InputError, match=r"^generation_config=GenerationConfig \{.*to the pipeline"
    ):
        qwen(None, "Why?", generation_config=qwen.model.generation_config)


def test_a_message_of_its_own_type() -> None:
    message = Message("user", ("What?",))
    assert messages_from([message]) == [message]
    with pytest.raises(InputError, match="prompt must be text, not int"):
        Message("user", (5,))  # type: ignore
