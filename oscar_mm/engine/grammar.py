"""Grammar: what the text of an answer must match; masks of the tokens that go on with it.

llguidance compiles a grammar and keeps track of it on the host. The mask of a token is known as
soon as the token before it is, which is while the device computes the logits: steps that are
launched early stay as they are.
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
"""Longest schema, expression or grammar."""
MAX_CHOICES = 1024
_MAX_ROWS = {"json": 2000, "regex": 2000, "grammar": 200, "calls": 2000}
"""Most readings of a text that are followed at once, by kind. The time of a step grows with their
square where a grammar is ambiguous; a schema needs four for each property that may be left out."""
_WHITESPACE = r"[ \n\r\t]{1,40}"
"""Between parts of a JSON text: without a bound weak models write nothing else."""
_MESSAGE = 300
"""Characters of the compiler's message that are told."""
_BANNED = -1e30
"""Logit of a token that something else bans and the grammar allows: if all are, one is taken."""
_WORD = 32
"""Tokens of a word of a mask."""


@dataclass(frozen=True)
class Grammar:
    """What the text of an answer must match; see the class methods.

    Attributes:
        kind: "json" (a schema), "regex", "grammar" (Lark, GBNF) or "calls" (Lark of our own).
        text: the schema, expression or grammar.
        name: what messages call it.

    Raises:
        InputError: it is too long.
    """

    kind: Literal["json", "regex", "grammar", "calls"]
    text: str
    name: str = "grammar"
    prototype: LLMatcher | None = field(default=None, compare=False, repr=False)
    """Copied for each answer, once compiled."""

    def __post_init__(self) -> None:
        if self.kind not in _MAX_ROWS or not isinstance(self.text, str):
            raise InputError(f"{self.name}: must be made by a class method of Grammar")
        most = _MAX_CALLS if self.kind == "calls" else MAX_CHARACTERS
        if len(self.text) > most:
            raise InputError(
                f"{self.name}: has {len(self.text):,} characters, more than the {most:,} "
                "allowed: shorten it"
            )

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, name: str = "grammar") -> Grammar:
        """A JSON text that is valid for a schema; its objects have the order of its properties.

        Args:
            schema: the schema, or its JSON text.
            name: what messages call it.

        Raises:
            InputError: it is no schema, or too long.
        """
        try:
            parsed = json.loads(schema) if isinstance(schema, str) else schema
            text = json.dumps(without_unknown_formats(parsed))
        except (TypeError, ValueError, RecursionError):
            parsed, text = None, ""
        if not isinstance(parsed, Mapping):
            raise InputError(f"{name}: must be a JSON schema, which is an object of JSON values")
        return cls("json", text, name)

    @classmethod
    def json_object(cls, name: str = "grammar") -> Grammar:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, name)

    @classmethod
    def regex(cls, expression: str, name: str = "grammar") -> Grammar:
        """A text that matches a regular expression as a whole; without look-around and references
        back."""
        if not isinstance(expression, str) or not expression:
            raise InputError(f"{name}: must be a regular expression, and not empty")
        return cls("regex", expression, name)

    @classmethod
    def choice(cls, choices: Sequence[str], name: str = "grammar") -> Grammar:
        """One of some texts.

        Raises:
            InputError: there are none or too many, or one is no text or empty.
        """
        are_texts = isinstance(choices, list | tuple) and all(
            isinstance(choice, str) and choice for choice in choices
        )
        if not are_texts or not 0 < len(choices) <= MAX_CHOICES:
            raise InputError(f"{name}: must be a list of 1 to {MAX_CHOICES:,} texts, none empty")
        texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
        return cls("grammar", f"start: TEXT\nTEXT: {texts}", name)

    @classmethod
    def cfg(cls, grammar: str, name: str = "grammar") -> Grammar:
        """A text of a context-free grammar in llguidance's variant of Lark's notation, or in GBNF,
        that of llama.cpp."""
        if not isinstance(grammar, str) or not grammar.strip():
            raise InputError(f"{name}: must be a grammar, and not empty")
        return cls("grammar", grammar, name)

    @classmethod
    def calls(cls, grammar: str, name: str = "tool_choice") -> Grammar:
        """Calls of tools, as ``ToolOffer.grammar`` writes them: a grammar of our own may be longer
        than a client's."""
        return cls("calls", grammar, name)

    def compiled(self, tokenizer: Any, vocabulary: int, end_tokens: frozenset[int]) -> Grammar:
        """The grammar for answers of a model; takes up to seconds, during which others work.

        Args:
            tokenizer: of the model.
            vocabulary: number of logits.
            end_tokens: ids that end an answer.

        Raises:
            InputError: it cannot be served; the message says why.
        """
        ends = tuple(sorted(token for token in end_tokens if token < vocabulary))
        tokens = _tokens_of(tokenizer, vocabulary, ends, self.name)
        return replace(self, prototype=_compiled(self, tokens))


class GrammarState:
    """How far the answer of one row is in its grammar.

    Args:
        grammar: compiled.
        after: id of the token that ends the reasoning, before which everything is allowed; None
            where the answer begins with the text.
    """

    def __init__(self, grammar: Grammar, after: int | None = None) -> None:
        if grammar.prototype is None:
            raise RuntimeError("the grammar is not compiled: Pipeline.sampling does that")
        self.matcher = grammar.prototype.deep_copy()
        self._name, self._after = grammar.name, after

    @property
    def is_active(self) -> bool:
        """Whether the next token must go on with it."""
        return self._after is None and not self.matcher.is_error()

    @property
    def is_complete(self) -> bool:
        """Whether the text matches and nothing can be added to it."""
        return self._after is None and self.matcher.is_stopped() and self.matcher.is_accepting()

    def note(self, token: int) -> None:
        """Go on with the next token of the answer."""
        if self._after is None:
            self.matcher.consume_token(token)
        elif token == self._after:
            self._after = None

    @property
    def error(self) -> InputError | None:
        """Why the answer cannot go on."""
        if self._after is not None or not self.matcher.is_error():
            return None
        reason = _in_one_line(self.matcher.get_error())
        return InputError(f"{self._name}: became too complex during the answer ({reason})")


class GrammarMask:
    """Leaves rows with a grammar the tokens that go on with it."""

    def __init__(self, rows: Sequence[tuple[int, SamplingState]], device: torch.device) -> None:
        self._rows = torch.tensor([row for row, _ in rows], dtype=torch.long, device=device)
        self._states = [one.grammar for _, one in rows]
        self._bits = 1 << torch.arange(_WORD, dtype=torch.int32, device=device)
        self._mask = torch.zeros((0, 0), dtype=torch.int32)
        """(rows, words): a bit for each token, 1 where it is allowed."""

    def apply_(self, scores: torch.Tensor) -> None:
        """Set the logits of all other tokens to minus infinity."""
        if not any(state is not None and state.is_active for state in self._states):
            return
        self._fill(scores)
        mask = self._mask.to(scores.device, non_blocking=True)
        allowed = (mask[:, :, None] & self._bits).ne(0).flatten(1)[:, : scores.shape[1]]
        found = scores[self._rows].clamp(min=_BANNED)
        scores[self._rows] = torch.where(allowed, found, -math.inf)

    def note(self, tokens: torch.Tensor) -> None:
        """Do nothing: the host goes on with the tokens when it has them."""

    def _fill(self, scores: torch.Tensor) -> None:
        """Write the masks of all rows; of those without a grammar by now all tokens are allowed."""
        words = -(-scores.shape[1] // _WORD)
        if not self._mask.numel():
            self._mask = torch.empty(
                (len(self._states), words), dtype=torch.int32, pin_memory=scores.is_cuda
            )
        # The step before has sent its masks long ago: the host has had its tokens.
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
                self._mask[place] = -1  # Its row ends with the next token.


@cache
def _executor() -> LLExecutor:
    from llguidance import LLExecutor

    return LLExecutor()


@lru_cache(maxsize=64)
def _compiled(grammar: Grammar, tokens: LLTokenizer) -> LLMatcher:
    """The beginning of a grammar, whose first mask is known.

    Raises:
        InputError: it cannot be served.
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
    raise InputError(f"{grammar.name}: cannot be served ({reason})")


def _source(grammar: Grammar) -> str:
    """A grammar as llguidance takes it."""
    from llguidance import LLMatcher, grammar_from

    try:
        if grammar.kind == "json":
            return LLMatcher.grammar_from_json_schema(
                grammar.text, overrides={"whitespace_pattern": _WHITESPACE, "lenient": False}
            )
        kind = "grammar" if grammar.kind == "calls" else grammar.kind
        return grammar_from(kind, grammar.text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{grammar.name}: cannot be served ({_in_one_line(str(error))})") from None


def _limits(grammar: Grammar) -> LLParserLimits:
    """Bounds on time and memory: about 10 ms for a step's mask, and 40 MB for an answer."""
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
    """The tokens of a model for llguidance; made once, in about a second for a large vocabulary."""
    from llguidance.hf import from_tokenizer

    with _MAKING:
        known = _TOKENIZERS.setdefault(tokenizer, {})
        if (key := (vocabulary, ends)) not in known:
            size = max(vocabulary, len(tokenizer))
            try:
                known[key] = from_tokenizer(tokenizer, size, list(ends) or None)
            except ValueError as error:
                raise InputError(
                    f"{name}: the tokenizer of this checkpoint has no form that a grammar can use "
                    f"({_in_one_line(str(error))})"
                ) from None
        return known[key]


def _in_one_line(message: str) -> str:
    """A message of the compiler, shortened."""
    words = " ".join(message.replace("<non-verbose/>", "").split())
    return words if len(words) <= _MESSAGE else f"{words[:_MESSAGE]}..."
