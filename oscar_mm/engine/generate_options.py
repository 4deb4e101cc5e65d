"""Options of transformers' ``generate`` and pipelines, as requests take or refuse them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from oscar_mm.errors import InputError, shown

_RENAMED = {"min_new_tokens": "min_tokens"}
_NEUTRAL = {
    "early_stopping": False,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "renormalize_logits": False,
    "return_dict_in_generate": False,
    "return_full_text": False,
    "typical_p": 1.0,
    "use_cache": True,
}
"""Options with the only value that they may have, which changes nothing."""
_ONE_PATH = "beams are not supported; an answer is one sequence"
_ELSEWHERE = {
    "assistant_model": "leave it out; drafts=True of the pipeline uses the checkpoint's own module",
    "bad_words_ids": "pass the texts as bad_words=[...], or logit_bias={token id: -100}",
    "early_stopping": _ONE_PATH,
    "eos_token_id": "pass stop_token_ids=[...]; with ignore_eos=True only these end the answer",
    "force_words_ids": "pass grammar=...",
    "generate_kwargs": "pass its entries as arguments",
    "generation_config": "pass it to the pipeline, or its values as arguments",
    "guidance_scale": "leave it out; there is no classifier-free guidance",
    "length_penalty": _ONE_PATH,
    "logits_processor": "use logit_bias, bad_words or grammar",
    "max_length": "pass max_new_tokens=..., which counts the answer without the prompt",
    "max_time": "read pipe.stream(...) and leave it when the time is over",
    "no_repeat_ngram_size": "pass repetition_penalty=... or frequency_penalty=...",
    "num_beam_groups": _ONE_PATH,
    "num_beams": _ONE_PATH,
    "num_return_sequences": "pass the request several times to pipe.batch, each with its own seed",
    "output_logits": "pass logprobs=...",
    "output_scores": "pass logprobs=...",
    "past_key_values": "use pipe.chat(), which keeps its cache",
    "penalty_alpha": "leave it out; there is no contrastive search",
    "prompt_lookup_num_tokens": "leave it out",
    "renormalize_logits": "leave it out; probabilities always add up to 1",
    "return_dict_in_generate": "leave it out; the Answer has token_ids, and logprobs if asked for",
    "return_full_text": "answer.text has only the new text; put the prompt before it",
    "sequence_bias": "pass logit_bias={token id: ...}",
    "stop_strings": "pass stop=[...]; with include_stop_str_in_output=True the text keeps them",
    "stopping_criteria": "use stop, stop_token_ids, or pipe.stream(...), which may be left",
    "streamer": "iterate over pipe.stream(...)",
    "suppress_tokens": "pass logit_bias={token id: -100}",
    "text": "pass prompt=...",
    "timeout": "pass limits=MediaLimits(remote_timeout_s=...) to the pipeline",
    "tokenizer": "leave it out; the pipeline has its own",
    "typical_p": "pass top_p=... or min_p=...",
    "use_cache": "leave it out; the cache is always used",
}
_IGNORED = ("pad_token_id",)
"""Options that never affect an answer, since requests are not padded."""


def from_generate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename options of ``generate`` to those of requests, and drop those without effect.

    Raises:
        InputError: if an option of ``generate`` is not supported; the message says what to pass
            instead.
    """
    chosen: dict[str, Any] = {}
    for name, value in options.items():
        own = _RENAMED.get(name, name)
        if own != name and options.get(own) is not None:
            raise InputError(f"{name} and {own} are the same: pass one of them")
        if name in _ELSEWHERE and value is not None and not _is_neutral(name, value):
            raise InputError(f"{name}={shown(value)}: {_ELSEWHERE[name]}")
        if name not in (*_ELSEWHERE, *_IGNORED):
            chosen[own] = value
    return chosen


def _is_neutral(name: str, value: Any) -> bool:
    return isinstance(value, bool | int | float) and value == _NEUTRAL.get(name)


def check_do_sample(do_sample: Any, temperature: Any) -> None:
    """Refuse a ``do_sample`` that is not a bool or contradicts the temperature.

    Args:
        do_sample, temperature: values of the request; None if it does not have them.

    Raises:
        InputError: see above.
    """
    if do_sample is None:
        return
    if not isinstance(do_sample, bool):
        raise InputError(f"do_sample={shown(do_sample)}: must be True or False")
    if temperature is not None and do_sample != (temperature != 0):
        raise InputError(
            f"do_sample={do_sample} and temperature={shown(temperature)} contradict each other: "
            "leave one of them out; temperature=0 is greedy"
        )
