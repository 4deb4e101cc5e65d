"""OscarOmniPipeline: recordings, images, videos and a question in, text or speech out."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from typing import Unpack

from oscar_mm.errors import InputError
from oscar_mm.generation.answer import Answer, AnswerStream
from oscar_mm.generation.prompt import Prompt
from oscar_mm.generation.sampling import Sampling, SamplingOptions
from oscar_mm.media.audio import AudioSource
from oscar_mm.media.image import ImageSource
from oscar_mm.media.video import VideoSource
from oscar_mm.pipelines.pipeline import Pipeline
from oscar_mm.pipelines.qwen3_omni import Qwen3Omni
from oscar_mm.pipelines.speech import speak_answer, speaker_of

_ARGUMENTS = (
    *("prompt", "audio", "images", "videos", "system"),
    *("use_audio_in_video", "speak", "speaker"),
)


class OscarOmniPipeline(Pipeline):
    """Ask Qwen3-Omni about recordings, images and videos; keys and values stay in 2-bit pages.

    ::

        omni = OscarOmniPipeline("Qwen/Qwen3-Omni-30B-A3B-Instruct")
        answer = omni("Who speaks second?", audio="call.wav")
        print(answer.text)
        print(answer.memory)

    Arguments are those of ``Pipeline``.
    """

    name = "OscarOmniPipeline"
    family: Qwen3Omni

    def __call__(
        self,
        prompt: str,
        audio: AudioSource | Sequence[AudioSource] | None = None,
        images: ImageSource | Sequence[ImageSource] | None = None,
        videos: VideoSource | Sequence[VideoSource] | None = None,
        *,
        system: str | None = None,
        use_audio_in_video: bool = False,
        speak: bool = False,
        speaker: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Answer:
        """Answer one question.

        Args:
            prompt: the question.
            audio: one recording or a list: path of a sound file, bytes, a pair (samples, rate), or
                with ``allow_remote`` an http(s) address. None or [] for none.
            images: one image or a list, as in ``OscarVLPipeline``.
            videos: one video or a list, of paths or of frames.
            system: system prompt.
            use_audio_in_video: hear the sound of video files too, frame by frame.
            speak: also speak the answer: ``answer.speech``, float32 mono at
                ``answer.sample_rate``. Needs a checkpoint with a talker; ``stop`` cannot be used.
            speaker: voice, one of the checkpoint's names; by default "Ethan", or its first.
            sampling: max_new_tokens, temperature, top_p, top_k, repetition_penalty, seed, stop: see
                ``oscar_mm.generation.sampling.SamplingOptions``.

        Raises:
            InputError: media, text or numbers that cannot be used, or speech of a checkpoint that
                cannot speak; as ``NoRoom`` a request that is too long for ``max_context``,
                ``kv_budget`` or the GPU.
        """
        return self.stream(
            prompt,
            audio,
            images,
            videos,
            system=system,
            use_audio_in_video=use_audio_in_video,
            speak=speak,
            speaker=speaker,
            **sampling,
        ).complete()

    def stream(
        self,
        prompt: str,
        audio: AudioSource | Sequence[AudioSource] | None = None,
        images: ImageSource | Sequence[ImageSource] | None = None,
        videos: VideoSource | Sequence[VideoSource] | None = None,
        *,
        system: str | None = None,
        use_audio_in_video: bool = False,
        speak: bool = False,
        speaker: str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AnswerStream:
        """Answer one question; an iterator of pieces of text with the answer as ``result``.

        Its ``with_reasoning`` gives the pieces of a thinking model's reasoning too. The request is
        checked and its media are read at once; the model runs as pieces are taken. A spoken answer
        comes in one piece. Arguments and errors are those of a call.
        """
        start = time.perf_counter()
        chosen = self.sampling(sampling, _ARGUMENTS)
        voice = None
        if speak:
            if chosen.stop:
                raise InputError("stop cannot be used with speak: the speech would go on after it")
            if self.store.ranks.count > 1:
                raise InputError("speak=True: the talker is not divided among ranks; ask one GPU")
            voice = speaker_of(self.family.outer_model, speaker)
        elif speaker is not None:
            raise InputError("speaker is for a spoken answer: pass speak=True too")
        shown = {"images": images, "videos": videos, "audio": audio, "sound": use_audio_in_video}
        question = self.read_request(prompt, shown, system, chosen.max_new_tokens)
        if voice is None:
            return AnswerStream(self.answer(question, chosen, start))
        return AnswerStream(self._spoken(question, chosen, voice, start))

    def _spoken(
        self, prompt: Prompt, sampling: Sampling, speaker: str, start: float
    ) -> Generator[str | Answer, None, None]:
        with self.lock:
            answer = speak_answer(self.family, prompt, self.policy, sampling, speaker, start)
        yield answer.text
        yield answer
