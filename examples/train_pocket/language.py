"""Language of the pocket models: questions, tokenizer and chat templates."""

import re
from collections.abc import Sequence

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from examples.train_pocket.words import COLOURS, FILLERS, PLACES, SHAPES, SPOKEN

# {name} is a field that the generators fill in. Each question draws one of its ways of asking; the
# README, the tests and the harness use the first.
QUESTIONS = {
    "read": (
        "What is the code in picture {label}?",
        "Read picture {label}.",
        "What does picture {label} say?",
    ),
    "read_only": ("What is the code?", "What does it say?", "What is the code in picture {label}?"),
    "find": ("Which picture says {code}?", "Where is the code {code}?"),
    "list": ("Read pictures {label}, {label2} and {label3}.",),
    "copy": ("Write all codes.",),
    "price": (
        "How much is {item} in picture {label}?",
        "What does {item} cost in picture {label}?",
    ),
    "prices": ("How much are {item} and {item2} in picture {label}?",),
    "total": ("What is the sum in picture {label}?", "What does picture {label} total?"),
    "add": ("Add the sums of pictures {label} and {label2}.",),
    "count_colour": ("How many {colour} shapes are in picture {label}?",),
    "count_shape": ("How many {shape}s are in picture {label}?",),
    "place": ("Where is the {colour} {shape} in picture {label}?",),
    "hear": (
        "What was said in clip {label}?",
        "Which digits are in clip {label}?",
        "Write clip {label}.",
    ),
    "hear_only": ("What was said?", "Which digits do you hear?", "What was said in clip {label}?"),
    "hear_word": ("What was said in clip {label}?", "Which word is in clip {label}?"),
    "hear_find": ("Which clip said {code}?", "Where was {code} said?"),
    "hear_list": ("Write clips {label}, {label2} and {label3}.",),
    "hear_copy": ("Write all clips.",),
}

SPECIAL = {
    "pad_token": "<|endoftext|>",
    "eos_token": "<|im_end|>",
    "im_start_token": "<|im_start|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
    "audio_token": "<|audio_pad|>",
}
LLAVA_SPECIAL = {
    "pad_token": "<pad>",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "image_token": "<image>",
    "user_open_token": "[INST]",
    "user_close_token": "[/INST]",
}

# A digit, a capital letter, and a word with the space after it are one token each.
SPLIT = r"[A-Z]?[a-z]+ ?|[A-Z]|[0-9]|\n|[^A-Za-z0-9\n]"

MEDIA = """
{%- set seen = namespace(image=0, video=0, audio=0) -%}
{%- macro medium(part, kind, name, token) -%}
{%- if kind == 'image' -%}{%- set seen.image = seen.image + 1 -%}
{%- elif kind == 'video' -%}{%- set seen.video = seen.video + 1 -%}
{%- else -%}{%- set seen.audio = seen.audio + 1 -%}{%- endif -%}
{%- if add_vision_id | default(true) -%}
{{ name ~ ' ' ~ (part.label if part.label is defined else seen[kind]) ~ ':' }}
{%- endif -%}
{{ token }}
{%- endmacro -%}
{%- macro render(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{ medium(part, 'image', 'Picture', IMAGE) }}
{%- elif part.type == 'video' -%}{{ medium(part, 'video', 'Video', VIDEO) }}
{%- elif part.type == 'audio' -%}{{ medium(part, 'audio', 'Clip', AUDIO) }}
{%- elif part.type == 'text' -%}{{ part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
QWEN_TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\n' ~ render(message.content) ~ '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}
"""
LLAVA_TEMPLATE = """
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{ render(message.content) ~ '</s>' }}
{%- elif message.role == 'system' -%}{{ render(message.content) ~ '\n' }}
{%- else -%}{{ '[INST]' ~ render(message.content) ~ '[/INST]' }}
{%- endif -%}
{%- endfor -%}
"""


def chat_template(llava: bool) -> str:
    """A Jinja template that numbers the media of a conversation: "Picture 1:", "Clip 1:".

    A part may carry its own number: ``{"type": "image", "label": 17}``.
    """
    tokens = {
        "IMAGE": "<image>" if llava else "<|vision_start|><|image_pad|><|vision_end|>",
        "VIDEO": "" if llava else "<|vision_start|><|video_pad|><|vision_end|>",
        "AUDIO": "" if llava else "<|audio_start|><|audio_pad|><|audio_end|>",
    }
    names = "".join(f"{{%- set {name} = '{token}' -%}}" for name, token in tokens.items())
    body = MEDIA + (LLAVA_TEMPLATE if llava else QWEN_TEMPLATE)
    return names + re.sub(r"\n\{", "{", body).strip()


def fixed_text() -> list[str]:
    """All strings between fields, and all words that can fill a lower-case field."""
    texts = [piece for ways in QUESTIONS.values() for way in ways for piece in pieces(way)[::2]]
    words = [*SPOKEN, *PLACES, *COLOURS, *(f"{word} " for word in (*COLOURS, *FILLERS))]
    roles = ["user\n", "assistant\n", "system\n", "Picture ", "Clip ", "Video "]
    shapes = [f"{shape}{end}" for shape in SHAPES for end in ("", " ", "s ")]
    return [*texts, *words, *shapes, *roles]


def pieces(template: str) -> list[str]:
    """Split into text, field, ..., text; a space after a field of a word belongs to the field."""
    parts = re.split(r"\{(\w+)\}", template)
    for place in range(1, len(parts), 2):
        if parts[place] == "shape":
            # "{shape}s " is one word.
            tail = re.match(r"s? ?", parts[place + 1])[0]
        else:
            tail = " " if parts[place] == "colour" else ""
        parts[place] += tail
        parts[place + 1] = parts[place + 1][len(tail) :]
    return parts


def build_tokenizer(llava: bool) -> PreTrainedTokenizerFast:
    """A tokenizer of known words and, for all else, bytes: it decodes any text to itself."""
    words = sorted(
        {word for text in fixed_text() for word in re.findall(SPLIT, text) if len(word) > 1}
    )
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    entries = [(letter, -10.0) for letter in alphabet]
    entries += [(word.replace(" ", "\u0120"), -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(entries, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = LLAVA_SPECIAL if llava else SPECIAL
    tokenizer.add_special_tokens(list(special.values()))
    if llava:
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
        )
    usual = {name: special[name] for name in special if name[:3] in ("pad", "bos", "eos")}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        extra_special_tokens={name: special[name] for name in special if name not in usual},
        model_max_length=65536,
        clean_up_tokenization_spaces=False,
        **usual,
    )


class Speller:
    """Token ids of texts and tables of texts, as tensors on one device.

    Args:
        tokenizer: tokenizer from ``build_tokenizer``.
        device: device of all tables.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, device: torch.device) -> None:
        self.tokenizer, self.device = tokenizer, device
        self._constants: dict[str, torch.Tensor] = {}
        self._ids: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without special tokens."""
        if text not in self._ids:
            self._ids[text] = self.tokenizer(text, add_special_tokens=False).input_ids
        return list(self._ids[text])

    def constant(self, text: str) -> torch.Tensor:
        """(tokens,) int64, copied to the device once: a copy in each step would wait for it."""
        if text not in self._constants:
            ids = torch.tensor(self.ids(text), dtype=torch.long)
            self._constants[text] = ids.to(self.device)
        return self._constants[text]

    def table(self, texts: Sequence[str]) -> torch.Tensor:
        """(texts, longest) int64 token ids, filled up with -1."""
        rows = [self.ids(text) for text in texts]
        width = max(map(len, rows))
        filled = [row + [-1] * (width - len(row)) for row in rows]
        return torch.tensor(filled, dtype=torch.long, device=self.device)

    def numbers(self, limit: int) -> torch.Tensor:
        """(limit, digits) int64 token ids of the numbers 0 .. limit - 1."""
        return self.table([str(number) for number in range(limit)])
