"""OscarOmniPipeline: answer questions about audio, images and videos in text or speech."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Unpack

from oscar_mm.engine.answer import Answer, AnswerStream
from oscar_mm.engine.message_lists import conversation_from
from oscar_mm.engine.request_options import RequestOptions
from oscar_mm.errors import InputError, shown
from oscar_mm.media.media import AudioInput, ImageInput, VideoInput
from oscar_mm.pipelines.families.qwen3_omni import Qwen3Omni
from oscar_mm.pipelines.pipeline import Pipeline

READ_ALOUD = "Read the text aloud."
"""Question that precedes a text to read aloud, since the talker reads questions too."""
_ARGUMENTS = (
    *("images", "prompt", "videos", "audio", "system", "messages"),
    *("use_audio_in_video", "speak", "speaker"),
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
            speak: also speak the answer, in ``answer.speech``: float32 mono samples at
                ``answer.sample_rate``, at most 328 seconds. Needs a checkpoint with a talker;
                ``stop`` is not supported, because words are spoken as they are written.
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
        checked and its media are decoded immediately; the model runs as chunks are consumed. With
        ``speak``, the ``with_speech`` method also yields the speech, in pieces of about 0.4
        seconds, while the answer is written. Arguments and errors are the same as in ``__call__``.
        """
        start = time.perf_counter()
        if messages is None:
            _check_order(images, prompt)
        chosen, template, of_media, adapter = self.read_options(options, _ARGUMENTS)
        if speak:
            speaker = self.check_speech(speaker, chosen)
        elif speaker is not None:
            raise InputError("speaker requires speak=True")
        media, sound = (images, videos, audio), use_audio_in_video
        how: dict[str, Any] = {"sound": sound, "options": of_media}
        how["open_end"] = template.takes_any_end
        asked = conversation_from(prompt, media, messages, system, **how)
        question = self.read_request(
            asked, chosen.max_new_tokens, template=template, adapter=adapter
        )
        return self.answer(question, chosen, start, speaker=speaker)

    def read_aloud(
        self, text: str, *, speaker: str | None = None, seed: int | None = None
    ) -> AnswerStream:
        """Speak a text as if it were an answer, and stream the speech; only the talker runs.

        ::

            for piece in omni.read_aloud("Good morning.").with_speech():
                ...  # Some pieces are Speech, with samples.

        Args:
            text: the text, of at most 4,095 tokens.
            speaker: see ``__call__``.
            seed: seed of the talker's random choices; None for different choices each time.

        Raises:
            InputError: if the text is invalid, or the checkpoint cannot speak.
        """
        start, speaker = time.perf_counter(), self.check_speech(speaker)
        script = self.script("text", text)
        sampling = self.sampling({"seed": seed, "max_new_tokens": len(script) + 1}, ("text",))
        prompt = self.read_request(conversation_from(READ_ALOUD, (None, None, None), None, None))
        return self.streamed(
            self.new_request(prompt, sampling, start, speaker=speaker, script=script)
        )


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
