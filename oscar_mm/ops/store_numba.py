"""Store on CPUs: write tokens to slots of stream pages, with CPU kernels that numba compiles.

The arithmetic is that of ``oscar_mm.quant``, where it is explained, but a vector at a time. Scales
and zeros are the same float16 numbers, except where a different order of summation changes the
rounding.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from oscar_mm.kernels.numba_vectors import (
    LANES,
    as_bits,
    compiled,
    inlined,
    read_floats,
    rotate_vector,
    rotation_block,
    shares,
    widen,
)
from oscar_mm.kernels.run_parallel import run_parallel
from oscar_mm.ops.store_torch import HEAD, NOTHING, TILE, StoreArguments, begin_by_torch
from oscar_mm.pages.layout import PAGE_TOKENS
from oscar_mm.pages.quantize import Recipe
from oscar_mm.quant.fit import CHANGES, FLOOR, LSQ_ROUNDS, MIN_SCALE, first_range


class _Side(NamedTuple):
    """Tables for writing keys or values.

    Attributes:
        bits: number of bits per code.
        group: number of channels per scale.
        rounds: rounds of the least-squares fit; 0 fits minimum and maximum.
        part: fraction of the range with which the fit starts.
        unbiased: whether scales are corrected once the codes are known.
        changes: maximum number of codes per vector that are changed to reduce the score error.
        planes: (planes, 3) int64: first byte in a head, number of bits, and index of the first bit
            within a code.
        elements, channels: (planes, 128, d) int64: see ``PageFormat.token_elements``.
        numbers: (KV heads, 2, 128, groups) int64: offsets of scales and zeros, in units of two
            bytes.
        center: (KV heads, d) int64: offsets of the center, in the same units; empty if there is no
            center.
    """

    bits: int
    group: int
    rounds: int
    part: float
    unbiased: bool
    changes: int
    planes: np.ndarray
    elements: np.ndarray
    channels: np.ndarray
    numbers: np.ndarray
    center: np.ndarray

    @classmethod
    def of(cls, recipe: Recipe, name: str) -> _Side:
        """Return the tables for keys (name "key") or values ("value")."""
        page_format, is_key = recipe.page_format, name == "key"
        heads = page_format.kv_heads
        bits = page_format.bits.keys if is_key else page_format.bits.values
        group = page_format.key_group if is_key else page_format.value_group
        planes = page_format.planes(f"{name}_codes")
        tables = [page_format.token_elements(plane) for plane, _, _ in planes]
        numbers = page_format.number_places(f"{name}_scales", f"{name}_zeros")
        has_center = page_format.center and is_key
        unbiased = recipe.norm if is_key else recipe.value_scale
        return cls(
            bits=bits,
            group=group,
            rounds=LSQ_ROUNDS if recipe.fit == "lsq" else 0,
            part=first_range(bits, group),
            unbiased=unbiased == "unbiased" and (recipe.fit == "lsq" or not is_key),
            changes=CHANGES if is_key and recipe.lowers_score_error else 0,
            planes=np.array(
                [[page_format.fields[plane].offset, width, first] for plane, first, width in planes]
            ),
            elements=np.stack([places.numpy() for places, _ in tables]),
            channels=np.stack([channels.numpy() for _, channels in tables]),
            numbers=numbers.reshape(heads, 2, PAGE_TOKENS, -1),
            center=(
                page_format.number_places("center")
                if has_center
                else np.zeros((heads, 0), np.int64)
            ),
        )


@lru_cache(maxsize=64)
def _sides(recipe: Recipe) -> tuple[tuple[Any, ...], ...]:
    """Return the tables for keys and values as unnamed tuples, which numba accepts 20 microseconds
    faster."""
    return tuple(_Side.of(recipe, "key")), tuple(_Side.of(recipe, "value"))


def rotates(recipe: Recipe) -> bool:
    """Return whether there is a CPU kernel for a recipe: one without rotation, or with rotation
    blocks of whole vectors."""
    return not recipe.rotate or recipe.page_format.head_dim % LANES == 0


@torch.no_grad()
def store_on_cpu(arguments: StoreArguments) -> None:
    """Run ``store``; see ``oscar_mm.ops.store_torch.StoreArguments``."""
    if (arguments.begins[:, 0].numpy() >= 0).any():  # in one of many steps
        begin_by_torch(arguments)
    recipe, sigma = arguments.recipe, arguments.sigma
    heads, head_dim = recipe.page_format.kv_heads, recipe.page_format.head_dim
    if sigma is None:
        sigma = torch.ones(1, 1, head_dim)
    balancing = sigma.view(-1, *sigma.shape[-2:]).expand(-1, heads, -1).contiguous().numpy()
    jobs = arguments.jobs.numpy()
    recent = as_bits(arguments.recent)
    new = as_bits(arguments.keys), as_bits(arguments.values)
    pages = arguments.pages.numpy()
    given = pages, pages.view(np.uint16), recipe.page_format.head_bytes, balancing, recipe.rotate
    flag = arguments.not_finite.numpy()
    run_parallel(
        [
            (_store, *new, recent, part, *_sides(recipe), *given, flag)
            for part in shares(jobs[jobs[:, 0] >= 0])
        ]
    )


@compiled
def _store(
    keys,
    values,
    recent,
    jobs,
    plain_key_side,
    plain_value_side,
    pages,
    halves,
    head_bytes,
    balancing,
    rotate,
    not_finite,
):
    """Write the tokens of the jobs; arrays as in ``store_on_cpu``."""
    key_side, value_side = _Side(*plain_key_side), _Side(*plain_value_side)
    heads, head_dim = balancing.shape[1:]
    bits = np.empty(head_dim, np.uint32)
    raw = bits.view(np.float32)
    vector, apart = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    center = np.empty(head_dim, np.float32)
    codes, other_codes = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    weights, turned = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    steps, gradient = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
    word = np.empty(1, np.uint32)
    for job in range(len(jobs)):
        slot, tile, row = jobs[job, 0], jobs[job, 1], jobs[job, 2]
        sigma = balancing[row if len(balancing) > 1 else 0]
        for within in range(TILE):
            source, place = jobs[job, HEAD + within], tile * TILE + within
            if source == NOTHING:
                continue
            for index in range(2 * heads):
                head, is_value = index >> 1, index & 1
                side = value_side if is_value else key_side
                states = values if is_value else keys
                token = recent[~source, is_value, head] if source < 0 else states[row, head, source]
                widen(token, bits)
                for channel in range(head_dim):
                    vector[channel] = (
                        raw[channel] if is_value else raw[channel] / sigma[head, channel]
                    )
                if side.changes:
                    for channel in range(head_dim):
                        weights[channel] = vector[channel] * vector[channel]
                if rotate:
                    rotate_vector(vector)
                groups, has_center = head_dim // side.group, side.center.shape[1] > 0
                read_floats(halves[slot], side.center[head], center[: side.center.shape[1]])
                numbers = side.numbers[head]
                page = halves[slot]
                error = np.float32(0)
                centered = False
                for attempt in range(2 if has_center else 1):
                    for channel in range(head_dim):
                        less = center[channel] if attempt else np.float32(0)
                        apart[channel] = vector[channel] - less
                    scales = np.empty((groups, 2), np.float32)
                    found = np.float32(0)
                    for group in range(groups):
                        found += _fit(
                            apart, group * side.group, side, other_codes, scales[group], word
                        )
                    if attempt and not found < error:
                        continue
                    error, centered = found, attempt == 1
                    for channel in range(head_dim):
                        codes[channel] = other_codes[channel]
                    for group in range(groups):
                        scale = _half_bits(scales[group, 0], word)
                        zero = _half_bits(scales[group, 1], word)
                        if (scale & 0x7C00) == 0x7C00 or (zero & 0x7C00) == 0x7C00:
                            not_finite[0] = 1
                        page[numbers[0, place, group]] = scale ^ (0x8000 if centered else 0)
                        page[numbers[1, place, group]] = zero
                    if side.changes:
                        for channel in range(head_dim):
                            steps[channel], gradient[channel] = scales[channel // side.group]
                if side.changes:
                    for channel in range(head_dim):
                        less = center[channel] if centered else np.float32(0)
                        turned[channel] = center[channel] if has_center else np.float32(0)
                        gradient[channel] += codes[channel] * steps[channel]
                        gradient[channel] -= vector[channel] - less
                    rotate_vector(turned)
                    _weigh(weights, turned)
                    _lower_score_error(codes, gradient, steps, weights, turned, side)
                start = head * head_bytes
                for plane in range(len(side.planes)):
                    offset, width, first = side.planes[plane]
                    elements, channels = side.elements[plane, place], side.channels[plane, place]
                    per_byte, mask = 8 // width, (1 << width) - 1
                    for element in range(0, head_dim, per_byte):
                        byte = 0
                        for code in range(per_byte):
                            whole = np.int64(codes[channels[element + code]])
                            byte |= (whole >> first & mask) << width * code
                        pages[slot, start + offset + elements[element] * width // 8] = byte


@inlined
def _fit(vector, start, side, codes, found, word):
    """Fit a group: write its codes, write its scale and zero to ``found``, and return the squared
    error."""
    stop, count, steps = (
        start + side.group,
        np.float32(side.group),
        np.float32((1 << side.bits) - 1),
    )
    low, high, total = vector[start], vector[start], np.float32(0)
    for index in range(start, stop):
        low, high = min(low, vector[index]), max(high, vector[index])
        total += vector[index]
    mean = total / count
    span = high - low
    scale, zero = span / steps, low
    if side.rounds:
        part = np.float32(side.part)
        scale = span * (part / steps)
        zero = (high + low - span * part) * np.float32(0.5)
    mean_code = np.float32(0)
    covariance = np.float32(0)
    # The last round only assigns codes, using the stored scale and zero.
    for number in range(side.rounds + 1):
        if number == side.rounds:
            scale, zero = _rounded(scale, word), _rounded(zero, word)
        inverse = np.float32(1) / scale if scale > MIN_SCALE else np.float32(0)
        total = np.float32(0)
        for index in range(start, stop):
            code = np.rint((vector[index] - zero) * inverse)
            code = min(max(code, np.float32(0)), steps)
            codes[index] = code
            total += code
        mean_code = total / count
        covariance, variance = np.float32(0), np.float32(0)
        for index in range(start, stop):
            spread = codes[index] - mean_code
            covariance += spread * (vector[index] - mean)
            variance += spread * spread
        if number < side.rounds:
            if variance > 0:
                scale = covariance / count / max(variance / count, np.float32(1e-12))
            zero = mean - scale * mean_code
    if side.unbiased:
        square = np.float32(0)
        for index in range(start, stop):
            square += (vector[index] - mean) * (vector[index] - mean)
        covariance = covariance / count * scale
        if covariance > 0:
            whole = scale * min(max(square / count / covariance, np.float32(0.5)), np.float32(2))
            middle = mean - whole * mean_code
            stored, centred = _rounded(whole, word), _rounded(middle, word)
            if abs(stored) < np.inf and abs(centred) < np.inf:
                scale, zero = stored, centred
    error = np.float32(0)
    for index in range(start, stop):
        apart = codes[index] * scale + zero - vector[index]
        error += apart * apart
    found[0], found[1] = scale, zero
    return error


@inlined
def _weigh(weights, center):
    """Compute ``score_weights`` in place from a center and from the squares of a key, which are in
    ``weights``."""
    count = len(weights)
    half, total = count // 2, np.float32(0)
    for index in range(half):
        other = index + half
        energy = weights[index] + weights[other]
        energy += center[index] * center[index] + center[other] * center[other]
        weights[index] = energy
        total += energy
    floor = np.float32(FLOOR) * (total / np.float32(half))
    for index in range(half):
        weights[index] += floor
        weights[index + half] = weights[index]


@inlined
def _lower_score_error(codes, gradient, steps, weights, turned, side):
    """Apply ``lower_score_error``; ``gradient`` holds the codes' errors and is overwritten."""
    count, most = len(codes), np.float32((1 << side.bits) - 1)
    # Element (i, j) of H D H, within a block of n channels, is element i ^ j of (D H) / sqrt(n). A
    # block begins at a multiple of 2 n, so that i ^ j counts from its beginning.
    begin = 0
    while begin < count:
        size = rotation_block(count - begin)
        factor = np.float32(1 / np.sqrt(np.float64(size)))
        for index in range(begin, begin + size):
            turned[index] = weights[index] * factor
        begin += size
    rotate_vector(turned)
    rotate_vector(gradient)
    for index in range(count):
        gradient[index] *= weights[index]
    rotate_vector(gradient)
    for _ in range(side.changes):
        best, chosen, first, last, begin = np.float32(0), -1, 0, 0, 0
        while begin < count:
            end = begin + rotation_block(count - begin)
            for index in range(begin, end):
                changed = codes[index] + (np.float32(-1) if gradient[index] > 0 else np.float32(1))
                step = steps[index]
                gain = step * (np.float32(2) * abs(gradient[index]) - turned[begin] * step)
                if gain > best and changed >= 0 and changed <= most:
                    best, chosen, first, last = gain, index, begin, end
            begin = end
        if chosen < 0:
            break
        change = np.float32(-1) if gradient[chosen] > 0 else np.float32(1)
        codes[chosen] += change
        change *= steps[chosen]
        for index in range(first, last):
            gradient[index] += change * turned[first + (index ^ chosen)]


@inlined
def _half_bits(value, word):
    """Return the bits of the nearest float16 number, ties to even; NaN becomes infinity."""
    word.view(np.float32)[0] = value
    whole = np.int64(word[0])
    sign, size = (whole >> 16) & 0x8000, whole & 0x7FFFFFFF
    if size >= 0x477FF000:
        half = np.int64(0x7C00)
    elif size >= 0x38800000:
        half = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13
    else:
        half = np.int64(np.rint(abs(np.float64(value)) * 16777216.0))
    return sign | half


@inlined
def _rounded(value, word):
    """Round to the nearest float16 number, as float32; overflow and NaN both become infinity."""
    half = _half_bits(value, word)
    if half & 0x7FFF == 0x7C00:
        return np.float32(np.inf)
    word[0] = np.uint32((half & 0x8000) << 16 | (half & 0x7FFF) << 13)
    return word.view(np.float32)[0] * np.float32(2.0**112)
