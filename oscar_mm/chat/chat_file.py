"""Chat files, which contain a cache (format: ``oscar_mm.cache.saved_cache``) and the turns.

Users can save chats. A ``SpillableConversation`` keeps its cache in the pipeline's store or, when
other chats need the memory, in a file.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oscar_mm.cache.cache import OscarCache
from oscar_mm.cache.checked_file import Content
from oscar_mm.cache.saved_cache import SavedCache, Shape, cache_content, load_cache, save_cache
from oscar_mm.cache.tables_file import SavedTables
from oscar_mm.chat.conversation import ChatEngine, Conversation
from oscar_mm.chat.saved_turns import check_turns
from oscar_mm.chat.turn_fields import (
    MAX_POSITION,
    check_counts,
    offer_fields,
    offer_of,
    token_ids,
    turn_fields,
    turn_of,
)
from oscar_mm.engine.family import Family
from oscar_mm.engine.request import Request
from oscar_mm.errors import InputError
from oscar_mm.modality import Modality
from oscar_mm.modules import acting_weights, weights_key
from oscar_mm.policy import KVPolicy
from oscar_mm.tensor_parallel import TPGroup, local_shard
from oscar_mm.tool_parsers.offer import ToolOffer

FORMAT_VERSION = 2
"""Format version of the turns in the file; the cache has a separate version. Version 1 has no
tools, and only the text of each question instead of its messages."""
_SHOWN = 200
"""Maximum number of characters quoted from an error about a file."""
_SAMPLES = 64
"""Number of values per parameter that a fingerprint covers."""
_CONFIG = (
    *("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "vocab_size", "hidden_act", "rms_norm_eps", "rope_parameters"),
    *("sliding_window", "max_position_embeddings"),
)
"""Configuration fields of the text model that affect keys, values and attention."""


class SavedChat(NamedTuple):
    """Chat read from a file by ``read_chat``.

    Attributes:
        conversation: the conversation without its cache.
        system: the system prompt; None if there is none.
        tools: tools that the model may call; None for no tools.
        cache: cache of the conversation, not yet in a page store.
    """

    conversation: Conversation
    system: str | None
    tools: ToolOffer | None
    cache: SavedCache


def chat_content(
    path: str | Path,
    conversation: Conversation,
    system: str | None,
    fingerprint: str,
    tools: ToolOffer | None = None,
) -> Content:
    """Copy the content of a chat's file to the host, for ``write_checked``.

    Raises:
        InputError: if the conversation has more turns, media or parts than a file may contain.
    """
    turns = [turn_fields(turn) for turn in conversation.turns]
    try:
        check_counts(turns)
    except ValueError as error:
        raise InputError(f"{path}: cannot be written: {error}") from None
    return cache_content(
        conversation.cache,
        path,
        fingerprint=fingerprint,
        metadata={
            "chat": FORMAT_VERSION,
            "system": system,
            "tools": offer_fields(tools),
            "turns": turns,
            "pending": list(conversation.pending),
            "token_ids": conversation.token_ids,
            "next_position": conversation.next_position,
        },
    )


def read_chat(
    path: str | Path,
    *,
    fingerprints: Mapping[str, str | None],
    policy: KVPolicy,
    layers: Sequence[Shape],
    family: Family,
) -> SavedChat:
    """Read a chat file without placing its cache in a page store; any thread may call this.

    The file is not trusted: it is rejected unless a chat of this pipeline could have saved it, so
    that no invalid content reaches a kernel or keeps the engine busy.

    Args:
        path: file of the chat.
        fingerprints: names of the adapters, None first, by the fingerprints of the pipeline's
            model without an adapter and with each.
        policy: policy of the pipeline.
        layers: shapes of the model's layers.
        family: family of the model.

    Raises:
        InputError: if the file cannot be read, is not a chat, has been altered or is for another
            model.
    """
    saved = SavedCache.read(path, fingerprint=fingerprints, policy=policy, layers=layers)
    given, vocabulary = saved.given, family.model.get_input_embeddings().num_embeddings
    version = given.get("chat")
    if version not in (1, FORMAT_VERSION):
        raise InputError(f"{path} is not a chat of version 1 or {FORMAT_VERSION}")
    try:
        check_counts(given["turns"])
        conversation = Conversation(
            kv=None,
            token_ids=given["token_ids"],
            next_position=given["next_position"],
            pending=token_ids(given["pending"], vocabulary),
            turns=tuple(turn_of(turn, version, vocabulary) for turn in given["turns"]),
        )
        _check(conversation, saved.tables, vocabulary)
        check_turns(conversation, saved.tables.codes.reshape(-1), policy, family)
        system = given["system"]
        if not (system is None or isinstance(system, str)):
            raise ValueError("its system prompt is not a text")
        tools = None if version == 1 else offer_of(given["tools"], family)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{path}: cannot be read as a chat: {str(error)[:_SHOWN]}") from None
    return SavedChat(conversation, system, tools, saved)


def _check(conversation: Conversation, tables: SavedTables, vocabulary: int) -> None:
    """Raise ValueError if turns, tokens and cache are inconsistent."""
    ids = conversation.token_ids
    rows, tokens = tables.codes.shape
    if rows > 1 or ids.shape != (1, tokens) or ids.dtype != torch.long:
        raise ValueError("its tokens and its cache differ in length")
    if tokens and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise ValueError("token ids are out of range")
    place = conversation.next_position
    is_position = place.shape == (1,) and place.dtype in (torch.long, torch.float32)
    if not is_position or not 0 <= float(place) < MAX_POSITION:
        raise ValueError("the position of the next token is out of range")
    start = 0
    for turn in conversation.turns:
        if turn.start != start or turn.stop <= start or len(turn.media) != len(turn.forgotten):
            raise ValueError("its turns are not consecutive")
        for span in turn.media:
            if span.modality is Modality.TEXT or not start <= span.start < span.stop <= turn.stop:
                raise ValueError("the tokens of a media item are out of range")
            start = span.stop
        start = turn.stop
    if start != tokens:
        raise ValueError("its turns and its tokens differ in length")


@torch.no_grad()
def model_fingerprint(model: Any) -> str:
    """Return a text that identifies a checkpoint: model type, dtype and a SHA-256 digest.

    The digest covers the part of the text model's configuration that affects the cache, and for
    each parameter its shape and 64 values at fixed indices (all values of smaller parameters). So
    another checkpoint, a fine-tuned version or another quantization has another fingerprint; a
    change to a few weights at other indices is not noticed. Parameter names and devices are
    ignored, so that a checkpoint has the same fingerprint with all versions of transformers. Active
    adapters are included, with their scaling.

    With tensor parallelism, each rank has its own fingerprint, because it has its own heads.

    Args:
        model: transformers model for generation.
    """
    sampled = []
    for label, weight in acting_weights(model):
        flat = local_shard(weight).detach().reshape(-1)
        places = torch.arange(min(_SAMPLES, len(flat)), device=flat.device)
        values = flat[places * len(flat) // max(1, len(places))]
        sampled.append((f"{label}{tuple(weight.shape)}\n", values))
    digests = sorted(
        hashlib.sha256(about.encode() + values.float().cpu().numpy().tobytes()).digest()
        for about, values in sampled
    )
    config = model.config.get_text_config().to_dict()
    about = json.dumps({name: config.get(name) for name in _CONFIG}, sort_keys=True, default=str)
    digest = hashlib.sha256(about.encode() + b"".join(digests)).hexdigest()
    kind = f"{model.config.model_type} {str(model.dtype).removeprefix('torch.')}"
    ranks = TPGroup.of(model)
    return f"{kind} {digest}" if ranks.count == 1 else f"{kind} {ranks} {digest}"


class ModelFingerprint:
    """Fingerprint of a model, recomputed when its weights or adapters have changed.

    Args:
        model: transformers model for generation.
    """

    def __init__(self, model: Any) -> None:
        self._model, self._known = model, ((), "")

    def __call__(self) -> str:
        """Return the fingerprint of the active weights."""
        key, (known, fingerprint) = weights_key(self._model), self._known
        if key != known:
            fingerprint = model_fingerprint(self._model)
            self._known = key, fingerprint
        return fingerprint


class SpillableConversation:
    """Conversation that may be spilled to disk while it is idle; use it in the engine thread.

    Args:
        engine: pipeline of the chat.
        conversation: initial conversation.

    Attributes:
        answering: running request, which generates an answer or prefills past turns; None if no
            request is running.
    """

    def __init__(self, engine: ChatEngine, conversation: Conversation) -> None:
        self.engine = engine
        self.answering: Request | None = None
        self._conversation: Conversation | None = conversation
        self._file: _SpillFile | None = None
        self._heard_file: _SpillFile | None = None
        budget = engine.admission.budget
        # A conversation without turns has nothing to spill, and does not wait for the engine.
        if budget is not None and conversation.turns:

            def use() -> None:
                budget.use(self)
                self.settle()

            engine.engine.call(use)

    @property
    def conversation(self) -> Conversation:
        """The conversation; its ``kv`` is None while the cache is on disk.

        Raises:
            RuntimeError: if the chat is closed.
        """
        if self._conversation is None:
            raise RuntimeError("the chat is closed")
        return self._conversation

    @conversation.setter
    def conversation(self, new: Conversation) -> None:
        self._conversation = new

    @property
    def cache(self) -> OscarCache:
        """The cache of the conversation; raises RuntimeError while the cache is on disk."""
        return self.conversation.cache

    @property
    def closed(self) -> bool:
        """Whether the conversation has been closed."""
        return self._conversation is None

    def load(self) -> Conversation:
        """Return the conversation with its cache, which is read from its file if needed.

        Raises:
            InputError: if the cache exceeds the budget, or the file is missing or altered.
        """
        budget = self.engine.admission.budget
        if budget is not None:
            budget.use(self)
        for file in [one for one in (self._file, self._heard_file) if one is not None]:
            if budget is not None:
                budget.free_memory(file.bytes, self)
            cache = file.load()
            if file is self._file:
                self.conversation = replace(self.conversation, kv=cache)
                self._file = None
            else:
                heard = replace(self.conversation.heard, cache=cache)
                self.conversation = replace(self.conversation, heard=heard)
                self._heard_file = None
            file.remove()
        return self.drop_reasoning()

    def drop_reasoning(self) -> Conversation:
        """Remove the last reasoning from the cache if the cache is in the store; return the
        conversation.

        The token of a decode step that was running when the caller left the answer is removed too,
        unless the states of the model already include it.
        """
        conversation = self.conversation
        if conversation.kv is None:
            return conversation
        old = conversation.cache
        if surplus := old.get_seq_length() - conversation.tokens:
            if old.longest_crop(conversation.tokens) != conversation.tokens:
                late = old.kv_manager.stored_length - conversation.tokens
                self.conversation = conversation.with_late_tokens(late)
                return self.drop_reasoning()
            cache = old.fork()
            cache.crop(-surplus)
            self.conversation = replace(conversation, kv=cache)
            old.close()
        return self.conversation

    def replace(self, new: Conversation) -> None:
        """Replace the conversation with ``new``, whose cache is a fork, and close the old cache."""
        old, self.conversation = self.conversation, new
        old.cache.close()
        if old.heard.cache is not new.heard.cache:
            old.heard.close()
        new.cache.shrink()

    def settle(self) -> None:
        """Spill other chats after a turn until the budget is met, if there is a budget."""
        if (budget := self.engine.admission.budget) is not None:
            budget.settle(self)

    @property
    def can_be_spilled(self) -> bool:
        """Whether the conversation has a cache to spill and no turn is running."""
        now = self._conversation
        return bool(now and now.kv is not None and now.turns and not self.answering)

    def spill(self, path: Path) -> None:
        """Write keys and values to a file and release their pages; ``load`` restores them.

        Raises:
            InputError: if the file cannot be written.
        """
        conversation, family = self.conversation, self.engine.family
        about = self.engine.fingerprint, family.layer_devices
        self._file = _SpillFile(path, conversation.cache, *about)
        if conversation.heard.cache is not None and family.talker is not None:
            beside, device = path.with_name(f"{path.name}.heard"), family.talker.model.device
            self._heard_file = _SpillFile(beside, conversation.heard.cache, about[0], device)
            conversation.heard.close()
        heard = replace(conversation.heard, cache=None)
        self.conversation = replace(conversation, kv=None, heard=heard)
        conversation.cache.close()

    def close(self) -> None:
        """Release the pages and delete the file. A second call has no effect."""
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            conversation.heard.close()
            if conversation.kv is not None:
                conversation.kv.close()
        for file in (self._file, self._heard_file):
            if file is not None:
                file.remove()


class _SpillFile:
    """Spilled cache; its file is removed when this object is no longer referenced."""

    def __init__(
        self,
        path: Path,
        cache: OscarCache,
        fingerprint: str,
        device: torch.device | Mapping[int, torch.device],
    ) -> None:
        # Stored here, as the active adapter may differ when the cache is loaded.
        self._fingerprint, self._store, self._device = fingerprint, cache.store, device
        save_cache(cache, path, fingerprint=fingerprint)
        self.path, self.bytes = path, path.stat().st_size
        self.remove = weakref.finalize(self, path.unlink, missing_ok=True)

    def load(self) -> OscarCache:
        """Read the cache into its store."""
        how: dict[str, Any] = {"store": self._store, "device": self._device}
        cache, _ = load_cache(self.path, fingerprint=self._fingerprint, **how)
        return cache
