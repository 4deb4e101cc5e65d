"""CompletedAnswer: a complete answer of the server, and its usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oscar_mm.engine.answer import Answer
from oscar_mm.pages.layout import PAGE_TOKENS


@dataclass(frozen=True)
class CompletedAnswer:
    """A complete answer and its usage; both outlive the chat.

    Attributes:
        answer: the answer.
        cached_tokens: tokens of the prompt that were in the stored chat or the prefix cache.
        prompt_tokens: tokens of the whole prompt, including earlier turns.
    """

    answer: Answer
    cached_tokens: int
    prompt_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens and memory of the conversation, as the protocol and this server name them."""
        written, memory = len(self.answer.token_ids), self.answer.memory
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {
                # In whole pages: the exact number would tell clients about others.
                "cached_tokens": self.cached_tokens // PAGE_TOKENS * PAGE_TOKENS,
                "audio_tokens": memory.tokens["audio"],
            },
            "completion_tokens_details": {"reasoning_tokens": self.answer.reasoning_tokens},
            "kv_bytes": memory.kv_bytes,
            "kv_ratio": round(memory.ratio, 4),
            "kv_bytes_by_modality": dict(memory.by_modality),
        }
