"""CompletedAnswer: a complete answer and its token usage."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oscar_mm.engine.answer import Answer
from oscar_mm.pages.layout import PAGE_TOKENS


@dataclass(frozen=True)
class CompletedAnswer:
    """A complete answer and its token usage; remains valid after the chat is closed.

    Attributes:
        answer: the answer.
        cached_tokens: number of prompt tokens reused from the stored chat or the prefix cache.
        prompt_tokens: number of tokens in the full prompt, including earlier turns.
    """

    answer: Answer
    cached_tokens: int
    prompt_tokens: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the answer and of its speech."""
        return len(self.answer.token_ids) + self.answer.speech_tokens

    @property
    def usage(self) -> dict[str, Any]:
        """Token counts under OpenAI's names, and KV memory under this server's own names."""
        written, memory = self.tokens, self.answer.memory
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self.prompt_tokens + written,
            "prompt_tokens_details": {
                # Rounded down to full pages: exact counts would tell clients about other requests.
                "cached_tokens": self.cached_tokens // PAGE_TOKENS * PAGE_TOKENS,
                "audio_tokens": memory.tokens["audio"],
            },
            "completion_tokens_details": {
                "reasoning_tokens": self.answer.reasoning_tokens,
                "audio_tokens": self.answer.speech_tokens,
                "accepted_prediction_tokens": self.answer.accepted_drafts,
                "rejected_prediction_tokens": self.answer.drafts - self.answer.accepted_drafts,
            },
            "kv_bytes": memory.kv_bytes,
            "kv_ratio": round(memory.ratio, 4),
            "kv_bytes_by_modality": dict(memory.by_modality),
        }
