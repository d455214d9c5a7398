"""Pages: the prefix cache holds what it says, nothing leaks, drafts are never cached, requests are mostly one run."""

from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from aspire_llm.cache.pages import PageAllocator
from aspire_llm.errors import UserError

TOKEN = st.sampled_from([0, 0, 0, 1])
TOKENS = st.builds(  # prefixes coincide often, and part in the middle of a page or at its end
    lambda start, tail: (start + tail) or [0],
    st.integers(0, 12).map(lambda length: [0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0][:length]),
    st.lists(TOKEN, max_size=4),
)
SALTS = st.sampled_from([None, None, None, "tenant"])

# What K/V at a position depend on, and so what stands there: the salt and every token up to it.
Content = tuple[str | None, tuple[int, ...]]


@dataclass
class Model:
    """A request as the test sees it."""

    tokens: list[int]
    salt: str | None
    pages: list[int]
    committed: int  # whole pages
    computed: int
    expected: int
    cacheable: bool = True
    parts: list[Content] = field(default_factory=list)  # of its committed pages


class Pages(RuleBasedStateMachine):
    keys = Bundle("keys")

    @initialize(
        num_pages=st.integers(1, 14), page_size=st.integers(1, 4), caching=st.sampled_from([True, True, True, False])
    )
    def start(self, num_pages: int, page_size: int, caching: bool) -> None:
        self.size = page_size
        self.allocator = PageAllocator(num_pages, page_size, prefix_caching=caching)
        self.live: dict[int, Model] = {}
        self.next_key = 0
        self.kv: dict[tuple[int, int], Content] = {}  # (page, offset) -> what was written last
        self.cached: dict[Content, int] = {}
        self.lru: list[Content] = []  # cached, referenced by nobody; the next to be evicted first
        self.queries = self.hits = 0
        self.uncounted: dict[int, tuple[int, int]] = {}  # opened, no reservation yet

    # helpers

    def part(self, salt: str | None, tokens: list[int], index: int) -> Content:
        return salt, tuple(tokens[: (index + 1) * self.size])

    def references(self, page: int) -> int:
        return sum(page in request.pages for request in self.live.values())

    def write(self, request: Model, position: int, tokens: list[int]) -> None:
        page = request.pages[position // self.size]
        assert self.references(page) == 1, "a write into a shared page"
        assert page not in self.cached.values(), "a write into a cached page"
        self.kv[page, position % self.size] = (request.salt, tuple(tokens[: position + 1]))

    def expected_match(self, tokens: list[int], salt: str | None, limit: int) -> int:
        count = 0
        while (count + 1) * self.size <= min(limit, len(tokens)) and self.part(salt, tokens, count) in self.cached:
            count += 1
        return count * self.size

    def is_found(self, content: Content) -> bool:
        salt, tokens = content
        return self.allocator.match_prefix(tokens, salt=salt, max_tokens=len(tokens)) == len(tokens)

    # rules

    @rule(target=keys, tokens=TOKENS, salt=SALTS, more=st.integers(0, 8), less=st.integers(0, 1))
    def open(self, tokens: list[int], salt: str | None, more: int, less: int) -> int:
        key, self.next_key = self.next_key, self.next_key + 1
        limit = len(tokens) - less
        found = self.allocator.match_prefix(tokens, salt=salt, max_tokens=limit)
        assert found == self.expected_match(tokens, salt, limit)
        if found + self.size <= len(tokens) and self.part(salt, tokens, found // self.size) not in self.cached:
            before = pickle.dumps(self.allocator)
            with pytest.raises(ValueError, match="not cached"):
                self.allocator.open(key, tokens, found + self.size, salt=salt)
            assert pickle.dumps(self.allocator) == before
        pages = self.allocator.open(key, tokens, found, salt=salt, expected_tokens=len(tokens) + more)
        for position in range(found):  # what is found is what plain decoding would have written there
            page = pages[position // self.size]
            assert self.kv[page, position % self.size] == (salt, tuple(tokens[: position + 1]))
        parts = [self.part(salt, tokens, index) for index in range(found // self.size)]
        self.lru = [part for part in self.lru if part not in parts]
        request = Model(list(tokens), salt, list(pages), len(pages), found, -(-(len(tokens) + more) // self.size))
        request.parts = parts
        request.cacheable = self.allocator.prefix_caching
        self.live[key] = request
        self.uncounted[key] = (len(tokens), found)
        return key

    @rule(target=keys, tokens=TOKENS, drafts=st.lists(TOKEN, max_size=6), data=st.data())
    def open_and_step(self, tokens: list[int], drafts: list[int], data: st.DataObject) -> int:
        key = self.open(tokens, None, 4, 1)
        self.step(key, drafts, data)
        return key

    @rule(tokens=TOKENS, drafts=st.lists(TOKEN, max_size=6), data=st.data())
    def whole_life(self, tokens: list[int], drafts: list[int], data: st.DataObject) -> None:
        key = self.open(tokens, None, 4, 1)
        self.step(key, drafts, data)
        self.release(key)

    @rule(key=keys, drafts=st.lists(TOKEN, max_size=6), data=st.data())
    def step(self, key: int, drafts: list[int], data: st.DataObject) -> None:
        """Reserve for the known tokens and some drafts, write all of them, then commit what was accepted."""
        request = self.live[key]
        target = len(request.tokens) + len(drafts)
        wanted = -(-target // self.size) - len(request.pages)
        free = self.allocator.num_free - len(self.lru)
        first = len(request.pages)
        before = pickle.dumps(self.allocator)
        reserved = self.allocator.reserve(key, target)
        if wanted > free + len(self.lru):
            assert reserved is None
            assert pickle.dumps(self.allocator) == before, "a refused reservation changed something"
            return
        assert reserved is not None
        assert reserved[0] == first
        assert len(reserved[1]) == max(0, wanted)
        query = self.uncounted.pop(key, None)
        if query and self.allocator.prefix_caching:
            self.queries, self.hits = self.queries + query[0], self.hits + query[1]

        kept = [part for part in self.lru if self.is_found(part)]
        evicted = len(self.lru) - len(kept)
        assert kept == self.lru[evicted:], "evicted out of order"
        shortage = max(0, wanted - free)
        goal = max(wanted, request.expected - first)
        assert shortage <= evicted <= (2 * goal - free if shortage else 0)  # free pages first, then at most this many
        for part in self.lru[:evicted]:
            del self.cached[part]
        self.lru = kept

        request.pages += reserved[1]
        text = request.tokens + drafts
        for position in range(request.computed, target):
            self.write(request, position, text)
        accepted = data.draw(st.integers(0, len(drafts)), label="accepted")
        request.tokens += drafts[:accepted]
        request.computed = len(request.tokens)
        full = request.computed // self.size
        uncommitted = self.allocator.first_uncommitted(key, request.computed)
        committed = request.committed * self.size
        assert uncommitted == (committed if request.cacheable and full > request.committed else None)
        # rejected drafts stand in `text`, above `computed`; tokens below `first` need not be given
        given = data.draw(st.sampled_from([0, uncommitted or 0]), label="first token given")
        self.allocator.commit(key, text[given:], request.computed, given)
        if request.cacheable:
            for index in range(request.committed, full):
                part = self.part(request.salt, request.tokens, index)
                request.parts.append(part)
                self.cached.setdefault(part, request.pages[index])
            request.committed = full
        # the bonus token: known, not computed
        request.tokens.append(data.draw(TOKEN, label="bonus"))

    @rule(key=keys, extra=st.integers(0, 9))
    def roll_back(self, key: int, extra: int) -> None:
        request = self.live[key]
        num_tokens = request.computed + extra
        keep = -(-num_tokens // self.size)
        assert list(self.allocator.roll_back(key, num_tokens)) == request.pages[keep:]
        del request.pages[keep:]
        if request.committed:
            before = pickle.dumps(self.allocator)
            with pytest.raises(ValueError, match="committed"):
                self.allocator.roll_back(key, request.committed * self.size - 1)
            assert pickle.dumps(self.allocator) == before

    @rule(key=consumes(keys))
    def release(self, key: int) -> None:
        self.allocator.release(key)
        self.drop(key)

    def drop(self, key: int) -> None:
        request = self.live.pop(key)
        self.uncounted.pop(key, None)
        if not request.cacheable:
            return
        for index in reversed(range(request.committed)):
            part = request.parts[index]
            holder = self.cached.setdefault(part, request.pages[index])
            if not self.references(holder):
                self.lru = [other for other in self.lru if other != part] + [part]

    @precondition(lambda self: len(self.cached) > 4)
    @rule()
    def reset(self) -> None:
        self.allocator.reset_prefix_cache()
        self.cached.clear()
        self.lru.clear()
        for request in self.live.values():
            request.cacheable = False

    @rule(tokens=TOKENS, salt=SALTS, limit=st.integers(-2, 14))
    def match(self, tokens: list[int], salt: str | None, limit: int) -> None:
        before = pickle.dumps(self.allocator)
        found = self.allocator.match_prefix(tokens, salt=salt, max_tokens=limit)
        assert found == self.expected_match(tokens, salt, limit)
        assert pickle.dumps(self.allocator) == before

    # what holds after every rule

    @invariant()
    def consistent(self) -> None:
        self.allocator.check()
        for key, request in self.live.items():
            assert list(self.allocator.pages(key)) == request.pages
            for page in request.pages[request.committed :]:
                assert self.references(page) == 1, "a writable page is shared"
            for position in range(min(request.computed, len(request.pages) * self.size)):
                written = self.kv[request.pages[position // self.size], position % self.size]
                assert written == (request.salt, tuple(request.tokens[: position + 1])), "exact K/V were overwritten"
        used = len({page for request in self.live.values() for page in request.pages})
        assert self.allocator.num_free == self.allocator.num_pages - used
        assert self.allocator.usage == pytest.approx(used / self.allocator.num_pages)
        assert (self.allocator.prefix_cache_queries, self.allocator.prefix_cache_hits) == (self.queries, self.hits)
        for part in self.lru:
            assert self.is_found(part), "a cached prefix is not found"
        for later, part in enumerate(self.lru):
            assert not any(_extends(other, part) for other in self.lru[later + 1 :]), (
                "a parent is evicted before its child"
            )

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        for key in list(self.live):
            self.allocator.release(key)
            self.drop(key)
        self.consistent()
        assert self.allocator.num_free == self.allocator.num_pages
        assert self.allocator.usage == 0.0
        self.allocator.open(-1, [0], 0)
        reserved = self.allocator.reserve(-1, self.allocator.num_pages * self.size)
        assert reserved is not None
        assert sorted(reserved[1]) == list(range(self.allocator.num_pages))
        self.allocator.check()


def _extends(longer: Content, shorter: Content) -> bool:
    return longer[0] == shorter[0] and len(longer[1]) > len(shorter[1]) and longer[1][: len(shorter[1])] == shorter[1]


Pages.TestCase.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPages = Pages.TestCase


def found(allocator: PageAllocator, tokens: list[int], salt: str | None = None) -> int:
    return allocator.match_prefix(tokens, salt=salt, max_tokens=len(tokens))


def run(allocator: PageAllocator, key: int, tokens: list[int]) -> tuple[int, ...]:
    """A request from open to commit with nothing cached; stays open."""
    allocator.open(key, tokens, 0)
    assert allocator.reserve(key, len(tokens)) is not None
    allocator.commit(key, tokens, len(tokens))
    return allocator.pages(key)


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    cycles=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=40),
)
def test_speculative_run_caches_the_hashes_of_a_plain_run(tokens: list[int], cycles: list[tuple[int, int]]) -> None:
    """vllm#18668: drafts, all of them wrong here but the accepted ones, must never be hashed."""
    plain, speculative = (PageAllocator(64, 4, prefix_caching=True) for _ in range(2))
    plain.open(0, tokens[:1], 0)
    for computed in range(1, len(tokens) + 1):
        plain.reserve(0, computed)
        plain.commit(0, tokens[:computed], computed)

    speculative.open(0, tokens[:1], 0)
    computed = 0
    for drafts, accepted in [*cycles, (0, len(tokens))]:
        right = min(accepted, len(tokens) - computed)
        wrong = [99] * drafts
        speculative.reserve(0, computed + right + drafts)
        speculative.commit(0, tokens[: computed + right] + wrong, computed + right)
        computed += right
        speculative.roll_back(0, computed)
    while computed < len(tokens):
        computed += 1
        speculative.reserve(0, computed)
        speculative.commit(0, tokens[:computed], computed)
    assert speculative._page_of.keys() == plain._page_of.keys()
    assert len(plain._page_of) == len(tokens) // 4
    speculative.check()


def test_hash_is_stable_across_processes() -> None:
    code = (
        "from aspire_llm.cache.pages import PageAllocator as P; p = P(4, 2, True); p.open(0, [1, 2, 3], 0, salt='s');"
        "p.reserve(0, 3); p.commit(0, [1, 2, 3], 3); print(*[h.hex() for h in p._page_of])"
    )
    seen = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(2)}
    assert len(seen) == 1
    assert len(seen.pop().strip()) == 64


def test_salt_separates() -> None:
    allocator = PageAllocator(8, 2, prefix_caching=True)
    allocator.open(0, [1, 2, 3, 4], 0, salt="a")
    allocator.reserve(0, 4)
    allocator.commit(0, [1, 2, 3, 4], 4)
    assert found(allocator, [1, 2, 3, 4], "a") == 4
    assert (
        found(allocator, [1, 2, 3, 4]) == found(allocator, [1, 2, 3, 4], "b") == found(allocator, [1, 2, 3, 4], "") == 0
    )


def test_sharing_a_live_prefix_and_counters() -> None:
    allocator = PageAllocator(8, 2, prefix_caching=True)
    pages = run(allocator, 0, [1, 2, 3, 4, 5])
    tokens = [1, 2, 3, 4]
    assert allocator.match_prefix(tokens, max_tokens=3) == 2  # the last token must be computed: its page is not taken
    assert allocator.open(1, tokens, 2) == pages[:1]
    assert (allocator.prefix_cache_queries, allocator.prefix_cache_hits) == (5, 0)  # not admitted yet
    allocator.reserve(1, 4)
    allocator.reserve(1, 5)
    assert (allocator.prefix_cache_queries, allocator.prefix_cache_hits) == (9, 2)
    allocator.commit(1, tokens, 4)  # [3, 4] is cached already: the own page stays unhashed
    assert allocator.pages(1)[1] != pages[1]
    allocator.release(0)
    allocator.check()
    assert found(allocator, [1, 2, 3, 4, 5]) == 4
    allocator.release(1)
    assert allocator.num_free == 8
    allocator.check()


def test_least_recently_used_chain_goes_first_and_its_deepest_page_before_the_rest() -> None:
    allocator = PageAllocator(6, 2, prefix_caching=True)
    old, new = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    for key, tokens in enumerate((old, new)):
        run(allocator, key, tokens)
        allocator.release(key)
    lengths = []
    allocator.open(9, [0], 0)
    for count in range(1, 7):
        assert allocator.reserve(9, 2 * count) is not None
        lengths.append((found(allocator, old), found(allocator, new)))
    assert lengths == [(4, 6), (2, 6), (0, 6), (0, 4), (0, 2), (0, 0)]
    assert allocator.reserve(9, 13) is None


def test_using_a_prefix_again_makes_it_recent() -> None:
    allocator = PageAllocator(4, 2, prefix_caching=True)
    for key, tokens in enumerate(([1, 2, 3, 4], [5, 6, 7, 8])):
        run(allocator, key, tokens)
        allocator.release(key)
    allocator.open(2, [1, 2, 3, 4], 4)
    allocator.release(2)
    run(allocator, 3, [9, 9])
    assert found(allocator, [5, 6, 7, 8]) == 2
    assert found(allocator, [1, 2, 3, 4]) == 4


def test_using_the_same_tokens_in_another_page_makes_the_cached_one_recent() -> None:
    allocator = PageAllocator(3, 1, prefix_caching=True)
    for key, tokens in enumerate(([1], [1], [5])):
        run(allocator, key, tokens)
    for key in (0, 2, 1):
        allocator.release(key)
    run(allocator, 3, [7, 8])  # one page is free (request 1's own), one more is needed
    assert (found(allocator, [1]), found(allocator, [5])) == (1, 0)


def test_a_hole_in_a_chain_is_closed_on_release() -> None:
    """Two requests compute the same prefix at once; the page that was cached is evicted while the other is in use."""
    allocator = PageAllocator(6, 1, prefix_caching=True)
    run(allocator, 0, [1, 2])
    run(allocator, 1, [1, 2])
    allocator.reserve(1, 3)
    allocator.commit(1, [1, 2, 3], 3)
    allocator.release(0)
    run(allocator, 2, [7, 8, 9])  # needs three pages, one is free: the cached pages of request 0 are evicted
    assert found(allocator, [1, 2, 3]) == 0
    allocator.release(1)
    assert found(allocator, [1, 2, 3]) == 3
    allocator.check()


def test_reset_forgets_what_is_and_what_live_requests_will_have_computed() -> None:
    allocator = PageAllocator(8, 2, prefix_caching=True)
    run(allocator, 0, [1, 2, 3, 4])
    run(allocator, 1, [5, 6])
    allocator.release(1)
    allocator.reset_prefix_cache()
    assert found(allocator, [1, 2, 3, 4]) == found(allocator, [5, 6]) == 0
    allocator.reserve(0, 6)
    allocator.commit(0, [1, 2, 3, 4, 5, 6], 6)
    assert allocator.first_uncommitted(0, 6) is None
    allocator.release(0)
    assert found(allocator, [1, 2, 3, 4]) == 0
    allocator.check()
    run(allocator, 2, [1, 2, 3, 4])
    assert found(allocator, [1, 2, 3, 4]) == 4


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    allocator = PageAllocator(4, 2, prefix_caching=False)
    run(allocator, 0, [1, 2, 3, 4])
    allocator.release(0)
    assert found(allocator, [1, 2, 3, 4]) == 0
    assert allocator.prefix_cache_queries == 0
    assert allocator._free.count == 4


def longest_runs(pages: tuple[int, ...]) -> int:
    """Into how many runs of consecutive pages the list falls."""
    return 1 + sum(b != a + 1 for a, b in pairwise(pages))


def test_requests_opened_one_after_another_and_grown_in_turn_are_one_run_each() -> None:
    lengths = [100, 10, 30, 10, 25, 10, 60, 15]  # pages each ends with
    allocator = PageAllocator(sum(lengths), 4, prefix_caching=False)
    for key, length in enumerate(lengths):
        allocator.open(key, [0] * 4, 0, expected_tokens=4 * length)
        allocator.reserve(key, 1)
    for tokens in range(1, 4 * max(lengths) + 1):
        for key, length in enumerate(lengths):
            assert allocator.reserve(key, min(tokens, 4 * length)) is not None
    assert [longest_runs(allocator.pages(key)) for key in range(len(lengths))] == [1] * len(lengths)
    assert allocator.usage == 1.0
    allocator.check()


def test_a_request_in_a_pool_full_of_cached_pages_is_one_run() -> None:
    allocator = PageAllocator(64, 2, prefix_caching=True)
    for key in range(4):
        run(allocator, key, [key] * 32)
        allocator.release(key)
    assert allocator._free.count == 0
    allocator.open(9, [9] * 20, 0, expected_tokens=30)
    for tokens in range(1, 31):
        allocator.reserve(9, tokens)
    assert longest_runs(allocator.pages(9)) == 1
    assert found(allocator, [1] * 32) == 32  # only the oldest chain has lost pages
    assert found(allocator, [0] * 32) == 2


def test_sequential_reserve_gives_the_next_pages() -> None:
    allocator = PageAllocator(10, 4, prefix_caching=True)
    allocator.open(0, [0] * 5, 0)
    assert allocator.reserve(0, 5) == (0, (0, 1))
    assert allocator.reserve(0, 8) == (2, ())
    assert allocator.reserve(0, 9) == (2, (2,))
    assert allocator.reserve(0, 3) == (3, ())
    assert allocator.roll_back(0, 5) == (2,)
    assert allocator.reserve(0, 16) == (2, (2, 3))


@pytest.mark.parametrize(
    ("num_pages", "page_size", "message"), [(0, 4, "num_pages.*got 0"), (-1, 4, "got -1"), (4, 0, "page_size.*got 0")]
)
def test_bad_sizes(num_pages: int, page_size: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        PageAllocator(num_pages, page_size, prefix_caching=True)


def test_programming_errors_are_refused_and_change_nothing() -> None:
    allocator = PageAllocator(4, 2, prefix_caching=True)
    run(allocator, 0, [1, 2, 3])
    before = pickle.dumps(allocator)
    for key_error in (
        lambda: allocator.pages(5),
        lambda: allocator.reserve(5, 1),
        lambda: allocator.commit(5, [], 0),
        lambda: allocator.first_uncommitted(5, 0),
        lambda: allocator.roll_back(5, 0),
        lambda: allocator.release(5),
    ):
        with pytest.raises(KeyError):
            key_error()
    for value_error in (
        lambda: allocator.open(0, [1], 0),
        lambda: allocator.open(1, [1, 2, 3], 1),
        lambda: allocator.open(1, [1], 2),
        lambda: allocator.open(1, [1], -2),
        lambda: allocator.open(1, [8, 8], 2),
        lambda: allocator.reserve(0, -1),
        lambda: allocator.commit(0, [1, 2, 3], 4),
        lambda: allocator.commit(0, [1, 2, 3, 4, 5], 5),
        lambda: allocator.commit(0, [2, 3], 3, 1),  # not from the first token of a page
        lambda: allocator.commit(0, [], 4, 4),  # the page before that is not cached yet
        lambda: allocator.roll_back(0, 1),
        lambda: allocator.roll_back(0, -1),
    ):
        with pytest.raises(ValueError):
            value_error()
    assert pickle.dumps(allocator) == before


def corrupt_twice(allocator: PageAllocator) -> None:
    allocator._tenants[0].pages[1] = allocator._tenants[0].pages[0]


def corrupt_references(allocator: PageAllocator) -> None:
    allocator._references[allocator.pages(0)[0]] += 1


def corrupt_leak(allocator: PageAllocator) -> None:
    allocator._free.take(allocator._free.runs()[0][0], 0, 1)


def corrupt_freed(allocator: PageAllocator) -> None:
    allocator._free.give([allocator.pages(0)[2]])


def corrupt_hash(allocator: PageAllocator) -> None:
    allocator._tenants[0].hashes[0] = bytes(32)


def corrupt_draft_cached(allocator: PageAllocator) -> None:
    allocator._cache(bytes(32), allocator.pages(0)[2])


def corrupt_shared_writable(allocator: PageAllocator) -> None:
    page = allocator.pages(0)[2]
    allocator._forget_end(allocator._tenants[1])
    allocator._tenants[1].pages.append(page)
    allocator._references[page] += 1


def corrupt_not_inverse(allocator: PageAllocator) -> None:
    del allocator._hash_of[allocator.pages(0)[0]]


def corrupt_evictable(allocator: PageAllocator) -> None:
    page = allocator._free.runs()[0][0]
    allocator._free.take(page, 0, 1)
    allocator._evictable[page] = None


def corrupt_end(allocator: PageAllocator) -> None:
    allocator._tenant_ending_at[allocator.pages(0)[0]] = allocator._tenants[0]


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (corrupt_twice, "twice"),
        (corrupt_references, "reference counts"),
        (corrupt_leak, "exactly one"),
        (corrupt_freed, "exactly one"),
        (corrupt_hash, "another hash"),
        (corrupt_draft_cached, "not committed"),
        (corrupt_shared_writable, "writable, but shared"),
        (corrupt_not_inverse, "inverse"),
        (corrupt_evictable, "evictable pages differ"),
        (corrupt_end, "not the last"),
    ],
)
def test_check_finds(corrupt, message: str) -> None:  # type: ignore[no-untyped-def]
    allocator = PageAllocator(16, 2, prefix_caching=True)
    allocator.open(0, [1, 2, 3, 4, 5], 0)
    allocator.reserve(0, 5)
    allocator.commit(0, [1, 2, 3, 4, 5], 5)
    allocator.open(1, [6], 0)
    allocator.reserve(1, 1)
    allocator.check()
    corrupt(allocator)
    with pytest.raises(AssertionError, match=message):
        allocator.check()
