"""SharedMedia: media that are prefilled once for many questions about them.

``choose`` answers multiple-choice questions by selecting the most likely choice.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from oscar_mm.admission.admission import Past
from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.memory import MemoryReport
from oscar_mm.engine.message import Message, first_turn
from oscar_mm.engine.prefill_runner import PrefillRunner
from oscar_mm.engine.prompt import Prompt, beginning, text_after
from oscar_mm.engine.request import Request
from oscar_mm.engine.sampling import NAN, Sampling
from oscar_mm.errors import InputError
from oscar_mm.media.media import Media
from oscar_mm.torch_modes import eager

if TYPE_CHECKING:
    from oscar_mm.pipelines.pipeline import Pipeline

_QUESTION = "oscar-question"
"""Placeholder text that stands for later questions."""


class SharedMedia:
    """Prefix of a first turn, up to its last media item, in a cache that questions continue.

    The media are processed and prefilled once. All questions share the media's pages, whether they
    run one after another or as rows of a batch. A question attends to packed pages, so its answer
    may differ slightly from the answer to a prompt that is prefilled in one pass with exact
    attention. With policy "bf16" there is no difference.

    Args:
        pipe: pipeline that runs the model and whose store contains the pages.
        media: decoded media, see ``Pipeline.read_media``; if empty, nothing is shared.
        system: system prompt.

    Raises:
        InputError: if the model does not support the media, there are too many media, or the system
            prompt is invalid.
    """

    def __init__(self, pipe: Pipeline, media: Media, system: str | None = None) -> None:
        pipe.admission.check_messages(first_turn(_QUESTION, system=system))
        self.pipe, self.system = pipe, system
        self._cache = OscarCache(pipe.policy, store=pipe.store)
        self._prompt: Prompt | None = None
        self._state: object = None
        """Fingerprint of the weights with which the media were prefilled."""
        self._parts = media.parts
        self._before, self._shows = "", len(media) > 0
        if self._shows:
            whole = pipe.prepare(self._asked(_QUESTION), media)
            self._before = self._split(_QUESTION)[0]
            rest, ids = self._rest(_QUESTION)[0], whole.inputs["input_ids"][0].cpu()
            tokens = len(ids) - len(rest)
            if tokens < whole.media[-1].stop or not torch.equal(ids[tokens:], rest):
                raise InputError(
                    "this checkpoint's chat template or tokenizer merges the question with the "
                    "media before it, so questions cannot share the media; ask each in its own call"
                )
            self._prompt = beginning(whole, tokens)

    @property
    def tokens(self) -> int:
        """Number of tokens in the shared prefix; 0 if there are no media."""
        return 0 if self._prompt is None else self._prompt.tokens

    @property
    def prompt(self) -> Prompt | None:
        """Shared prefix as a prompt; None if there are no media."""
        return self._prompt

    def read(self) -> None:
        """Prefill the media on the first call, and then drop everything except their pages.

        Raises:
            RequestTooLarge: if the media leave no room for an answer.
            InputError: if weights or adapters have changed since the media were prefilled.
        """
        if self._prompt is None:
            return
        reader = self.pipe.engine.reader
        if self._cache.get_seq_length():
            if reader.present_state() != self._state:
                raise InputError(
                    "the model's weights or adapters have changed since the shared media were "
                    "prefilled: create a new SharedMedia"
                )
            return
        self.pipe.admission.check_prompt(self._prompt, 1)
        prompt, cache = self._prompt, self._cache

        def prefill() -> None:
            try:
                reader.read(prompt, cache)
            except BaseException:
                cache.reset()
                raise
            # Only now, since a model's first prefill on a GPU moves weights.
            self._state = reader.present_state()

        self.pipe.engine.call(prefill, runs_model=True)
        self._prompt = replace(self._prompt, inputs={"input_ids": self._prompt.inputs["input_ids"]})

    def new_request(self, question: str, sampling: Sampling) -> Request:
        """Create a request that continues from the media's pages; the first call prefills them.

        Args:
            question: text of the question.
            sampling: sampling options.

        Raises:
            InputError: if the text is invalid.
            RequestTooLarge: if the text is too long.
        """
        start = time.perf_counter()
        prompt, past = self._after_media(question, sampling.max_new_tokens)
        cache = self.pipe.engine.call(past.fork)
        history = None if self._prompt is None else self._prompt.inputs["input_ids"]
        answer = Request(self.pipe.engine, prompt, cache, sampling, start, history)
        answer.prompt_tokens += past.get_seq_length()
        return answer

    def question(self, question: str, answers: Sequence[str]) -> Question:
        """Create a multiple-choice question; the first call prefills the media.

        Args:
            question: text of the question.
            answers: texts to choose from.

        Raises:
            InputError: if the text is invalid, or an answer is empty or contains control tokens.
            RequestTooLarge: if the question is too long.
        """
        choices = self._continuations(question, answers)
        prompt, past = self._after_media(question, max(map(len, choices)))
        return Question(prompt, past, choices)

    def _after_media(self, question: str, max_new_tokens: int) -> tuple[Prompt, OscarCache]:
        """Return the prompt of a question and the cache that it continues.

        Raises ``RequestTooLarge`` if the prompt and an answer of ``max_new_tokens`` do not fit.
        """
        self.pipe.admission.check_text("prompt", question)
        self.read()
        if self._prompt is None:
            prompt = self.pipe.prepare(self._asked(question), Media())
            self.pipe.admission.check_prompt(prompt, max_new_tokens)
            return prompt, self._cache
        prompt = text_after(self._prompt, self._rest(question))
        past = Past(self._cache, self._cache.get_seq_length())
        self.pipe.admission.check_prompt(prompt, max_new_tokens, past)
        return prompt, self._cache

    def _continuations(self, question: str, answers: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each answer as a continuation of the question.

        Raises:
            InputError: if an answer is not text, is empty, or contains control tokens.
        """
        self.pipe.admission.check_text("prompt", question)
        for index, answer in enumerate(answers):
            self.pipe.admission.check_text(f"choices[{index}]", answer)
        _, last, rest = self._split(question)
        tokenize = self.pipe.family.tokenize
        start = tokenize(last + rest)[0]
        rows = [tokenize(last + rest + answer)[0] for answer in answers]
        if any(not torch.equal(ids[: len(start)], start) for ids in rows):
            raise InputError(
                "this checkpoint's tokenizer merges the end of a question and the start of its "
                "answer into one token, so choices cannot be scored"
            )
        return [ids[len(start) :].tolist() for ids in rows]

    def close(self) -> None:
        """Release the pages; requests that are still running keep the pages that they use."""
        self.pipe.engine.call(self._cache.close)

    def _asked(self, question: str) -> list[Message]:
        return first_turn(question, self._parts, self.system)

    def _split(self, question: str) -> tuple[str, str, str]:
        """Split the rendered turn at the media's last control token: text before, token, rest."""
        family = self.pipe.family
        text = family.render(self._asked(question))
        if not self._shows:
            return "", "", text
        special = {*family.processor.tokenizer.all_special_tokens, *family.placeholders}
        place = max(text.rfind(placeholder) for placeholder in family.placeholders)
        longest_first = sorted(map(re.escape, special), key=len, reverse=True)
        marks = re.compile(f"(?:{'|'.join(longest_first)})+").match(text, place)
        stop = place if marks is None else marks.end()
        last = max((token for token in special if text.endswith(token, place, stop)), key=len)
        return text[: stop - len(last)], last, text[stop:]

    def _rest(self, question: str) -> torch.Tensor:
        """Return the ids of the text after the media, of shape (1, tokens)."""
        before, last, rest = self._split(question)
        if before != self._before:
            raise InputError(
                "this checkpoint's chat template writes the question before the media, so "
                "questions cannot share the media; ask each in its own call"
            )
        # Remove the control token only after tokenization, because a tokenizer may treat the
        # start of a text differently.
        tokenize = self.pipe.family.tokenize
        return tokenize(last + rest)[:, tokenize(last).shape[1] :]


@dataclass(frozen=True)
class Question:
    """Multiple-choice question, ready for prefill.

    Attributes:
        prompt: prompt of a single row.
        cache: cache that the prompt continues; it is not modified.
        choices: token ids of each choice.
    """

    prompt: Prompt
    cache: OscarCache
    choices: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Choice:
    """Scores of the choices of one question.

    Attributes:
        best: index of the most likely choice; the lowest index in case of a tie.
        scores: log-probability of each choice as the full answer, see ``log_likelihoods``.
        memory: memory report at the time when the choices were scored.
        prompt_tokens: number of tokens of the prompt and everything before it, including media.
    """

    best: int
    scores: list[float]
    memory: MemoryReport
    prompt_tokens: int


def choose(pipe: Pipeline, questions: Sequence[Question]) -> list[Choice]:
    """Prefill several multiple-choice questions, and score the choices of each question.

    Args:
        pipe: pipeline whose model scores the choices.
        questions: questions with choices.

    Raises:
        FloatingPointError: if the model's logits are NaN.
        torch.OutOfMemoryError: if there are too many questions at once.
    """

    def score() -> list[Choice]:
        caches = [question.cache.fork() for question in questions]
        try:
            prompts = [question.prompt for question in questions]
            choices = [question.choices for question in questions]
            scores = log_likelihoods(pipe.engine.reader, prompts, caches, choices)
            return [
                Choice(
                    best=max(range(len(row)), key=row.__getitem__),
                    scores=row,
                    memory=cache.memory(),
                    prompt_tokens=cache.get_seq_length(),
                )
                for cache, row in zip(caches, scores, strict=True)
            ]
        finally:
            for cache in caches:
                cache.close()

    return pipe.engine.call(score, runs_model=True)


@eager
@torch.inference_mode()
def log_likelihoods(
    reader: PrefillRunner,
    prompts: Sequence[Prompt],
    caches: Sequence[OscarCache],
    continuations: Sequence[Sequence[Sequence[int]]],
) -> list[list[float]]:
    """Return the log-probability of each continuation as the full answer to its prompt.

    The probability that the answer ends after the continuation is included, so that a short
    continuation has no advantage over a longer one that starts with it.

    Args:
        reader: prefill runner; call this function on the runner's engine thread.
        prompts: prompts of a single row each.
        caches: caches that the prompts continue; the prompts are added to them. The continuations
            are prefilled on forks, which share the caches' pages.
        continuations: for each prompt, its continuations as non-empty lists of token ids.

    Raises:
        FloatingPointError: if the model's logits are NaN.
    """
    first = reader.prefill_batch(prompts, caches)
    texts = [(row, list(ids)) for row, several in enumerate(continuations) for ids in several]
    forks = [caches[row].fork() for row, _ in texts]
    try:
        read = [text_after(prompts[row], torch.tensor([ids])) for row, ids in texts]
        after = reader.prefill_batch(read, forks, every_token=True)
    finally:
        for fork in forks:
            fork.close()
    end_tokens = sorted(reader.family.end_tokens())
    scores: list[list[float]] = [[] for _ in continuations]
    for (row, ids), logits in zip(texts, after, strict=True):
        scored = torch.cat([first[row], logits]).float().log_softmax(-1).cpu()
        if bool(scored.isnan().any()):
            raise FloatingPointError(NAN)
        chosen = scored[:-1].gather(-1, torch.tensor(ids)[:, None]).sum()
        scores[row].append(float(chosen + scored[-1, end_tokens].logsumexp(-1)))
    return scores
