"""OscarOmniPipeline: answer questions about audio, images and videos in text or speech.

Qwen3-Omni's own ``generate`` produces both the speech and the text of spoken answers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from typing import Any, Unpack

import torch
from transformers.generation.streamers import BaseStreamer

from oscar_mm.cache.cache import OscarCache, as_argument
from oscar_mm.engine.answer import Answer, AnswerStream, Timings
from oscar_mm.engine.message_lists import conversation_from
from oscar_mm.engine.prompt import Prompt
from oscar_mm.engine.request_options import RequestOptions, split_media
from oscar_mm.engine.sampling import Sampling
from oscar_mm.errors import InputError, shown
from oscar_mm.media.encoder_inputs import scaled_inputs, with_features
from oscar_mm.media.media import AudioInput, ImageInput, VideoInput
from oscar_mm.modality import Modality
from oscar_mm.pipelines.families.qwen3_omni import Qwen3Omni, last_logits_only
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.policy import KVPolicy
from oscar_mm.tool_parsers.parser import Piece

_ARGUMENTS = (
    *("images", "prompt", "videos", "audio", "system", "messages"),
    *("use_audio_in_video", "speak", "speaker"),
)
SAMPLE_RATE = 24_000
"""Sample rate of Qwen3-Omni's speech, in Hz."""
_USUAL_SPEAKER = "ethan"
_SPOKEN_OPTIONS = (
    *("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("do_sample", "seed", "deterministic"),
)


class OscarOmniPipeline(Pipeline):
    """Pipeline for Qwen3-Omni: audio, images and videos, with a packed KV cache.

    ::

        omni = OscarOmniPipeline("Qwen/Qwen3-Omni-30B-A3B-Instruct")
        answer = omni(prompt="Who speaks second?", audio="call.wav")
        print(answer.text)
        print(answer.memory)

    The arguments are those of ``Pipeline.__init__``.
    """

    name = "OscarOmniPipeline"
    family: Qwen3Omni

    def __call__(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str = "",
        *,
        videos: VideoInput | Sequence[VideoInput] | None = None,
        audio: AudioInput | Sequence[AudioInput] | None = None,
        system: str | None = None,
        messages: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        speak: bool = False,
        speaker: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer one question.

        Args:
            images, prompt, videos: see ``OscarVLPipeline``.
            audio: one recording or a list of recordings: path of an audio file, bytes, an open
                binary file, a pair (samples, rate) of an array or tensor and Hz, a dict with
                "array" and "sampling_rate", or with ``allow_remote`` an http(s) URL. None or []
                for no audio.
            system: system prompt.
            messages: a full conversation instead of a prompt, see ``OscarVLPipeline``.
            use_audio_in_video: also use the audio tracks of videos, interleaved with the frames.
            speak: also synthesize the answer as speech, in ``answer.speech``: float32 mono samples
                at ``answer.sample_rate``. Needs a checkpoint with a talker; options that end the
                answer early or edit logits are not supported.
            speaker: name of one of the checkpoint's voices; by default "Ethan", or the first voice.
            options: max_new_tokens, temperature, top_p, seed, stop, ..., and media options such as
                max_pixels and fps, which apply to all media; see
                ``oscar_mm.engine.request_options.RequestOptions``.

        Raises:
            InputError: if media, text or numbers are invalid, or the checkpoint cannot speak.
            RequestTooLarge: if the request is too long for ``max_context``, ``kv_budget`` or the
                GPU.
        """
        return self.stream(
            images,
            prompt,
            videos=videos,
            audio=audio,
            system=system,
            messages=messages,
            use_audio_in_video=use_audio_in_video,
            speak=speak,
            speaker=speaker,
            **options,
        ).complete()

    def stream(
        self,
        images: ImageInput | Sequence[ImageInput] | None = None,
        prompt: str = "",
        *,
        videos: VideoInput | Sequence[VideoInput] | None = None,
        audio: AudioInput | Sequence[AudioInput] | None = None,
        system: str | None = None,
        messages: Sequence[Any] | None = None,
        use_audio_in_video: bool = False,
        speak: bool = False,
        speaker: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> AnswerStream:
        """Answer one question and stream the answer.

        The returned iterator yields text chunks; after the last one, its ``result`` is the answer.
        Its ``with_reasoning`` method also yields a thinking model's reasoning. The request is
        checked and its media are decoded immediately; the model runs as chunks are consumed. A
        spoken answer comes in one chunk. Arguments and errors are the same as in ``__call__``.
        """
        start = time.perf_counter()
        if messages is None:
            _check_order(images, prompt)
        chosen, template, of_media = self.read_options(options, _ARGUMENTS)
        voice = None
        if speak:
            _check_spoken(split_media(options, self.family)[0])
            if self.store.ranks.count > 1:
                raise InputError(
                    "speak=True: not supported with tensor parallelism (tp_plan); use one GPU"
                )
            voice = speaker_of(self.family.outer_model, speaker)
        elif speaker is not None:
            raise InputError("speaker requires speak=True")
        media, sound = (images, videos, audio), use_audio_in_video
        how: dict[str, Any] = {"sound": sound, "options": of_media}
        how["open_end"] = template.takes_any_end
        asked = conversation_from(prompt, media, messages, system, **how)
        question = self.read_request(asked, chosen.max_new_tokens, template=template)
        if voice is None:
            return self.answer(question, chosen, start)
        return AnswerStream(self._spoken(question, chosen, voice, start))

    def _spoken(
        self, prompt: Prompt, sampling: Sampling, speaker: str, start: float
    ) -> Generator[Piece | Answer, None, None]:
        spoken = partial(speak_answer, self.family, prompt, self.policy, sampling, speaker, start)
        answer = self.engine.call(spoken, runs_model=True)
        yield answer.text
        yield answer


def _check_order(images: Any, prompt: Any) -> None:
    """Refuse a call that passes the prompt as its first argument, as earlier versions allowed.

    Raises:
        InputError: if the first argument is text and the prompt is not; the message explains the
            order of the arguments.
    """
    no_prompt = not isinstance(prompt, str) or not prompt.strip()
    if isinstance(images, str) and no_prompt:
        raise InputError(
            f"prompt must be text: the first argument is images, here {shown(images)}, and the "
            "second is the prompt; pass the prompt as prompt=..."
        )


def _check_spoken(options: Mapping[str, Any]) -> None:
    """Refuse options that are not supported when the answer is spoken."""
    for name, value in options.items():
        if value is not None and name not in _SPOKEN_OPTIONS:
            raise InputError(f"{name} cannot be used with speak=True: leave it out")


def speaker_of(model: Any, speaker: str | None) -> str:
    """Validate a voice and return its name in lower case.

    Args:
        model: the outer Qwen3-Omni model.
        speaker: name of a voice, in upper or lower case; None for the default.

    Raises:
        InputError: if the checkpoint has no talker or no such voice.
    """
    if not getattr(model, "has_talker", False):
        raise InputError(
            "speak=True: this checkpoint has no talker (or it was disabled), so it answers in "
            "text only; use an Instruct checkpoint with audio output"
        )
    voices = [name.lower() for name in model.config.talker_config.speaker_id or {}]
    if not voices:
        raise InputError("speak=True: this checkpoint's configuration lists no speakers")
    if speaker is None:
        return _USUAL_SPEAKER if _USUAL_SPEAKER in voices else voices[0]
    if not isinstance(speaker, str) or speaker.lower() not in voices:
        raise InputError(f"speaker {speaker!r}: must be one of {', '.join(voices)}")
    return speaker.lower()


class _Listener(BaseStreamer):
    """Streamer that records the text tokens and their arrival times."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt, then each generated token."""
        if self.times:
            self.ids.append(int(value))
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing; the interface requires it."""


def speak_answer(
    family: Qwen3Omni,
    prompt: Prompt,
    policy: KVPolicy,
    sampling: Sampling,
    speaker: str,
    start: float,
) -> Answer:
    """Generate a text answer with an ``OscarCache``, and synthesize it as speech.

    The talker reads the thinker's hidden states for the full prompt, so a spoken answer cannot
    continue a cached conversation. The talker's own tokens are sampled with the checkpoint's
    settings; ``sampling.seed`` makes them reproducible.

    Args:
        family: family of a checkpoint with a talker.
        prompt: prompt of a single row.
        policy: policy for storing the thinker's keys and values.
        sampling: sampling options for the text.
        speaker: name of a voice, see ``speaker_of``.
        start: ``time.perf_counter()`` when the request arrived.
    """
    talker = family.outer_model.talker.config
    if not hasattr(talker, "audio_config"):
        # transformers looks for the audio tower's window size in this config, but only the
        # thinker's config has it.
        talker.audio_config = family.model.config.audio_config
    cache, listener = OscarCache(policy, model=family.model), _Listener()
    cache.expect(prompt.modalities)
    # Pass every option, because the checkpoint's settings would replace missing options.
    options: dict[str, Any] = {
        "do_sample": sampling.temperature > 0,
        "repetition_penalty": float(sampling.repetition_penalty),
    }
    if sampling.temperature > 0:
        options |= {
            "temperature": float(sampling.temperature),
            "top_p": float(sampling.top_p),
            "top_k": sampling.top_k,
            "min_p": float(sampling.min_p),
        }
    ends = family.end_tokens()
    ids = prompt.inputs["input_ids"]
    devices = [ids.device] if ids.device.type == "cuda" else []
    seeded = torch.random.fork_rng(devices=devices, enabled=sampling.seed is not None)
    with seeded, last_logits_only():
        if sampling.seed is not None:
            torch.manual_seed(sampling.seed)
        try:
            _, wave = family.outer_model.generate(
                **with_features(family.model, scaled_inputs(family.model, prompt.arguments())),
                return_audio=True,
                speaker=speaker,
                use_audio_in_video=_is_heard(prompt),
                thinker_max_new_tokens=sampling.max_new_tokens,
                thinker_eos_token_id=sorted(ends),
                thinker_position_ids=prompt.positions,
                thinker_streamer=listener,
                # ``generate`` fails on less than one frame of audio.
                talker_min_new_tokens=2,
                **{
                    f"thinker_{name}": value
                    for name, value in (options | as_argument(cache)).items()
                },
            )
        except RuntimeError:
            # ``generate`` also fails if the text ends at once, which leaves nothing to speak.
            if len(listener.ids) != 1 or listener.ids[0] not in ends:
                raise
            wave = torch.zeros(0)
    ended = listener.ids[-1] in ends
    tokens = listener.ids[:-1] if ended else listener.ids
    first, last = listener.times[1], listener.times[-1]
    cache.shrink()
    return Answer(
        text=family.processor.tokenizer.decode(tokens, skip_special_tokens=True),
        token_ids=tokens,
        memory=cache.memory(),
        timings=Timings(
            prefill_s=first - start,
            decode_s=last - first,
            tokens_per_s=(len(tokens) - 1) / (last - first) if last > first else 0.0,
        ),
        finish_reason="stop" if ended else "length",
        prompt_tokens=prompt.tokens,
        speech=wave.reshape(-1).float().cpu().numpy(),
        sample_rate=SAMPLE_RATE,
    )


def _is_heard(prompt: Prompt) -> bool:
    """Return whether the prompt contains the audio track of a video."""
    row = prompt.modalities[0]
    return any(
        bool((row[span.start : span.stop] == int(Modality.AUDIO)).any())
        for span in prompt.media
        if span.modality is Modality.VIDEO
    )
