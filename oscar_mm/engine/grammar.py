"""Grammar: constraint on the text of an answer, enforced by token masks.

llguidance compiles a grammar and tracks its state on the host. The mask of a token depends only on
the tokens before it, so the host computes it while the device computes the logits, and steps can
still be launched early.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch

from oscar_mm.errors import InputError
from oscar_mm.tool_parsers.schema import without_unknown_formats

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer

    from oscar_mm.engine.sampling import SamplingState

MAX_CHARACTERS, _MAX_CALLS = 1 << 16, 1 << 20
"""Maximum number of characters in a schema, expression or grammar from a client, and in a grammar
for tool calls."""
MAX_CHOICES = 1024
_MAX_ROWS = {"json": 2000, "regex": 2000, "grammar": 200, "calls": 2000}
"""Maximum number of parallel parser items, by kind of grammar. For ambiguous grammars, the time per
step grows with the square of this number; a schema needs four items per optional property."""
_WHITESPACE = r"[ \n\r\t]{1,40}"
"""Whitespace between the parts of a JSON text; bounded, since weak models might write nothing
else."""
_MESSAGE = 300
"""Maximum number of characters of a compiler message quoted in an error."""
_BANNED = -1e30
"""Logit of a token that the grammar allows and another rule bans; chosen only if all are banned."""
_WORD = 32
"""Number of tokens per word of a mask."""


@dataclass(frozen=True)
class Grammar:
    """Constraint on the text of an answer; create it with a class method.

    Attributes:
        kind: "json" (a schema), "regex", "grammar" (Lark, GBNF) or "calls" (generated Lark).
        text: the schema, expression or grammar.
        name: name of the argument, for error messages.

    Raises:
        InputError: if the text is too long.
    """

    kind: Literal["json", "regex", "grammar", "calls"]
    text: str
    name: str = "grammar"
    prototype: LLMatcher | None = field(default=None, compare=False, repr=False)
    """Compiled grammar, copied for each answer; None before ``compiled``."""

    def __post_init__(self) -> None:
        if self.kind not in _MAX_ROWS or not isinstance(self.text, str):
            raise InputError(f"{self.name}: create it with a class method of Grammar")
        limit = _MAX_CALLS if self.kind == "calls" else MAX_CHARACTERS
        if len(self.text) > limit:
            raise InputError(
                f"{self.name} has {len(self.text):,} characters, but at most {limit:,} are "
                "allowed; shorten it"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, name: str = "grammar") -> Grammar:
        """Create a grammar for JSON texts that match a schema, with properties in schema order.

        Args:
            schema: JSON schema, as a mapping or JSON text.
            name: name of the argument, for error messages.

        Raises:
            InputError: if ``schema`` is not a JSON schema, or is too long.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(without_unknown_formats(parsed))
        except (TypeError, ValueError, RecursionError):
            parsed, text = None, ""
        if not isinstance(parsed, Mapping):
            raise InputError(f"{name}: must be a JSON schema: an object of JSON values")
        return cls("json", text, name)

    @classmethod
    def json_object(cls, name: str = "grammar") -> Grammar:
        """Create a grammar that matches any JSON object."""
        return cls.json_schema({"type": "object"}, name)

    @classmethod
    def regex(cls, expression: str, name: str = "grammar") -> Grammar:
        """Create a grammar from a regular expression that the whole text must match.

        Look-around and backreferences are not supported.
        """
        if not isinstance(expression, str) or not expression:
            raise InputError(f"{name}: must be a non-empty regular expression")
        return cls("regex", expression, name)

    @classmethod
    def choice(cls, choices: Sequence[str], name: str = "grammar") -> Grammar:
        """Create a grammar that matches one of the given texts.

        Raises:
            InputError: if there are no choices or too many, or if a choice is empty or not text.
        """
        are_texts = isinstance(choices, list | tuple) and all(
            isinstance(choice, str) and choice for choice in choices
        )
        if not are_texts or not 0 < len(choices) <= MAX_CHOICES:
            raise InputError(f"{name}: must be a list of 1 to {MAX_CHOICES:,} non-empty texts")
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return cls("grammar", f"start: TEXT\nTEXT: {texts}", name)

    @classmethod
    def cfg(cls, grammar: str, name: str = "grammar") -> Grammar:
        """Create a context-free grammar from llguidance's variant of Lark, or from llama.cpp's
        GBNF."""
        if not isinstance(grammar, str) or not grammar.strip():
            raise InputError(f"{name}: must be a non-empty grammar")
        return cls("grammar", grammar, name)

    @classmethod
    def calls(cls, grammar: str, name: str = "tool_choice") -> Grammar:
        """Create a grammar for tool calls from ``ToolOffer.grammar``; it may be longer than a
        client's grammar."""
        return cls("calls", grammar, name)

    def compiled(self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int]) -> Grammar:
        """Compile the grammar for a model; may take seconds, without blocking other threads.

        Args:
            tokenizer: tokenizer of the model.
            vocabulary: number of logits.
            end_tokens: ids that end an answer.

        Raises:
            InputError: if the grammar cannot be compiled, with the reason.
        """
        ends = tuple(sorted(token for token in end_tokens if token < vocabulary))
        tokens = _tokens_of(tokenizer, vocabulary, ends, self.name)
        return replace(self, prototype=_compiled(self, tokens))


class GrammarState:
    """Grammar state of one answer.

    Args:
        grammar: a compiled grammar.
        after: id of the token that ends the reasoning, which is not constrained; None if the
            answer begins without reasoning.
    """

    def __init__(self, grammar: Grammar, after: int | None = None) -> None:
        if grammar.prototype is None:
            raise RuntimeError("grammar not compiled: Pipeline.sampling compiles it")
        self.matcher = grammar.prototype.deep_copy()
        self._name, self._after = grammar.name, after

    @property
    def is_active(self) -> bool:
        """Whether the next token is constrained."""
        return self._after is None and not self.matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Whether the text matches the grammar and cannot be extended."""
        return self._after is None and self.matcher.is_stopped() and self.matcher.is_accepting()

    def note(self, token: int) -> None:
        """Advance the state by the next token of the answer."""
        if self._after is None:
            self.matcher.consume_token(token)
        elif token == self._after:
            self._after = None

    @property
    def error(self) -> InputError | None:
        """Error raised by the parser during the answer, if any."""
        if self._after is not None or not self.matcher.is_error():
            return None
        reason = _in_one_line(self.matcher.get_error())
        return InputError(f"{self._name}: became too complex during the answer ({reason})")


class GrammarMask:
    """Logit mask that leaves only the allowed tokens in rows that have a grammar."""

    def __init__(self, rows: Sequence[tuple[int, SamplingState]], device: torch.device) -> None:
        self._rows = torch.tensor([row for row, _ in rows], dtype=torch.long, device=device)
        self._states = [one.grammar for _, one in rows]
        self._bits = 1 << torch.arange(_WORD, dtype=torch.int32, device=device)
        self._mask = torch.zeros((0, 0), dtype=torch.int32)
        """(rows, words) bit mask, 1 for each allowed token."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Set the logits of all disallowed tokens to minus infinity."""
        if not any(state is not None and state.is_active for state in self._states):
            return
        self._fill(scores)
        mask = self._mask.to(scores.device, non_blocking=True)
        allowed = (mask[:, :, None] & self._bits).ne(0).flatten(1)[:, : scores.shape[1]]
        found = scores[self._rows].clamp(min=_BANNED)
        scores[self._rows] = torch.where(allowed, found, -math.inf)

    def note(self, tokens: torch.Tensor) -> None:
        """Do nothing: the host advances the states when it has the tokens."""

    def _fill(self, scores: torch.Tensor) -> None:
        """Compute the masks of all rows; rows whose grammar is inactive allow all tokens."""
        words = -(-scores.shape[1] // _WORD)
        if not self._mask.numel():
            self._mask = torch.empty(
                (len(self._states), words), dtype=torch.int32, pin_memory=scores.is_cuda
            )
        # Overwriting is safe: the host has read the previous step's tokens, so the copy is done.
        active: list[tuple[LLMatcher, int]] = []
        for place, state in enumerate(self._states):
            if state is not None and state.is_active:
                active.append((state.matcher, place))
            else:
                # Row by row: filling a large tensor starts PyTorch's threads, which then spin on
                # the cores that the grammar's threads need.
                self._mask[place] = -1
        executor = _executor()
        executor.unsafe_compute_mask_ptr(
            active, self._mask.data_ptr(), words * self._mask.element_size(), len(self._mask)
        )
        for matcher, place in active:
            if matcher.is_error():
                self._mask[place] = -1  # The error ends the row at the next token.


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


@lru_cache(maxsize=64)
def _compiled(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    """Return the initial matcher of a grammar, with its first mask computed.

    Raises:
        InputError: if the grammar cannot be compiled.
    """
    from llguidance import LLMatcher

    matcher = LLMatcher(tokens, _source(grammar), limits=_limits(grammar), log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if not matcher.is_error():
        return matcher
    reason = _in_one_line(matcher.get_error())
    if reason.startswith("NoExtension"):
        reason = "no text matches it"
    raise InputError(f"{grammar.name}: cannot be used ({reason})")


def _source(grammar: Grammar) -> str:
    """Convert a grammar to llguidance's format."""
    from llguidance import LLMatcher, grammar_from

    try:
        if grammar.kind == "json":
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": _WHITESPACE, "lenient": False}
            )
        kind = "grammar" if grammar.kind == "calls" else grammar.kind
        return grammar_from(kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{grammar.name}: cannot be used ({_in_one_line(str(error))})") from None


def _limits(grammar: Grammar) -> LLParserLimits:
    """Return limits on time and memory: about 10 ms per mask, and 40 MB per answer."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=_MAX_ROWS[grammar.kind],
        step_lexer_fuel=100_000,
        step_max_items=25_000,
        max_lexer_states=20_000,
        max_grammar_size=20_000,
        verbose_errors=False,
    )


_TOKENIZERS: WeakKeyDictionary[Any, dict[tuple[object, ...], LLTokenizer]] = WeakKeyDictionary()
_MAKING = threading.Lock()


def _tokens_of(tokenizer: Any, vocabulary: int, ends: tuple[int, ...], name: str) -> LLTokenizer:
    """Return a model's tokenizer for llguidance; cached, as a large vocabulary takes a second."""
    from llguidance.hf import from_tokenizer

    with _MAKING:
        known = _TOKENIZERS.setdefault(tokenizer, {})
        if (key := (vocabulary, ends)) not in known:
            size = max(vocabulary, len(tokenizer))
            try:
                known[key] = from_tokenizer(tokenizer, size, list(ends) or None)
            except ValueError as error:
                raise InputError(
                    f"{name}: the tokenizer of this checkpoint cannot be used with grammars "
                    f"({_in_one_line(str(error))})"
                ) from None
        return known[key]


def _in_one_line(message: str) -> str:
    """Shorten a compiler message and put it on one line."""
    words = " ".join(message.replace("<non-verbose/>", "").split())
    return words if len(words) <= _MESSAGE else f"{words[:_MESSAGE]}..."
