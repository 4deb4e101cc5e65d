"""Steps as the runners of vLLM ask for them, compared with the definition of attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch

vllm = pytest.importorskip("vllm")

from vllm.v1.worker.ubatch_utils import (  # noqa: E402
    maybe_create_ubatch_slices,
    split_attn_metadata,
)

from oscar_mm.errors import InputError  # noqa: E402
from oscar_mm.vllm_plugin import backend as plugin  # noqa: E402
from tests.vllm_plugin.requests import causal  # noqa: E402
from tests.vllm_plugin.vllm_engine import (  # noqa: E402
    LONGEST,
    Configure,
    Engine,
    Parent,
    views_of,
)


def test_steps(engine: Engine) -> None:
    """Prompts with and without a past, mixed with requests that decode, and padded decoding."""
    first, second, third = engine.request(400), engine.request(500), engine.request(300)
    step = engine.run([(first, 137), (second, 20)])
    assert not step.decodes and [r.past for r in step.readings] == [None]
    step = engine.run([(first, 1), (second, 129), (third, 40)])
    assert step.decodes == 1 and [r.past is None for r in step.readings] == [False, True]
    step = engine.run([(first, 1), (second, 1), (third, 1)], padding=5)
    step = engine.run([(first, 1), (third, 1)], padding=1, seq_lens_cpu_upper_bound=None)
    # Their rings are ahead of them, and are given up.
    first.read, third.read = first.read - 1, third.read - 1
    first.exact_from, third.exact_from = first.read, third.read
    step = engine.run([(first, 1), (second, 1), (third, 1)], padding=5)
    assert step.decodes == 8 and not step.readings
    for _ in range(130):
        engine.run([(third, 1), (first, 1)])
    engine.run([(third, 1), (second, 31), (first, 1)])


def test_recent_tokens_are_read_as_they_came(engine: Engine) -> None:
    """By requests in any row, after a shared beginning, and after preemption."""

    def exact(step: plugin.OscarMetadata) -> list[int]:
        return step.tables.counts[: step.decodes, 0].tolist()

    first, second = engine.request(400), engine.request(200)
    engine.run([(first, 290), (second, 10)])
    assert exact(engine.run([(second, 1), (first, 1)])) == [10, 36]
    assert exact(engine.run([(first, 1), (second, 1)], padding=2)) == [36, 11, 0, 0]
    third = engine.request(400, like=first, shared=256)
    assert exact(engine.run([(third, 1), (second, 1)])) == [0, 12]
    assert exact(engine.run([(second, 1), (third, 1), (first, 1)])) == [13, 1, 36]
    first.read, first.blocks = 0, engine.request(400).blocks
    engine.run([(third, 1), (first, 20)])
    assert exact(engine.run([(first, 1), (third, 1)])) == [20, 3]


def test_prompt_of_one_token(engine: Engine) -> None:
    request = engine.request(200)
    step = engine.run([(request, 1)])
    assert step.decodes == 1
    engine.run([(request, 100)])


def test_rows_without_tokens_in_a_mixed_step(engine: Engine) -> None:
    first, second = engine.request(300), engine.request(300)
    engine.run([(first, 50), (second, 60)])
    step = engine.run([(first, 1), (second, 100)], padding=3)
    assert [reading.tokens for reading in step.readings] == [slice(1, 101)]


def test_wide_block_tables_and_long_bounds(engine: Engine) -> None:
    """At the maximum length, vLLM's bound still counts rejected draft tokens."""
    request = engine.request(LONGEST)
    engine.run([(request, LONGEST - 10)])
    engine.run([(request, 4)], rejected=200)


def test_no_bounds_on_the_host(engine: Engine) -> None:
    request = engine.request(300)
    engine.run([(request, 150)])
    engine.run([(request, 50)], seq_lens_cpu_upper_bound=None)


def test_speculation(speculating: Engine) -> None:
    first, second = speculating.request(400), speculating.request(400)
    speculating.run([(first, 126), (second, 60)])
    step = speculating.run([(first, 4), (second, 4)], padding=2)
    assert (step.decodes, step.query_tokens) == (4, 4)
    first.read, second.read = first.read - 3, second.read - 1  # drafts that were rejected
    step = speculating.run([(first, 4), (second, 4)], rejected=3)
    assert step.tables.counts[:, 0].tolist() == [36, 36]
    assert (step.decodes, step.query_tokens) == (2, 4)
    # Drafters decode one token a step; vLLM may say the length from before drafts were rejected.
    step = speculating.run([(first, 1), (second, 1)], max_query_len=4)
    assert (step.decodes, step.query_tokens) == (2, 1)
    step = speculating.run([(first, 2), (second, 2)], max_query_len=4)
    assert (step.decodes, step.query_tokens) == (2, 2)


@pytest.mark.parametrize("own_steps", [True, False])
def test_the_layers_of_drafts_run_ahead(own_steps: bool, configure: Configure) -> None:
    """The first pass of the draft layers has its own metadata (vLLM's first model runner) or that
    of the target model (its second). In both cases the target model's layers read recent tokens
    exactly, as ``run`` checks by the definition of attention."""
    config = configure(drafts=3)
    engine = Engine(config)
    draft = Parent(config, number=7)
    draft.load()
    assert draft.attn.impl.is_draft and not engine.impl.is_draft
    layer = draft.attn.impl
    views = views_of(config, [engine.layer, draft.attn], 2**21)
    pages = plugin.pages_of(views[draft.attn.layer_name]).fill_(255)
    names = [draft.attn.layer_name]
    builder = plugin.OscarMetadataBuilder(engine.spec, names, config, torch.device("cpu"))

    def run_draft(scheduled: list, step: plugin.OscarMetadata) -> None:
        """Run a pass of the draft model, with negated keys at the same positions."""
        states = [
            torch.cat([r.states[side][r.read : r.read + n] for r, n in scheduled])
            for side in (0, 1, 2)
        ]
        output = torch.full_like(states[0], torch.nan)
        layer.forward(draft.attn, states[0], -states[1], states[2], pages, step, output)
        at = 0
        for request, n in scheduled:
            queries, keys, values = (x[: request.read + n].double() for x in request.states)
            expected = causal(queries[-n:], -keys, values)
            error = (output[at : at + n] - expected).norm() / expected.norm()
            assert error < 0.55  # of 3 and 2 bits; 1.7 with tokens of other places
            at += n

    requests = [engine.request(500), engine.request(400)]
    scheduled = [(requests[0], 126), (requests[1], 60)]
    for turn in range(12):
        before = [request.read for request in requests]
        step = engine.run(scheduled)
        if turn:
            assert step.tables.counts[:, 0].tolist() == [36, 36]
        for request, read in zip(requests, before, strict=True):
            request.read = read
        own = builder.build_for_drafting(engine.common(scheduled), 0) if own_steps else step
        run_draft(scheduled, own)
        accepted = [n if turn == 0 else 1 + turn % n for _, n in scheduled]
        for ahead in range(2):
            for request, read, n in zip(requests, before, accepted, strict=True):
                request.read = read + n + ahead
            one = [(request, 1) for request in requests]
            run_draft(one, builder.build_for_drafting(engine.common(one), 1 + ahead))
        for request, read, n in zip(requests, before, accepted, strict=True):
            request.read = read + n
        scheduled = [(request, 4) for request in requests]


@pytest.mark.parametrize("block_size", [256, 384])
def test_blocks_of_several_pages(block_size: int, configure: Configure) -> None:
    """Hybrid models have blocks of several pages."""
    config = configure()
    config.cache_config.block_size = block_size
    engine = Engine(config, head_dim=256)
    assert engine.spec.block_size == block_size
    first, second = engine.request(500), engine.request(400)
    engine.run([(first, 300), (second, 20)])
    for _ in range(3):
        step = engine.run([(second, 1), (first, 1)], padding=1)
    assert step.tables.counts[:2, 0].tolist() == [22, 36]
    engine.run([(second, 140), (first, 30)])


@pytest.mark.parametrize("rejected", [0, 3, 130])
def test_uneven_speculation(rejected: int, speculating: Engine) -> None:
    """Requests with other numbers of drafts are read as prompts; how long they are, only the device
    knows."""
    first, second, third = (speculating.request(500) for _ in range(3))
    speculating.run([(first, 126), (second, 255), (third, 128)])
    for _ in range(3):
        step = speculating.run([(first, 2), (second, 4), (third, 3)], rejected=rejected)
        assert (step.decodes, step.query_tokens) == (1, 2) and len(step.readings) == 1
    # A chunk of a prompt that is shorter than a step of decoding.
    short = speculating.request(90)
    speculating.run([(first, 4), (second, 4), (short, 2), (third, 100)], rejected=rejected)


def test_runs_that_store_nothing(configure: Configure) -> None:
    engine = Engine(configure(), norms=False)
    request, other = engine.request(300), engine.request(300)
    for scheduled in ([(request, 100)], [(request, 1), (other, 30)], [(request, 1), (other, 1)]):
        engine.run(scheduled, stored=False)
        request.read = other.read = 0
    assert (engine.pages == 255).all()


@pytest.mark.parametrize("tokens", [(1, 1, 1, 1), (1, 1, 200, 70), (100, 20)])
def test_two_batches_at_a_time(tokens: tuple, engine: Engine) -> None:
    """Micro-batches overlap, each with a builder of its own; a request may be in both."""
    config = vllm.config.get_current_vllm_config()
    names = [engine.layer.layer_name]
    second = plugin.OscarMetadataBuilder(engine.spec, names, config, torch.device("cpu"))
    requests = [engine.request(400) for _ in tokens]
    engine.run([(request, 140) for request in requests])
    common = engine.common(list(zip(requests, tokens, strict=True)))
    slices, _ = maybe_create_ubatch_slices(True, np.array(tokens), sum(tokens), len(tokens), 2)
    parts = split_attn_metadata(slices, common)
    metadata = [
        builder.build(0, part)
        for builder, part in zip((engine.builder, second), parts, strict=True)
    ]
    states = [
        torch.cat([r.states[side][140 : 140 + n] for r, n in zip(requests, tokens, strict=True)])
        for side in range(3)
    ]
    output = torch.full_like(states[0], torch.nan)
    for part, step in zip(slices, metadata, strict=True):
        own = [x[part.token_slice] for x in states]
        engine.impl.forward(engine.layer, *own, engine.kv_cache, step, output[part.token_slice])
    half, at = sum(tokens) // 2, 0
    for request, n in zip(requests, tokens, strict=True):
        cut = min(max(half - at, 0), n)  # the tokens of it in the first micro-batch
        for start, stop in ((0, cut), (cut, n)):
            expected = engine.expected(request, 140 + start, 140 + stop)
            error = (output[at + start : at + stop].double() - expected).norm()
            assert error <= 1e-4 * expected.norm()
        at += n


def test_a_run_that_measures_memory(engine: Engine) -> None:
    states = [x[:10] for x in engine.request(20).states]
    output = torch.full_like(states[0], torch.nan)
    found = engine.impl.forward(engine.layer, *states, torch.tensor([]), None, output)
    assert found is output and (output == 0).all()


def test_more_than_tables_have_places_for(engine: Engine) -> None:
    requests = [engine.request(1) for _ in range(9)]
    with pytest.raises(ValueError, match="9 requests with 9 new tokens"):
        engine.builder.build(0, engine.common([(request, 1) for request in requests]))


def test_too_many_drafts(configure: Configure) -> None:
    with pytest.raises(InputError, match="17 tokens a step: must be at most 16"):
        Engine(configure(drafts=16))
