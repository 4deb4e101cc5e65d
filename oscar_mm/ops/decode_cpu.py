"""decode on CPUs: attention over packed pages by loops that numba compiles.

Codes are never brought into their natural order. A plane of codes (the low bits of all codes of a
page, or the high ones) is read a row of 32-bit words at a time; a word's lane and a code's place in
it tell token and channel, by tables made from the page's ``Order``. Of keys a place in the word and
the lane within a group decide on the channel, so queries are spread out over lanes once. Of values
the sums of all lanes are brought into the order of channels once, at the end.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from oscar_mm.kernels.loops import as_bits, call_all, compiled, floats, inlined, shares, widen
from oscar_mm.ops.decode_tables import SECOND, START
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat
from oscar_mm.quant.basis import Basis

if TYPE_CHECKING:
    from oscar_mm.ops.decode import DecodeArguments

_TILE = 16
_GROUPS = 8
"""Tokens of a tile, or pairs of channels, that the lanes of a row of words are of."""
_PART = 64
"""Most pages of a task: bounds the scores that are in memory."""


class _Plane(NamedTuple):
    """Where the codes of a plane are, and of what. Of values a word is of one pair of channels at
    four tokens, so that four places of a word are added to the same sum.

    Attributes:
        start: first word of a head.
        bits: of a code.
        factor: of its codes: 1, or that of high bits.
        places: (sums, 4) int64: the places in a word that are added to one of its sums. Of keys
            (2 * n, 4): first those of the first 8 tokens of a tile, then of the others.
        channels: of keys (rows, places, lanes of a group): the channel. Of values (rows, sums,
            lanes of all groups): the channel of a sum.
        tokens: of values (kinds, lanes of a group): the token of a tile; empty for keys.
        scales: of values (rows, kinds, lanes of a group): which of a token's scales it has.
        kinds: of values (places,): which of ``tokens`` a place in a word has.
    """

    start: int
    bits: int
    factor: float
    places: np.ndarray
    channels: np.ndarray
    tokens: np.ndarray
    scales: np.ndarray
    kinds: np.ndarray


class _Layout(NamedTuple):
    """A page as the loops see it.

    Attributes:
        head_words: 32-bit words of a KV head.
        key_planes, value_planes: of low bits and of high bits; the latter is without rows where
            codes have no high bits.
        key_numbers: (KV heads, n) int64: where the float16 numbers of a head's keys are in a page,
            in natural order: scales, zeros, center and norms, the last two where there are any.
        value_numbers: likewise, scales and zeros of values.
        has_center, has_norms: whether there are.
        key_middle, value_middle: middle of the codes.
        key_group: tokens that share the scales of channels; 0 where each token has its own.
        value_group: channels of a value's scale.
    """

    head_words: int
    key_planes: tuple[_Plane, _Plane]
    value_planes: tuple[_Plane, _Plane]
    key_numbers: np.ndarray
    value_numbers: np.ndarray
    has_center: bool
    has_norms: bool
    key_middle: float
    value_middle: float
    key_group: int
    value_group: int


@lru_cache(maxsize=64)
def _layout(page_format: PageFormat) -> _Layout | None:
    """Of pages in the order of fragments; None for others."""
    if not page_format.in_fragments or page_format.value_group % (4 * _GROUPS):
        return None
    return _Layout(
        head_words=page_format.head_bytes // 4,
        key_planes=_planes_of(page_format, "key"),
        value_planes=_planes_of(page_format, "value"),
        key_numbers=page_format.number_places("key_scales", "key_zeros", "center", "norms"),
        value_numbers=page_format.number_places("value_scales", "value_zeros"),
        has_center=page_format.center,
        has_norms=page_format.token_scaling is not None,
        key_middle=((1 << page_format.bits.keys) - 1) / 2,
        value_middle=((1 << page_format.bits.values) - 1) / 2,
        key_group=0 if page_format.by_token else page_format.key_group,
        value_group=page_format.value_group,
    )


def _planes_of(page_format: PageFormat, side: str) -> tuple[_Plane, _Plane]:
    """The planes of keys or of values."""
    planes: list[_Plane] = []
    head_dim = page_format.head_dim
    for name, first, bits in page_format.planes(f"{side}_codes"):
        start = page_format.fields[name].offset // 4
        of_lane = head_dim * bits // 64  # words
        rows = -(-of_lane // 4)
        stored = page_format.orders[name].elements().numpy()
        # row, group, lane, place of the first tile
        stored = stored.reshape(PAGE_TOKENS // _TILE, rows, _GROUPS, -1, 32 // bits)[0]
        stored = stored.transpose(0, 3, 1, 2)
        token, channel = np.divmod(stored, head_dim)
        if side == "key":
            tables = _key_tables(token, channel)
        else:
            tables = _value_tables(token, channel, page_format.value_group)
        planes.append(_Plane(start, bits, float(1 << first), *tables))
    none, flat, row = (np.zeros(shape, np.int64) for shape in ((0, 0, 0), (0, 4), 0))
    low, high = [*planes, _Plane(0, 1, 0.0, flat, none, flat, none, row)][:2]
    return low, high


def _key_tables(token: np.ndarray, channel: np.ndarray) -> tuple[np.ndarray, ...]:
    """Places, channels, tokens, scales and kinds of a ``_Plane`` of keys.

    Args:
        token, channel: (rows, places, groups, lanes) of each code of a tile.
    """
    second = token[0, :, 0, 0] >= _GROUPS
    places = np.argsort(second, kind="stable").reshape(-1, 4)
    none, flat, row = (np.zeros(shape, np.int64) for shape in ((0, 0, 0), (0, 4), 0))
    return places, np.ascontiguousarray(channel[:, :, 0]), flat, none, row


def _value_tables(token: np.ndarray, channel: np.ndarray, group: int) -> tuple[np.ndarray, ...]:
    """The same of a ``_Plane`` of values."""
    rows, count = channel.shape[:2]
    by_place = channel.transpose(1, 0, 2, 3).reshape(count, -1)
    first, sums = np.unique(by_place, axis=0, return_index=True, return_inverse=True)[1:]
    places = np.argsort(sums.ravel(), kind="stable").reshape(-1, 4)
    of_place = np.concatenate([token[:1], channel // group])[:, :, 0].transpose(1, 0, 2)
    seen, kinds = np.unique(of_place.reshape(count, -1), axis=0, return_inverse=True)
    seen = seen.reshape(len(seen), rows + 1, -1).transpose(1, 0, 2)
    channels = np.ascontiguousarray(channel[:, first].reshape(rows, len(first), -1))
    return places, channels, seen[0].copy(), seen[1:].copy(), kinds.ravel()


def reads(page_format: PageFormat) -> bool:
    """Whether there are loops for pages of a format."""
    return _layout(page_format) is not None


@torch.no_grad()
def decode_on_cpu(arguments: DecodeArguments) -> torch.Tensor:
    """``decode``, see ``oscar_mm.ops.decode.DecodeArguments``; of pages in the kernels' order."""
    queries, keys, values, pages, recent, sigma, items, recents, counts, *_ = arguments
    batch, query_heads, tokens, head_dim = queries.shape
    kv_heads = keys.shape[1]
    columns = query_heads // kv_heads * tokens
    straight = queries.float().reshape(batch, kv_heads, columns, head_dim).contiguous()
    basis = Basis(head_dim, arguments.rotate, sigma)
    turned = (basis.queries_in(straight) * arguments.scaling).numpy()
    lines = _tasks(items.numpy(), counts.numpy(), len(pages), kv_heads)
    parts = 1 + (int(lines[:, 0].max()) if len(lines) else 0)
    totals = torch.full((parts, batch, kv_heads, columns), -torch.inf)
    outputs = torch.zeros(parts, batch, kv_heads, columns, head_dim)
    into = outputs.numpy(), totals.numpy()
    given = (items.numpy(), turned, *into)
    calls: list[tuple[Any, ...]] = []
    for number, (pool, page_format) in enumerate(zip(pages, arguments.page_formats, strict=True)):
        layout = _layout(page_format)
        words = pool.numpy().view(np.int32), pool.numpy().view(np.uint16)
        mine = lines[lines[:, 3] == number]
        calls += [(_attend_to_pages, *words, layout, part, *given) for part in shares(mine)]
    plain = (straight.mul(arguments.scaling).numpy(), tokens, *into)
    given = as_bits(keys), as_bits(values), as_bits(recent), recents.numpy(), counts.numpy()
    calls += [(_attend_to_tokens, *given, rows, *plain) for rows in shares(np.arange(batch))]
    call_all(calls)
    weights = totals.softmax(0)[..., None]
    found = basis.values_out((outputs[1:] * weights[1:]).sum(0)) + outputs[0] * weights[0]
    output = arguments.result()
    output.copy_(found.view(batch, query_heads, tokens, head_dim))
    return output


def _tasks(items: np.ndarray, counts: np.ndarray, pools: int, kv_heads: int) -> np.ndarray:
    """(n, 6): output that is written, row, KV head, pool, and first and last of its entries."""
    tasks = [
        (1 + number * -(-items.shape[1] // _PART) + start // _PART, row, head, number, start, stop)
        for row, (_, in_pages) in enumerate(counts.tolist())
        for number in range(pools)
        for start in range(0, in_pages, _PART)
        for stop in [min(start + _PART, in_pages)]
        for head in range(kv_heads)
    ]
    return np.array(tasks, dtype=np.int64).reshape(-1, 6)


@compiled
def _attend_to_pages(words, halves, layout, tasks, items, queries, outputs, totals):
    """Attend to the pages of each task; arrays as in ``decode_on_cpu``."""
    columns, head_dim = queries.shape[2:]
    scales = head_dim // layout.value_group
    scores = np.empty((columns, _PART * PAGE_TOKENS), np.float32)
    products = np.empty((columns, PAGE_TOKENS), np.float32)
    weights = np.empty((columns, PAGE_TOKENS, scales), np.float32)
    for part, row, head, number, first, last in tasks:
        query = queries[row, head]
        entries = np.empty(last - first, np.int64)
        count = 0
        for entry in range(first, last):
            if (items[row, entry, 1] >= SECOND) == (number == 1):
                entries[count] = entry
                count += 1
        if not count:
            continue
        low, high = layout.key_planes
        tables = _lane_table(columns, low), _lane_table(columns, high)
        for plane in range(2):
            _spread_over_lanes(query, layout.key_planes[plane], tables[plane])
        for place in range(count):
            slot, used = items[row, entries[place]]
            _score_page(words[slot], halves[slot], head, layout, query, tables, products)
            first_token, stop = used % SECOND // START, used % START
            for column in range(columns):
                for token in range(PAGE_TOKENS):
                    score = products[column, token] if first_token <= token < stop else -np.inf
                    scores[column, place * PAGE_TOKENS + token] = score
        low, high = layout.value_planes
        sums = (
            np.zeros((columns, *low.channels.shape), np.float32),
            np.zeros((columns, *high.channels.shape), np.float32),
        )
        zeros = np.zeros((columns, scales), np.float32)
        for column in range(columns):
            of_column = scores[column, : count * PAGE_TOKENS]
            totals[part, row, head, column] = _exponentials(of_column)
        for place in range(count):
            slot, used = items[row, entries[place]]
            base = head * layout.head_words
            numbers = floats(halves[slot], layout.value_numbers[head])
            for index in range(PAGE_TOKENS * scales):
                numbers[PAGE_TOKENS * scales + index] += numbers[index] * np.float32(
                    layout.value_middle
                )
            first_token, stop = used % SECOND // START, used % START
            for column in range(columns):
                for token in range(PAGE_TOKENS):
                    weight = scores[column, place * PAGE_TOKENS + token]
                    for scale in range(scales):
                        # Scales of tokens that are not in use may be anything.
                        if not first_token <= token < stop:
                            weights[column, token, scale] = 0
                            continue
                        index = token * scales + scale
                        weights[column, token, scale] = weight * numbers[index]
                        zeros[column, scale] += weight * numbers[PAGE_TOKENS * scales + index]
            for plane in range(2):
                _add_values(words[slot], base, layout.value_planes[plane], weights, sums[plane])
        output = outputs[part, row, head]
        for plane in range(2):
            _add_in_order(layout.value_planes[plane], sums[plane], output)
        for column in range(columns):
            for channel in range(head_dim):
                output[column, channel] += zeros[column, channel // layout.value_group]


@inlined
def _score_page(page, halves, head, layout, query, tables, scores):
    """Write the (columns, 128) products of queries and keys."""
    columns, head_dim = query.shape
    base, count = head * layout.head_words, PAGE_TOKENS
    if layout.key_group:
        count = head_dim * (PAGE_TOKENS // layout.key_group)
    numbers = floats(halves, layout.key_numbers[head])
    for place in range(count):
        # The sign bit, of a scale of 0 too, says that the center was taken away.
        size = abs(numbers[place]) if layout.has_center else numbers[place]
        numbers[count + place] += size * np.float32(layout.key_middle)
    group_tokens = layout.key_group or PAGE_TOKENS
    scaled = np.empty_like(query)
    for group in range(PAGE_TOKENS // group_tokens):
        for column in range(columns):
            zero = np.float32(0)
            if layout.key_group:
                for channel in range(head_dim):
                    value, place = query[column, channel], group * head_dim + channel
                    scaled[column, channel] = value * numbers[place]
                    zero += value * numbers[count + place]
            for token in range(group_tokens):
                scores[column, group * group_tokens + token] = zero
        for number in range(2):
            plane, table = layout.key_planes[number], tables[number]
            if layout.key_group:
                _spread_over_lanes(scaled, plane, table)
            first = group * group_tokens // _TILE
            _add_dots(page, base, plane, table, first, first + group_tokens // _TILE, scores)
    if not layout.key_group:
        for column in range(columns):
            total, middle = np.float32(0), np.float32(0)
            for channel in range(head_dim):
                total += query[column, channel]
                if layout.has_center:
                    middle += query[column, channel] * numbers[2 * count + channel]
            for token in range(PAGE_TOKENS):
                size = abs(numbers[token]) if layout.has_center else numbers[token]
                score = scores[column, token] * size + numbers[count + token] * total
                if layout.has_center and halves[layout.key_numbers[head, token]] >> 15:
                    score += middle
                scores[column, token] = score
    if layout.has_norms:
        for column in range(columns):
            for token in range(PAGE_TOKENS):
                scores[column, token] *= numbers[len(numbers) - PAGE_TOKENS + token]


@inlined
def _lane_table(columns, plane):
    """Room for what the codes of a row of words are multiplied by: (columns, rows, places, lanes of
    all groups)."""
    rows, places, lanes = plane.channels.shape
    return np.empty((columns, rows, places, _GROUPS * lanes), np.float32)


@inlined
def _spread_over_lanes(query, plane, table):
    """Fill a ``_lane_table`` with queries."""
    rows, places, lanes = plane.channels.shape
    factor = np.float32(plane.factor)
    for column in range(len(query)):
        for row in range(rows):
            for place in range(places):
                for lane in range(lanes):
                    value = query[column, plane.channels[row, place, lane]] * factor
                    for group in range(_GROUPS):
                        table[column, row, place, group * lanes + lane] = value


@inlined
def _unpack(words, start, bits, codes):
    """Codes of a row of words less the middle of their range, so that sums stay small: (places,
    lanes) float32."""
    mask, lanes = np.int32((1 << bits) - 1), codes.shape[1]
    middle = np.float32(mask) / np.float32(2)
    row = words[start : start + lanes]
    for place in range(len(codes)):
        # Numba makes 64 bits of 32 unless told not to after each operation.
        shift, into = np.int32(place * bits) & np.int32(31), codes[place]
        for lane in range(lanes):
            code = np.int32(np.int32(row[lane] >> shift) & mask)
            into[lane] = np.float32(code) - middle


@inlined
def _add_dots(page, start, plane, table, first, last, scores):
    """Add the products of queries and codes for the tokens of some tiles."""
    rows, places, lanes = table.shape[1:]
    codes = np.empty((places, lanes), np.float32)
    per_group, fours = lanes // _GROUPS, len(plane.places)
    for tile in range(first, last if rows else first):
        sums = np.zeros((len(scores), 2, lanes), np.float32)
        for row in range(rows):
            first_word = start + plane.start + (tile * rows + row) * lanes
            _unpack(page, first_word, plane.bits, codes)
            for column in range(len(scores)):
                for four in range(fours):
                    into = sums[column, 2 * four // fours]
                    a, b, c, d = plane.places[four]
                    ca, cb, cc, cd = codes[a], codes[b], codes[c], codes[d]
                    query = table[column, row]
                    qa, qb, qc, qd = query[a], query[b], query[c], query[d]
                    for i in range(lanes):
                        into[i] += ca[i] * qa[i] + cb[i] * qb[i] + cc[i] * qc[i] + cd[i] * qd[i]
        for column in range(len(scores)):
            for half in range(2):
                for group in range(_GROUPS):
                    total = np.float32(0)
                    for lane in range(group * per_group, (group + 1) * per_group):
                        total += sums[column, half, lane]
                    scores[column, (2 * tile + half) * _GROUPS + group] += total


@inlined
def _add_values(page, start, plane, weights, sums):
    """Add codes of values times weights to (columns, *plane.channels.shape) sums."""
    rows, fours, lanes = plane.channels.shape
    kinds, per_group = plane.tokens.shape
    codes = np.empty((len(plane.kinds), lanes), np.float32)
    table = np.empty((kinds, lanes), np.float32)
    for tile in range(PAGE_TOKENS // _TILE if rows else 0):
        for row in range(rows):
            first_word = start + plane.start + (tile * rows + row) * lanes
            _unpack(page, first_word, plane.bits, codes)
            for column in range(len(weights)):
                of_tile = weights[column, tile * _TILE : (tile + 1) * _TILE]
                for kind in range(kinds):
                    for lane in range(per_group):
                        token, scale = plane.tokens[kind, lane], plane.scales[row, kind, lane]
                        weight = of_tile[token, scale]
                        for group in range(_GROUPS):
                            table[kind, group * per_group + lane] = weight
                for four in range(fours):
                    a, b, c, d = plane.places[four]
                    into = sums[column, row, four]
                    ca, cb, cc, cd = codes[a], codes[b], codes[c], codes[d]
                    wa, wb = table[plane.kinds[a]], table[plane.kinds[b]]
                    wc, wd = table[plane.kinds[c]], table[plane.kinds[d]]
                    # The same loop as of keys, but in a function of its own it is three times
                    # slower: numba does not vectorize it there.
                    for i in range(lanes):
                        into[i] += ca[i] * wa[i] + cb[i] * wb[i] + cc[i] * wc[i] + cd[i] * wd[i]


@inlined
def _add_in_order(plane, sums, output):
    """Add the sums of lanes to the channels that they are of."""
    rows, fours, lanes = plane.channels.shape
    factor = np.float32(plane.factor)
    for column in range(len(output)):
        for row in range(rows):
            for four in range(fours):
                for lane in range(lanes):
                    channel = plane.channels[row, four, lane]
                    output[column, channel] += factor * sums[column, row, four, lane]


@compiled
def _attend_to_tokens(
    keys, values, recent, recents, counts, rows, queries, tokens, outputs, totals
):
    """Attend to tokens in 16 bit and, causally, to the new ones; the first part of the output."""
    heads, columns, head_dim = queries.shape[1:]
    bits = np.empty(head_dim, np.uint32)
    vector = bits.view(np.float32)
    for row in rows:
        stored = counts[row, 0]
        for head in range(heads):
            query, output = queries[row, head], outputs[0, row, head]
            scores = np.empty((columns, stored + tokens), np.float32)
            for index in range(stored + tokens):
                if index < stored:
                    source = recent[recents[row, index], 0, head]
                else:
                    source = keys[row, head, index - stored]
                widen(source, bits)
                for column in range(columns):
                    total = np.float32(0)
                    for channel in range(head_dim):
                        total += query[column, channel] * vector[channel]
                    seen = index - stored <= column % tokens
                    scores[column, index] = total if seen else -np.inf
            for column in range(columns):
                totals[0, row, head, column] = _exponentials(scores[column])
            for index in range(stored + tokens):
                if index < stored:
                    source = recent[recents[row, index], 1, head]
                else:
                    source = values[row, head, index - stored]
                widen(source, bits)
                for column in range(columns):
                    weight, into = scores[column, index], output[column]
                    for channel in range(head_dim):
                        into[channel] += weight * vector[channel]


@inlined
def _exponentials(scores):
    """Softmax in place; returns the log of the sum of exponentials."""
    highest = np.float32(-np.inf)
    for score in scores:
        highest = max(highest, score)
    bits = np.empty(len(scores), np.int32)
    powers = bits.view(np.float32)
    total = np.float32(0)
    for index in range(len(scores)):
        # 2^x by the Taylor series of its fraction, in a form that compilers vectorize.
        x = (scores[index] - highest) * np.float32(1.4426950408889634)
        x = np.float32(-126) if x < np.float32(-126) else x  # NaN stays.
        whole = np.floor(x + np.float32(0.5))
        y = (x - whole) * np.float32(0.6931471805599453)
        series = np.float32(1 / 720)
        series = series * y + np.float32(1 / 120)
        series = series * y + np.float32(1 / 24)
        series = series * y + np.float32(1 / 6)
        series = series * y + np.float32(0.5)
        series = series * y + np.float32(1)
        series = series * y + np.float32(1)
        bits[index] = (np.int32(whole) + np.int32(127)) << np.int32(23)
        scores[index] = np.float32(0) if x == np.float32(-126) else series
    for index in range(len(scores)):
        scores[index] *= powers[index]
        total += scores[index]
    for index in range(len(scores)):
        scores[index] /= total
    return highest + np.log(total)
