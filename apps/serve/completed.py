"""CompletedAnswer: a complete answer and its token usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oscar_mm.engine.answer import Answer
from oscar_mm.pages.layout import PAGE_TOKENS


@dataclass(frozen=True)
class CompletedAnswer:
    """A complete answer and its token usage; they outlive the chat.

    Attributes:
        answer: the answer.
        cached_tokens: prompt tokens that were in the stored chat or the prefix cache.
        prompt_tokens: tokens of the whole prompt, including earlier turns.
    """

    answer: Answer
    cached_tokens: int
    prompt_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens and memory of the conversation, under the names of the API and this server."""
        written, memory = len(self.answer.token_ids), self.answer.memory
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {
                # In whole pages: the exact number would tell clients about other requests.
                "cached_tokens": self.cached_tokens // PAGE_TOKENS * PAGE_TOKENS,
                "audio_tokens": memory.tokens["audio"],
            },
            "completion_tokens_details": {"reasoning_tokens": self.answer.reasoning_tokens},
            "kv_bytes": memory.kv_bytes,
            "kv_ratio": round(memory.ratio, 4),
            "kv_bytes_by_modality": dict(memory.by_modality),
        }
