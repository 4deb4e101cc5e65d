"""Decode on CPUs: attention to packed pages, with CPU kernels that numba compiles.

Codes are never rearranged in natural order (see ``oscar_mm.ops.pages_numba``). Words of keys are
transposed, so that the sum of a token's products stays in its lane. Weights of values are spread
over lanes, and the sums of the lanes are put into channel order once, at the end.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from oscar_mm.kernels.numba_vectors import (
    LANES,
    aligned,
    as_bits,
    as_floats,
    as_words,
    compiled,
    from_words,
    inlined,
    larger,
    largest,
    load,
    prefetch,
    read_floats,
    rotate_vector,
    shuffle,
    splat,
    splat_one,
    store,
    threads_for,
    total,
    widen,
)
from oscar_mm.kernels.run_parallel import run_parallel
from oscar_mm.ops.decode_tables import SECOND, START, DecodeArguments
from oscar_mm.ops.pages_numba import (
    GROUPS,
    TILE,
    TILES,
    CodesLayout,
    PageLayout,
    page_layout,
    plain_layout,
)
from oscar_mm.pages.layout import PAGE_TOKENS, PageFormat

_BLOCKS = PAGE_TOKENS // 2 // LANES
"""Number of vectors that hold the words at one place of all groups and tiles."""
_PART = 64
"""Maximum pages per task; bounds the memory for scores."""
_PRODUCTS_OF_PAGES, _PRODUCTS_OF_TOKENS = 20_000, 5_000
"""Approximate number of scalar multiplications per microsecond, over pages and 16-bit tokens."""
_ZIP_LOW = shuffle(*(lane // 2 + lane % 2 * 16 for lane in range(LANES)))
_ZIP_HIGH = shuffle(*(8 + lane // 2 + lane % 2 * 16 for lane in range(LANES)))
_FIRST_WORDS, _SECOND_WORDS = (
    shuffle(*(lane // 4 * 4 + run * 2 + lane % 4 // 2 + lane % 2 * 16 for lane in range(LANES)))
    for run in range(2)
)
_FIRST_HALVES = shuffle(*(lane + lane // 8 * 8 for lane in range(LANES)))
_SECOND_HALVES = shuffle(*(lane + 8 + lane // 8 * 8 for lane in range(LANES)))


def _over_lanes(number: int, words: int) -> Any:
    """Return a shuffle that moves the weights of a tile's tokens to the lanes of their codes.

    Args:
        number: number formed by bits k2 and k1 of the codes' index.
        words: number of consecutive words per quad.
    """
    first = number % 2 * 8 + number // 2
    return shuffle(*(first + lane // words % 4 * 2 for lane in range(LANES)))


_OVER_2_0, _OVER_2_1, _OVER_2_2, _OVER_2_3 = (_over_lanes(number, 2) for number in range(4))
_OVER_4_0, _OVER_4_1, _OVER_4_2, _OVER_4_3 = (_over_lanes(number, 4) for number in range(4))


@inlined
def _with_names(plain):
    """Convert the result of ``plain_layout`` back to a layout."""
    return PageLayout(plain[0], CodesLayout(*plain[1]), CodesLayout(*plain[2]), *plain[3:])


def reads(page_format: PageFormat) -> bool:
    """Return whether there is a CPU kernel for a page format."""
    return page_layout(page_format) is not None


def decode_on_cpu(arguments: DecodeArguments) -> torch.Tensor:
    """Run ``decode`` on pages in the kernels' order; see ``DecodeArguments``."""
    queries, keys, values, pages, recent, sigma, items, recents, counts, *_ = arguments
    batch, query_heads, tokens, head_dim = queries.shape
    kv_heads, rotate = keys.shape[1], arguments.rotate and bool(pages)
    columns = query_heads // kv_heads * tokens
    entries, ends = items.numpy(), counts.numpy()
    parts = -(-entries.shape[1] // _PART)
    in_16_bit, in_pages = ends.sum(0).tolist()
    products = 2 * query_heads * tokens * head_dim  # per token
    threads = threads_for(PAGE_TOKENS * in_pages * products / _PRODUCTS_OF_PAGES)
    totals = np.empty((len(pages) * parts, batch, kv_heads, columns), np.float32)
    outputs = np.empty((*totals.shape, head_dim), np.float32)
    balancing = np.ones((1, head_dim), np.float32) if sigma is None else sigma.detach().numpy()
    balancing = np.ascontiguousarray(balancing if balancing.ndim == 3 else balancing[None])
    result = np.empty((batch, tokens, query_heads, head_dim), np.float32)
    # Queries are in float32, so that kernels over pages are compiled only once.
    given = rotate, as_bits(queries.float()), arguments.scaling, outputs, totals
    calls: list[tuple[Any, ...]] = []
    for number, (pool, page_format) in enumerate(zip(pages, arguments.page_formats, strict=True)):
        stored = pool.numpy()
        which = stored.view(np.int32), stored.view(np.uint16), plain_layout(page_format), number
        which = *which, entries, ends, balancing
        calls += [
            (_attend_to_pages, first, threads, *which, *given)
            for first in range(min(threads, batch * parts * kv_heads))
        ]
    run_parallel(calls)
    # The few new tokens are in float32, because kernels are compiled only for the dtypes of stored
    # tokens.
    new = as_bits(keys.float()), as_bits(values.float())
    sinks = np.full(query_heads, -np.inf, np.float32)
    if arguments.sinks is not None:
        sinks = np.ascontiguousarray(arguments.sinks.detach().numpy())
    states = *new, as_bits(recent), recents.numpy(), ends, sinks
    threads = threads_for((in_16_bit + batch * tokens) * products / _PRODUCTS_OF_TOKENS)
    run_parallel(
        [
            (_attend_to_tokens, first, threads, *states, *given, result)
            for first in range(min(threads, batch * kv_heads))
        ]
    )
    output = torch.from_numpy(result.swapaxes(1, 2))
    return output if queries.dtype == output.dtype else output.to(queries.dtype)


@compiled
def _attend_to_pages(
    first,
    threads,
    words,
    halves,
    plain_layout,
    number,
    items,
    counts,
    balancing,
    rotate,
    queries,
    scaling,
    outputs,
    totals,
):
    """Attend to the pages of pool ``number``; arrays as in ``decode_on_cpu``.

    A thread runs task ``first`` (a row, some of its pages and a KV head) and every ``threads``-th
    after it.
    """
    batch, tokens = queries.shape[0], queries.shape[2]
    heads, columns, head_dim = outputs.shape[2:]
    parts = -(-items.shape[1] // _PART)
    layout = _with_names(plain_layout)
    longest = min(items.shape[1], _PART)
    keys, values, head_words = layout.keys, layout.values, layout.head_words
    scales = head_dim // layout.value_group
    entries = np.empty(longest, np.int64)
    query = aligned(columns * head_dim).reshape(columns, -1)
    table = aligned(columns * head_dim).reshape(columns, -1)
    query_sums = np.empty(columns, np.float32)
    planes = aligned(_plane_words(keys)).view(np.int32)
    numbers = np.empty(layout.key_numbers.shape[1], np.float32)
    dots = aligned(columns * PAGE_TOKENS).reshape(columns, 2, -1)
    scores = aligned(columns * longest * PAGE_TOKENS).reshape(columns, -1)
    value_numbers = np.empty(layout.value_numbers.shape[1], np.float32)
    weights = aligned(columns * scales * PAGE_TOKENS).reshape(columns, scales, -1)
    spread = aligned(columns * 4 * LANES)
    sums = aligned(columns * len(values.channels)).reshape(columns, -1)
    zeros = np.empty((columns, scales), np.float32)
    for task in range(first, batch * parts * heads, threads):
        row, part, head = task // heads // parts, task // heads % parts, task % heads
        count = 0
        for entry in range(part * _PART, min((part + 1) * _PART, counts[row, 1])):
            if (items[row, entry, 1] >= SECOND) == (number == 1):
                entries[count] = entry
                count += 1
        part += number * parts
        for column in range(columns):
            totals[part, row, head, column] = -np.inf
        if not count:
            continue
        base = head * head_words
        for column in range(columns):
            query_head, token = divmod(head * columns + column, tokens)
            widen(queries[row, query_head, token], query[column].view(np.uint32))
            for channel in range(head_dim):
                sigma = balancing[row % len(balancing), head % balancing.shape[1], channel]
                query[column, channel] *= sigma * np.float32(scaling)
            if rotate:
                rotate_vector(query[column])
            query_sums[column] = 0
            for index in range(head_dim):
                query_sums[column] += query[column, index]
                table[column, index] = query[column, keys.channels[index]]
        for place in range(count):
            slot, used = items[row, entries[place]]
            start = place * PAGE_TOKENS
            following = items[row, entries[min(place + 1, count - 1)], 0] * words.shape[1] + base
            _fetch(words, following, following + values.start)
            _transpose(words, slot * words.shape[1] + base, keys, planes)
            read_floats(halves[slot], layout.key_numbers[head], numbers)
            _score_page(planes, layout, query, query_sums, numbers, table, dots, scores, start)
            first_token, stop = used % SECOND // START, used % START
            for column in range(columns):
                for token in range(first_token):
                    scores[column, start + token] = -np.inf
                for token in range(stop, PAGE_TOKENS):
                    scores[column, start + token] = -np.inf
        for column in range(columns):
            for index in range(sums.shape[1]):
                sums[column, index] = 0
            for scale in range(scales):
                zeros[column, scale] = 0
            start, stop = column * scores.shape[1], count * PAGE_TOKENS
            totals[part, row, head, column] = _exponentials(scores, start, stop)
        for place in range(count):
            slot = items[row, entries[place], 0]
            following = items[row, entries[min(place + 1, count - 1)], 0] * words.shape[1] + base
            _fetch(words, following + values.start, following + head_words)
            read_floats(halves[slot], layout.value_numbers[head], value_numbers)
            for column in range(columns):
                for scale in range(scales):
                    zero = splat(np.float32(0))
                    for token in range(0, PAGE_TOKENS, LANES):
                        at = column * scores.shape[1] + place * PAGE_TOKENS + token
                        weight, index = load(scores, at), scale * PAGE_TOKENS + token
                        at = (column * scales + scale) * PAGE_TOKENS + token
                        store(weights, at, weight * load(value_numbers, index))
                        index += scales * PAGE_TOKENS
                        zero = zero + weight * load(value_numbers, index)
                    zeros[column, scale] += total(zero)
            _add_values(words, slot * words.shape[1] + base, values, weights, spread, sums)
        for column in range(columns):
            for channel in range(head_dim):
                scale = channel // layout.value_group
                outputs[part, row, head, column, channel] = zeros[column, scale]
            for index in range(sums.shape[1]):
                channel = values.channels[index]
                outputs[part, row, head, column, channel] += sums[column, index]


@inlined
def _fetch(words, start, stop):
    """Prefetch words of a page."""
    for place in range(start, stop, LANES):
        prefetch(words, place)


@inlined
def _plane_words(keys):
    """Return the number of words of scratch memory that ``_transpose`` needs."""
    halves = 3 * keys.steps
    return halves * _BLOCKS * keys.words // 2 * LANES + LANES * LANES


@inlined
def _transpose(words, base, keys, planes):
    """Write the plane of the keys' low bits as (runs, blocks, words, 16) words, followed by the
    plane of high bits, which has half as many words.

    A block consists of the words of 8 groups of two tiles, (16, words). Each of four rounds moves
    the first bit of a word's index in the block to the end.
    """
    room = len(planes) - LANES * LANES
    low_words = keys.steps * keys.words
    high_runs = low_words // 2 // keys.high_words if keys.high else 0
    for step in range(keys.steps + high_runs):
        count, tile, start, before = keys.words, GROUPS * low_words, keys.start, step * keys.words
        if step >= keys.steps:
            count, tile, start = keys.high_words, tile // 2, keys.high
            before = (step - keys.steps) * count
        start += before * GROUPS
        if step >= keys.steps:
            before += low_words
        half = count // 2
        for block in range(_BLOCKS):
            first = base + start + 2 * block * tile
            source, target = room, (before * _BLOCKS + block * count) * LANES
            for index in range(half):
                one = load(words, first + index * LANES)
                two = load(words, first + index * LANES + tile)
                store(planes, source + 2 * index * LANES, _ZIP_LOW(one, two))
                store(planes, source + (2 * index + 1) * LANES, _ZIP_HIGH(one, two))
            for _ in range(3):
                for index in range(half):
                    one = load(planes, source + index * LANES)
                    two = load(planes, source + (half + index) * LANES)
                    store(planes, target + 2 * index * LANES, _ZIP_LOW(one, two))
                    store(planes, target + (2 * index + 1) * LANES, _ZIP_HIGH(one, two))
                source, target = target, source


@inlined
def _score_page(planes, layout, query, query_sums, numbers, table, sums, scores, start):
    """Write the dot products of queries and keys to ``scores[:, start : start + 128]``."""
    columns, head_dim = query.shape
    keys, key_group, has_center = layout.keys, layout.key_group, layout.has_center
    count = head_dim * (PAGE_TOKENS // key_group) if key_group else PAGE_TOKENS
    group_tokens = key_group if key_group else PAGE_TOKENS
    group_rows = group_tokens // 2
    for group in range(PAGE_TOKENS // group_tokens):
        for column in range(columns):
            zero = splat(np.float32(0))
            if key_group:
                place = count + group * head_dim
                zero = splat(_dot(query, column * head_dim, numbers, place, head_dim))
                for index in range(head_dim):
                    channel = keys.channels[index]
                    scale = numbers[group * head_dim + channel]
                    table[column, index] = query[column, channel] * scale
            for index in range(group * group_rows, (group + 1) * group_rows, LANES):
                store(sums, column * PAGE_TOKENS + index, zero)
                store(sums, column * PAGE_TOKENS + PAGE_TOKENS // 2 + index, zero)
        blocks = group_rows // LANES
        _add_dots(planes, keys, table, group * blocks, (group + 1) * blocks, sums)
    for column in range(columns):
        middle = np.float32(0)
        if has_center:
            middle = _dot(query, column * head_dim, numbers, 2 * count, head_dim)
        for block in range(2 * _BLOCKS):
            # One vector holds the first tokens of two tiles, another holds their last tokens.
            place = column * PAGE_TOKENS + block // 2 * LANES
            firsts, seconds = load(sums, place), load(sums, place + PAGE_TOKENS // 2)
            score = _FIRST_HALVES(firsts, seconds)
            if block % 2:
                score = _SECOND_HALVES(firsts, seconds)
            token = block * LANES
            if not key_group:
                scale = load(numbers, token)
                if has_center:
                    # The sign bit (even of a zero scale) tells that the center was subtracted.
                    centered = as_floats(as_words(scale) >> 31)
                    scale = from_words(as_words(scale) & splat(0x7FFFFFFF))
                    score = score * scale + centered * splat(middle)
                else:
                    score = score * scale
                score = score + load(numbers, count + token) * splat_one(query_sums, column)
            if layout.has_norms:
                score = score * load(numbers, len(numbers) - PAGE_TOKENS + token)
            store(scores, column * scores.shape[1] + start + token, score)


@inlined
def _dot(one, first, other, second, count):
    """Return the dot product of ``count`` elements of two arrays, starting at the given indices."""
    products = splat(np.float32(0))
    for index in range(0, count, LANES):
        products = products + load(one, first + index) * load(other, second + index)
    return total(products)


@inlined
def _code(words, place):
    """Return the codes at one index in words of eight codes each."""
    return as_floats((words >> 4 * place) & splat(15))


@inlined
def _add_dots(planes, keys, table, first, last, sums):
    """Add the dot products of queries and codes to the sums of some blocks.

    Queries are (columns, head_dim) in the order of ``keys.channels``.
    """
    columns, head_dim = table.shape
    mask, high_mask = splat(keys.mask), splat(0x44444444)
    number = 0
    # Adjacent words of a lane, in both planes; words of a quad's lane in all runs count in order.
    near, high_near = keys.words // 4, keys.high_words // 4
    for step in range(keys.steps):
        for word in range(keys.words):
            for part in range(keys.parts):
                for block in range(first, last):
                    start = ((step * _BLOCKS + block) * keys.words + word) * LANES
                    found = (load(planes, start) >> 2 * part) & mask
                    if keys.high:
                        place = (step * near + word % near) // 2
                        start = keys.steps * keys.words + place // high_near * keys.high_words
                        start = _BLOCKS * start + block * keys.high_words
                        start += word // near * high_near + place % high_near
                        above = load(planes, start * LANES) >> word % 2
                        found = found | ((above << 2 - 2 * part) & high_mask)
                    a, b, c, d = _code(found, 0), _code(found, 1), _code(found, 4), _code(found, 5)
                    e, f, g, h = _code(found, 2), _code(found, 3), _code(found, 6), _code(found, 7)
                    for column in range(columns):
                        query = column * head_dim + 4 * number
                        p, q = splat_one(table, query), splat_one(table, query + 1)
                        r, s = splat_one(table, query + 2), splat_one(table, query + 3)
                        at = column * PAGE_TOKENS + block * LANES
                        store(sums, at, load(sums, at) + a * p + b * q + c * r + d * s)
                        at += PAGE_TOKENS // 2
                        store(sums, at, load(sums, at) + e * p + f * q + g * r + h * s)
                number += 1


@inlined
def _add_values(words, base, values, weights, table, sums):
    """Add value codes times (columns, scales, 128) weights to (columns, n) sums, in the order of
    ``values.channels``."""
    columns, scales = weights.shape[:2]
    vectors = values.words * GROUPS // LANES
    mask, high_mask = splat(values.mask), splat(0x44444444)
    for tile in range(TILES):
        for step in range(values.steps):
            for column in range(columns):
                w = x = y = z = splat(np.float32(0))
                for scale in range(scales):
                    of_tile = load(weights, (column * scales + scale) * PAGE_TOKENS + tile * TILE)
                    used = load(values.scales, (step * scales + scale) * LANES)
                    if values.words == 16:
                        w = w + used * _OVER_4_0(of_tile, of_tile)
                        x = x + used * _OVER_4_1(of_tile, of_tile)
                        y = y + used * _OVER_4_2(of_tile, of_tile)
                        z = z + used * _OVER_4_3(of_tile, of_tile)
                    else:
                        w = w + used * _OVER_2_0(of_tile, of_tile)
                        x = x + used * _OVER_2_1(of_tile, of_tile)
                        y = y + used * _OVER_2_2(of_tile, of_tile)
                        z = z + used * _OVER_2_3(of_tile, of_tile)
                at = column * 4 * LANES
                store(table, at, w)
                store(table, at + LANES, x)
                store(table, at + 2 * LANES, y)
                store(table, at + 3 * LANES, z)
            for vector in range(vectors):
                run = tile * values.steps + step
                start = base + values.start + (run * vectors + vector) * LANES
                low = load(words, start)
                for part in range(values.parts):
                    found = (low >> 2 * part) & mask
                    if values.high:
                        start = base + values.high
                        if values.high_words < values.words:
                            above = load(words, start + (run * vectors + vector) * LANES // 2)
                            above = _ZIP_LOW(above, above >> 1)
                        else:
                            above = load(words, start + (run // 2 * vectors + vector) * LANES)
                            if step % 2:
                                above = _SECOND_WORDS(above, above >> 1)
                            else:
                                above = _FIRST_WORDS(above, above >> 1)
                        found = found | ((above << 2 - 2 * part) & high_mask)
                    a, b, c, d = _code(found, 0), _code(found, 2), _code(found, 4), _code(found, 6)
                    e, f, g, h = _code(found, 1), _code(found, 3), _code(found, 5), _code(found, 7)
                    for column in range(columns):
                        at = column * 4 * LANES
                        w, x = load(table, at), load(table, at + LANES)
                        y, z = load(table, at + 2 * LANES), load(table, at + 3 * LANES)
                        at = ((step * vectors + vector) * values.parts + part) * 2 * LANES
                        at += column * sums.shape[1]
                        store(sums, at, load(sums, at) + a * w + b * x + c * y + d * z)
                        at += LANES
                        store(sums, at, load(sums, at) + e * w + f * x + g * y + h * z)


@compiled
def _attend_to_tokens(
    first,
    threads,
    keys,
    values,
    recent,
    recents,
    counts,
    sinks,
    rotate,
    queries,
    scaling,
    outputs,
    totals,
    result,
):
    """Attend to the 16-bit tokens and, causally, to the new ones, and merge the result with those
    of the pages.

    The result is (batch, tokens, query heads, head_dim). A thread runs task ``first`` (a row and a
    KV head) and every ``threads``-th after it.
    """
    batch, tokens = queries.shape[0], queries.shape[2]
    parts, _, heads, columns, head_dim = outputs.shape
    width = -(-head_dim // LANES) * LANES  # padded with zeros
    query = aligned(columns * width).reshape(columns, -1)
    sums = aligned(columns * width).reshape(columns, -1)
    vector = aligned(width)
    bits = vector.view(np.uint32)
    longest = -(-(recents.shape[1] + tokens) // LANES) * LANES
    scores = aligned(columns * longest).reshape(columns, -1)
    weights = np.empty(1 + parts, np.float32)
    for channel in range(width):
        vector[channel] = 0
        for column in range(columns):
            query[column, channel] = 0
    for task in range(first, batch * heads, threads):
        row, head = task // heads, task % heads
        stored = counts[row, 0]
        for column in range(columns):
            query_head, token = divmod(head * columns + column, tokens)
            widen(queries[row, query_head, token], query[column].view(np.uint32))
            for channel in range(head_dim):
                query[column, channel] *= np.float32(scaling)
            for channel in range(width):
                sums[column, channel] = 0
        for index in range(stored + tokens):
            if index < stored:
                widen(recent[recents[row, index], 0, head], bits)
            else:
                widen(keys[row, head, index - stored], bits)
            for column in range(columns):
                seen = index - stored <= column % tokens
                score = _dot(query, column * width, vector, 0, width)
                scores[column, index] = score if seen else -np.inf
        for column in range(columns):
            count = -(-(stored + tokens) // LANES) * LANES
            for index in range(stored + tokens, count):
                scores[column, index] = -np.inf
            log_sum = _exponentials(scores, column * longest, count)
            query_head, token = divmod(head * columns + column, tokens)
            highest = max(log_sum, sinks[query_head])
            for part in range(parts):
                highest = max(highest, totals[part, row, head, column])
            weights[parts] = np.exp(log_sum - highest)
            whole = weights[parts] + np.exp(sinks[query_head] - highest)
            for part in range(parts):
                weights[part] = np.exp(totals[part, row, head, column] - highest)
                whole += weights[part]
            output = result[row, token, query_head]
            for channel in range(head_dim):
                output[channel] = 0
            for part in range(parts):
                if weights[part] == 0:  # A part without pages has no output.
                    continue
                weight = weights[part] / whole
                for channel in range(head_dim):
                    output[channel] += weight * outputs[part, row, head, column, channel]
            if rotate:
                rotate_vector(output)
            for index in range(stored + tokens):
                scores[column, index] *= weights[parts] / whole
        for index in range(stored + tokens):
            if index < stored:
                widen(recent[recents[row, index], 1, head], bits)
            else:
                widen(values[row, head, index - stored], bits)
            for column in range(columns):
                weight = splat(scores[column, index])
                for channel in range(0, width, LANES):
                    at = column * width + channel
                    store(sums, at, load(sums, at) + weight * load(vector, channel))
        for column in range(columns):
            query_head, token = divmod(head * columns + column, tokens)
            for channel in range(head_dim):
                result[row, token, query_head, channel] += sums[column, channel]


@inlined
def _exponentials(scores, start, count):
    """Compute a softmax in place over ``count`` numbers, a multiple of 16; return the log of the
    sum of exponentials."""
    tops = splat(np.float32(-np.inf))
    for index in range(start, start + count, LANES):
        tops = larger(tops, load(scores, index))
    highest = largest(tops)
    log2_e, ln_2 = splat(np.float32(1.4426950408889634)), splat(np.float32(0.6931471805599453))
    whole, lowest = splat(np.float32(0)), splat(np.float32(-127))
    one, rounding = splat(np.float32(1)), splat(np.float32(1.5 * 2**23 + 127))
    for index in range(start, start + count, LANES):
        # 2^x by the Taylor series of its fraction. Adding the large number rounds x to an integer:
        # the lowest bits of the sum are the exponent of a float32 number, 0 for 2^-127. NaN stays
        # NaN.
        x = (load(scores, index) - splat(highest)) * log2_e
        x = larger(x, lowest)
        power = x + rounding
        y = (x - (power - rounding)) * ln_2
        series = splat(np.float32(1 / 720))
        series = series * y + splat(np.float32(1 / 120))
        series = series * y + splat(np.float32(1 / 24))
        series = series * y + splat(np.float32(1 / 6))
        series = series * y + splat(np.float32(0.5))
        series = series * y + one
        series = series * y + one
        series = series * from_words(as_words(power) << 23)
        store(scores, index, series)
        whole = whole + series
    sum_of_all = total(whole)
    inverse = splat(np.float32(1) / sum_of_all)
    for index in range(start, start + count, LANES):
        store(scores, index, load(scores, index) * inverse)
    return highest + np.log(sum_of_all)
