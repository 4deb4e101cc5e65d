"""rings: what a step reads in 16-bit precision is what the request's own tokens left there."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from oscar_mm.kernels.compile import csrc_folder
from oscar_mm.ops import rings as module
from oscar_mm.ops.block_tables import (
    BlockTables,
    begin_count,
    block_tables_by_numpy,
    job_count,
    row_tiles,
)
from oscar_mm.ops.decode_tables import FIELDS
from oscar_mm.ops.rings import (
    RING_FIELDS,
    Params,
    RingArguments,
    RingShape,
    RingsKernel,
    checked_steps,
    rings_by_numpy,
)
from oscar_mm.ops.store_torch import CENTER_TOKENS, HEAD, TILE
from tests.compiled import architectures, compile_once, same_struct

INT = torch.int32


@dataclass
class Request:
    """Numbers of its tokens, and the blocks of those that were read."""

    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    read: int = 0


class Engine:
    """Blocks and rings that have the numbers of tokens in the place of their keys and values.

    A block that nobody uses keeps its tokens until it is given to another request; who begins with
    the same tokens shares it until then.
    """

    def __init__(
        self, seed: int, shape: RingShape, rings: int, blocks: int, *, keeps: bool = True
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.shape, self.keeps = shape, keeps
        self.blocks = np.full((blocks, 128), -1)
        self.users = np.zeros(blocks, int)
        self.free = list(range(blocks))
        self.owners = torch.full((blocks, 2), -1, dtype=INT)
        self.rings = torch.zeros(rings, RING_FIELDS, dtype=INT)
        self.entries = np.full(rings * shape.entries, -1)
        self.clock = self.next = self.exact = self.past = 0

    def request(self, tokens: int, like: Request | None = None) -> Request:
        """A request that begins as another, if one is given."""
        shared = [] if like is None else like.tokens[: self.random.integers(len(like.tokens) + 1)]
        new = range(self.next, self.next + tokens - min(len(shared), tokens))
        self.next += len(new)
        return Request([*shared[:tokens], *new])

    def begin(self, request: Request) -> None:
        """Share the blocks that have its first tokens; at least a token is left to read."""
        for number in range((len(request.tokens) - 1) // 128):
            wanted = request.tokens[number * 128 : number * 128 + 128]
            same = np.flatnonzero((self.blocks == wanted).all(1)).tolist()
            if not same:
                break
            block = int(self.random.choice(same))
            if block in self.free:
                self.free.remove(block)
            self.users[block] += 1
            request.blocks.append(block)
        request.read = len(request.blocks) * 128

    def end(self, request: Request) -> None:
        """Let its blocks go: the next request takes the last first, or nobody does for long."""
        for block in request.blocks:
            self.users[block] -= 1
            if not self.users[block]:
                self.free.insert(0 if self.random.random() < 0.7 else len(self.free), block)
        request.blocks, request.read = [], 0

    def reserve(self, request: Request, new: int) -> None:
        """Give it blocks. Others may share them as soon as it is known what they will have."""
        while len(request.blocks) * 128 < request.read + new:
            block = self.free.pop(0)
            self.blocks[block], self.users[block] = -1, 1
            request.blocks.append(block)
        self.blocks.reshape(-1)[self.slots(request, new)] = request.tokens[request.read :][:new]

    def slots(self, request: Request, new: int) -> list[int]:
        """Return the slots of a request's next tokens."""
        places = range(request.read, request.read + new)
        return [request.blocks[place // 128] * 128 + place % 128 for place in places]

    def step(self, batch: list[tuple[Request, int]], decodes: int, stored: bool = True) -> None:
        """Read tokens, and check what those that decode see."""
        rows, news = len(batch), [new for _, new in batch]
        width = max(len(request.blocks) for request, _ in batch)
        blocks = torch.zeros(rows, width, dtype=INT)
        for row, (request, _) in enumerate(batch):
            blocks[row, : len(request.blocks)] = torch.tensor(request.blocks)
        slots = torch.tensor([slot for row in batch for slot in self.slots(*row)])
        lengths = torch.tensor([request.read + new for request, new in batch], dtype=INT)
        starts = torch.tensor([0, *np.cumsum(news)], dtype=INT)
        known = (blocks, lengths, starts, slots if stored else torch.full_like(slots, -1))
        tails = torch.zeros(rows, 2, dtype=INT)
        self.clock += 1
        of_rings = (self.shape.spare, self.clock, self.keeps, tails, self.owners, self.rings)
        rings_by_numpy(RingArguments(*known, *of_rings))
        of_row = row_tiles(news[0]) if decodes == rows else 0
        count = sum(news)
        shapes = (
            *((max(decodes, 1), width, 2), (max(decodes, 1), 2), (4, FIELDS)),
            (job_count(rows, count, of_row), HEAD + TILE),
            (begin_count(rows, count, of_row), HEAD + CENTER_TOKENS),
            *((max(decodes, 1), max(self.shape.max_read, 1)), (count, 3)),
        )
        written = [torch.zeros(shape, dtype=INT) for shape in shapes]
        how = (decodes, of_row, 1, max(news[:decodes], default=1), False, self.shape, tails)
        tables = BlockTables(*known, *how, *written)  # pyright: ignore[reportCallIssue]
        block_tables_by_numpy(tables)
        read = set[int]()
        for row, (request, _) in enumerate(batch[:decodes]):
            read |= self.check(request, tables, row)
        numbers = [t for request, new in batch for t in request.tokens[request.read :][:new]]
        places = tables.writes[:, 2].numpy()
        is_kept = places >= 0
        # The kernel that writes them does not wait for the one that reads.
        assert len(set(places[is_kept]) - read) == is_kept.sum()
        self.entries[places[is_kept]] = np.array(numbers)[is_kept]
        for request, new in batch if stored else []:
            request.read += new

    def check(self, request: Request, tables: BlockTables, row: int) -> set[int]:
        """Every past token is read once, from a page or from a ring that has it; returns places."""
        exact, pages = tables.counts[row].tolist()
        places = tables.recents[row, :exact].numpy()
        seen = self.entries[places].tolist()
        for block, use in tables.items[row, :pages].tolist():
            seen += self.blocks[block, use >> 8 : use & 255].tolist()
        assert sorted(seen) == sorted(request.tokens[: request.read])
        recent = request.tokens[max(request.read - self.shape.window, 0) : request.read]
        self.exact += len(set(seen[:exact]) & set(recent))
        self.past += len(recent)
        return set(places.tolist())


@pytest.mark.daily("0-32-5", "0-64-1", "0-128-5")
@pytest.mark.parametrize("spare", [1, 5])
@pytest.mark.parametrize("window", [32, 64, 128])
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in (1, 2))]
)
def test_requests_that_come_go_and_share(seed: int, window: int, spare: int) -> None:
    """Chunks of prompts, decoding with drafts that are rejected, preemption, shared beginnings,
    blocks that go to others at once, rows that move or wait."""
    engine = Engine(seed, RingShape(4, window, spare), rings=6, blocks=24)
    random, running, ended = engine.random, list[Request](), list[Request]()
    for _ in range(250):
        while len(running) < 6 and random.random() < 0.5:
            others = running + ended[-4:]
            shares = others and random.random() < 0.6
            like = others[random.integers(len(others))] if shares else None
            # Many end where a block does.
            length = int(random.choice([1, 5, 128, 129, 256, 257, random.integers(1, 400)]))
            running.append(engine.request(length + int(random.choice([40, 128, 200])), like))
        random.shuffle(running)  # type: ignore[arg-type]
        batch, reads = [], []
        for request in running[: random.integers(1, 7)]:
            if not request.blocks:
                engine.begin(request)
            left = len(request.tokens) - request.read
            new = spare if random.random() < 0.7 else int(random.choice([3, 60, 128, 300]))
            need = -(-(request.read + min(new, left)) // 128) - len(request.blocks)
            if left <= 0 or need > len(engine.free):
                continue
            engine.reserve(request, min(new, left))
            (batch if new == spare <= left else reads).append((request, min(new, left)))
        if batch + reads and random.random() < 0.03:
            engine.step(batch + reads, len(batch), stored=False)
        if batch + reads:
            engine.step(batch + reads, len(batch))
        for request, new in batch:
            request.read -= int(random.integers(0, new))  # rejected drafts
        for request in [*running]:
            if random.random() < 0.02:
                engine.end(request)  # preempted
            elif request.read >= len(request.tokens) or random.random() < 0.02:
                engine.end(request)
                running.remove(request)
                ended.append(request)
    assert engine.past > 3000 and engine.exact > 0.4 * engine.past


def test_a_block_that_begins_leads_to_no_ring() -> None:
    """One row fills a block in the very step in which another begins with it."""
    engine = Engine(0, RingShape(4, 32, 1), rings=4, blocks=8)
    ended, filling = engine.request(200), engine.request(200)
    engine.reserve(ended, 128)
    engine.step([(ended, 128)], 0)
    [block] = ended.blocks
    engine.end(ended)
    engine.free = [block, *(other for other in engine.free if other != block)]
    engine.reserve(filling, 128)
    sharing = Request([*filling.tokens[:128], 10**6])
    engine.begin(sharing)
    assert sharing.blocks == filling.blocks == [block] and sharing.read == 128
    engine.reserve(sharing, 1)
    engine.step([(sharing, 1), (filling, 128)], 1)


def test_the_ring_that_waited_longest_is_taken() -> None:
    engine = Engine(0, RingShape(4, 32, 1), rings=2, blocks=20)
    first, second, third = (engine.request(300) for _ in range(3))
    for request in (first, second, third):
        engine.reserve(request, 300)
    engine.step([(first, 100), (second, 100)], 0)
    engine.step([(second, 1)], 1)
    engine.step([(third, 100)], 0)
    for request, exact in ((second, 32), (third, 32), (first, 0)):
        engine.exact = 0
        engine.step([(request, 1)], 1)
        assert engine.exact == exact


@pytest.mark.parametrize(("keeps", "exact"), [(True, 32), (False, 0)])
def test_a_request_that_waits_a_step(keeps: bool, exact: int) -> None:
    """It loses its ring where a connector may have given its blocks to another."""
    engine = Engine(0, RingShape(4, 32, 1), rings=4, blocks=20, keeps=keeps)
    waiting, other = engine.request(300), engine.request(300)
    for request in (waiting, other):
        engine.reserve(request, 300)
    engine.step([(waiting, 100), (other, 100)], 0)
    engine.step([(other, 1)], 1)
    engine.exact = 0
    engine.step([(waiting, 1)], 1)
    assert engine.exact == exact


@pytest.mark.parametrize("arch", architectures())
def test_the_kernel_compiles(arch: str) -> None:
    pytest.importorskip("cuda.core", reason="needs cuda-core")
    text = (csrc_folder() / "block_tables/rings.cu").read_text() + (
        f"{same_struct(Params)}"
        f"static_assert(sizeof(Ring) == {4 * RING_FIELDS});\n"
        f"static_assert(MAX_ROWS == {module.MAX_ROWS} && THREADS == {module._THREADS});\n"
    )
    report = compile_once("block_tables/rings.cu", text, arch, {})["rings"]
    assert report.spill_stores == report.spill_loads == 0


def test_the_checked_steps_have_all_kinds_of_rows() -> None:
    new = continued = without = 0
    for given in checked_steps(torch.device("cpu")):
        before = given.rings.clone()
        rings_by_numpy(given)
        rings = given.tails[:, 0]
        without += int((rings < 0).sum())
        kept = before[rings.clamp(min=0).long(), 0] == given.rings[rings.clamp(min=0).long(), 0]
        continued += int((kept & (rings >= 0)).sum())
        new += int((~kept & (rings >= 0)).sum())
    assert min(new, continued, without) > 20


@pytest.mark.gpu
def test_the_kernel_writes_the_same() -> None:
    verdict = RingsKernel.checked.check(None, torch.device("cuda:0"))
    assert verdict.agrees, verdict
