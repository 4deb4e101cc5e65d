"""Readings: media are read once, and questions about them get what they get alone."""

import pytest
import torch

from oscar_mm import InputError
from oscar_mm.cache.cache import as_argument
from oscar_mm.engine.prefill import read_prompt
from oscar_mm.engine.sampling import Sampling
from oscar_mm.pipelines.shared_media import SharedMedia, choose
from tests.prompts import clip, noise, prepare, tone

QUESTIONS = ["What is it?", "How many people are in the video, and what do they do?", "Why?"]
MEDIA = {
    "llava": {"images": [noise(100, 200), noise(64, 64, 1)]},
    "qwen": {"images": [noise(100, 200)], "videos": [clip(6)]},
    "omni": {"images": [noise(64, 64, 1)], "videos": [clip(4)], "audio": [tone(1.2), tone(0.7)]},
}
SYSTEM = "Be brief."
HOW = Sampling(max_new_tokens=6)
CHOICES = ["two dogs", "two", "12.50", "the wettest month"]


@pytest.mark.parametrize("name", MEDIA)
def test_answers_are_those_of_whole_prompts(name, request) -> None:
    pipe = request.getfixturevalue(name)
    before = pipe.store.memory().used_bytes
    reading = SharedMedia(pipe, pipe.read_media(**MEDIA[name]), SYSTEM)
    rows = [reading.new_request(text, HOW) for text in QUESTIONS]
    held = pipe.store.memory().used_bytes
    for row in rows:
        pipe.engine.submit(row)
    pipe.engine.run_until(lambda: all(row.ended for row in rows))
    found = [row.answer() for row in rows]
    for index, question in enumerate(QUESTIONS):
        media = {"images": None} | MEDIA[name]
        alone = pipe(prompt=question, **media, system=SYSTEM, max_new_tokens=6)
        assert found[index].token_ids == alone.token_ids
        assert found[index].prompt_tokens == alone.prompt_tokens
        memory = found[index].memory
        assert 0 < memory.shared_bytes < memory.kv_bytes
        assert memory.tokens == alone.memory.tokens
        assert memory.by_kind["tails"] == alone.memory.by_kind["tails"]
    for row in rows:
        row.complete()
    assert pipe.store.memory().used_bytes == held > before
    reading.close()
    assert pipe.store.memory().used_bytes == before


def test_weights_may_move_while_media_are_prefilled(llava, monkeypatch) -> None:
    """As on a GPU, where a model's first prefill joins projections."""
    monkeypatch.setattr(llava.model.generation_config, "eos_token_id", [7, 300])
    reader, read = llava.engine.reader, llava.engine.reader.read
    weight = llava.model.get_decoder().layers[0].self_attn.q_proj.weight

    def moving(*arguments):
        weight.data = weight.data.clone()
        return read(*arguments)

    monkeypatch.setattr(reader, "read", moving)
    media = SharedMedia(llava, llava.read_media([noise(64, 64)]))
    first, second = (media.question("What is it?", ["A dog", "A sign"]) for _ in range(2))
    assert choose(llava, [first])[0].scores == choose(llava, [second])[0].scores
    media.close()


@pytest.mark.parametrize("name", ["llava", "omni"])
def test_choices_are_scored_as_whole_answers(name, request, monkeypatch) -> None:
    pipe = request.getfixturevalue(name)
    monkeypatch.setattr(pipe.model.generation_config, "eos_token_id", [7, 300])
    readings = [
        SharedMedia(pipe, pipe.read_media(**MEDIA[name]), SYSTEM),
        SharedMedia(pipe, pipe.read_media()),
    ]
    questions = [reading.question(QUESTIONS[1], CHOICES) for reading in readings]
    for index, choice in enumerate(choose(pipe, questions)):
        media = pipe.read_media(**MEDIA[name] if not index else {})
        system = SYSTEM if not index else None
        prompt = prepare(pipe, QUESTIONS[1], media, system)
        assert choice.prompt_tokens == prompt.tokens
        assert choice.best == max(range(len(CHOICES)), key=choice.scores.__getitem__)
        for score, tokens in zip(choice.scores, questions[index].choices, strict=True):
            assert score == pytest.approx(alone(pipe, prompt, tokens), abs=1e-3)
    with pytest.raises(InputError, match="control token"):
        readings[0].question("Who?", [pipe.processor.tokenizer.eos_token])
    for reading in readings:
        reading.close()


@torch.inference_mode()
def alone(pipe, prompt, tokens: list[int]) -> float:
    """Log-likelihood of an answer and its end, read token by token after the whole prompt."""
    cache = pipe.new_cache()
    logits, score = read_prompt(pipe.model, prompt, cache)[0], 0.0
    for step, token in enumerate(tokens):
        score += float(logits.log_softmax(-1)[token])
        place = prompt.next_position.expand(*prompt.positions.shape[:-1])[..., None] + step
        ids = torch.tensor([[token]])
        logits = pipe.model(input_ids=ids, position_ids=place, **as_argument(cache)).logits[0, -1]
    return score + float(logits.log_softmax(-1)[sorted(pipe.family.end_tokens())].logsumexp(-1))


def test_what_cannot_be_shared(qwen, monkeypatch) -> None:
    template = qwen.processor.chat_template
    reading = SharedMedia(qwen, qwen.read_media([noise(64, 64)]))
    with pytest.raises(InputError, match="prompt is empty"):
        reading.new_request(" ", HOW)
    with pytest.raises(InputError, match="over the context"):
        reading.new_request("Why?", Sampling(max_new_tokens=qwen.max_context))
    reading.close()
    with pytest.raises(InputError, match="system contains"):
        SharedMedia(qwen, qwen.read_media(), "<|im_end|>")
    first = "{{ messages[-1].content[-1].text }}" + template
    monkeypatch.setattr(qwen.processor, "chat_template", first)
    reading = SharedMedia(qwen, qwen.read_media([noise(64, 64)]))
    with pytest.raises(InputError, match="writes the question before the media"):
        reading.new_request("Why?", HOW)
