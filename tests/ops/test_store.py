"""store: tokens into slots of stream pages, on any device by PyTorch operations."""

from dataclasses import replace

import pytest
import torch

from oscar_mm import KVPolicy
from oscar_mm.ops.library import recipe_numbers, sigma_of
from oscar_mm.ops.samples import random_basis, random_pages, random_stores
from oscar_mm.ops.store import store
from oscar_mm.ops.store_torch import HEAD, NOTHING, TILE
from oscar_mm.pages.codecs.stream import in_codes
from oscar_mm.pages.layout import PageFormat
from oscar_mm.pages.quantize import Recipe, unpack_stored
from oscar_mm.policy import Bits
from oscar_mm.quant.basis import Basis
from tests.ops.arguments import stream_policy
from tests.pairs import pairs

CPU = torch.device("cpu")
POLICIES = {
    "stream": stream_policy(),
    "4/2": stream_policy((4, 2)),
    "without center": stream_policy(center=False),
    "quarot": KVPolicy.preset("quarot"),
    "groups of 32": stream_policy((2, 3), value_group=32, rotate=False),
}


def run(
    states: tuple[torch.Tensor, ...], page: PageFormat, policy: KVPolicy, basis: Basis
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages, and the flag."""
    pages, bad = random_pages(5, page, CPU), torch.zeros(1, dtype=torch.int32)
    store(*states, pages, bad, basis.sigma, recipe_numbers(Recipe.of(page, policy)))
    return pages, bad


def problem(
    name: str, head_dim: int, dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = ()
) -> tuple:
    policy = POLICIES[name]
    page = PageFormat.of(policy, policy.bits.text, 3, head_dim)
    basis = random_basis(page, policy.rotate, CPU, rows)
    return random_stores(page, dtype, CPU), page, policy, basis


def jobs_of(jobs: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Page, place, row and source of every token."""
    return [
        (slot, tile * TILE + at, row, source)
        for slot, tile, row, _, *sources in jobs.tolist()
        for at, source in enumerate(sources)
        if slot >= 0 and source != NOTHING
    ]


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", POLICIES)
def test_only_the_bytes_of_its_tokens_are_written(name: str, head_dim: int) -> None:
    states, page, policy, basis = problem(name, head_dim)
    pages, bad = run(states, page, policy, basis)
    assert not bad
    before, owners = random_pages(5, page, CPU), page.token_bytes(CPU)
    for slot in range(5):
        places = {place for at, place, _, _ in jobs_of(states[3]) if at == slot}
        others = [token for token in range(128) if token not in places]
        kept = torch.isin(owners, torch.tensor(others, dtype=owners.dtype))
        if slot not in states[4][:, 0].tolist():
            kept |= owners < 0
        assert torch.equal(pages[slot, kept], before[slot, kept])


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("name", POLICIES)
def test_a_token_does_not_depend_on_its_job(name: str, head_dim: int) -> None:
    """Stored alone it has the same bytes as with others."""
    states, page, policy, basis = problem(name, head_dim)
    together, _ = run(states, page, policy, basis)
    jobs = states[3]
    alone = jobs[:, None].repeat(1, TILE, 1)
    apart = torch.eye(TILE, dtype=torch.bool).logical_not().expand(len(jobs), TILE, TILE)
    alone[..., HEAD:][apart] = NOTHING
    pages, _ = run((*states[:3], alone.flatten(0, 1), states[4]), page, policy, basis)
    assert torch.equal(pages, together)


@pytest.mark.parametrize(
    ("name", "dtype", "rows"), pairs(POLICIES, (torch.float32, torch.bfloat16), ((), (2,)))
)
def test_centers_and_what_is_relative_to_them(
    name: str, dtype: torch.dtype, rows: tuple[int, ...]
) -> None:
    """Centers are means in float64; a key is stored the way whose nearest codes lose less."""
    states, page, policy, basis = problem(name, 64, dtype, rows)
    pages, _ = run(states, page, policy, basis)
    keys, _, recent, jobs, begins = states
    matrix = Basis(64, policy.rotate)._rotated(torch.eye(64)).double()

    def turned(row: int, source: int) -> torch.Tensor:
        key = keys[row, :, source] if source >= 0 else recent[~source, 0]
        sigma = sigma_of(basis.sigma, row)
        assert sigma is not None
        return key.double() / sigma @ matrix

    for slot, row, count, other, *sources in begins.tolist():
        if slot >= 0:
            expected = sum(turned(row, source) for source in sources[:count]) / max(count, 1)
            if not count:
                stored = unpack_stored(random_pages(5, page, CPU)[[other]], page)[0].double()
                expected = stored[0, :, 64:96].mean(1)
            found = page.read(pages, "center")[slot].double()
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    if not page.center:
        assert not page.read(pages, "key_scales").signbit().any()
        return
    how = page.bits.keys, page.key_group, policy.fit, policy.norm == "unbiased"
    relative, centers = page.read(pages, "key_scales"), page.read(pages, "center")
    chosen = []
    for slot, place, row, source in jobs_of(jobs):
        key = turned(row, source).float()
        loss, other = (in_codes(x, *how)[3] for x in (key - centers[slot], key))
        centered = relative[slot, :, place, 0].signbit()
        assert ((centered == (loss < other)) | ((loss - other).abs() <= 1e-3 * other)).all()
        chosen.append(centered)
    share = torch.stack(chosen).float().mean()
    assert 0.1 < share < 0.9, "both ways are used"


@pytest.mark.parametrize(("name", "bound"), [("stream", 0.4), ("4/2", 0.4), ("quarot", 0.65)])
def test_what_is_read_is_near_what_was_given(name: str, bound: float) -> None:
    states, page, policy, basis = problem(name, 128)
    keys, values, recent, jobs, _ = states
    pages, _ = run(states, page, policy, basis)
    read = unpack_stored(pages, page)
    back = (basis.keys_out(read[0]), basis.values_out(read[1]))
    for side, given in enumerate((keys, values)):
        expected, found = [], []
        for slot, place, row, source in jobs_of(jobs):
            expected.append(given[row, :, source] if source >= 0 else recent[~source, side])
            found.append(back[side][slot, :, place])
        whole = torch.stack(expected)
        assert (torch.stack(found) - whole).norm() < bound * whole.norm()


@pytest.mark.parametrize(
    ("where", "wrong"),
    [("keys", torch.nan), ("values", torch.inf), ("recent", 1e30), ("center", torch.nan)],
)
def test_flag(where: str, wrong: float) -> None:
    states, page, policy, basis = problem("stream", 64)
    keys, values, recent, jobs, begins = states
    alone = ~int(begins[3, HEAD:][begins[3, HEAD:] < 0][0])  # is in no job, or as well
    place = {
        "keys": (keys, (0, 1, 7, 9)),
        "values": (values, (1, 2, 119, 0)),
        "recent": (recent, (~int(jobs[2, HEAD]), 1, 0, 9)),
        "center": (recent, (alone, 0, 1, 3)),
    }
    tensor, at = place[where]
    tensor[at] = wrong
    assert run(states, page, policy, basis)[1].tolist() == [1]
    # Of a job that does nothing, nothing is looked at.
    jobs[:, 0] = begins[:, 0] = -1
    pages, bad = run(states, page, policy, basis)
    assert not bad and torch.equal(pages, random_pages(5, page, CPU))


def test_formats_that_do_not_fit() -> None:
    states, page, policy, basis = problem("stream", 64)
    channel = PageFormat(Bits(2, 2), 3, 64, "channel", 128, 64, None)
    with pytest.raises(ValueError, match="format is of key_axis 'channel', must be of key_axis 't"):
        run(states, channel, policy, basis)
    with pytest.raises(ValueError, match="begins is of 5 pages, must be empty"):
        run(states, replace(page, center=False), policy, basis)
