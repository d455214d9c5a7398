"""Which request owns which page of the KV cache, and which pages hold a prefix that another request can share.

Numbers only: the K/V tensors live in the pool. A page holds `page_size` consecutive positions of one token sequence.

Every page is in exactly one state:

    free ──reserve──▶ referenced (by 1 request) ──commit──▶ referenced, cached (by 1 or more, through open)
     ▲                    │ roll_back, release                   │ release by the last one
     ├────────────────────┘                                      ▼
     └──────────── eviction, reset_prefix_cache ◀─────────── cached, unreferenced ──open──▶ referenced, cached

A request's page list, and who may do what to which part of it (page size 4, 30 positions reserved, 18 of them computed):

    index in the list     0        1        2        3        4        5        6        7
    page                [ 17 ]   [ 18 ]   [ 40 ]   [ 41 ]   [ 42 ]   [ 43 ]   [ 44 ]   [ 45 ]
    positions            0-3      4-7      8-11    12-15    16-19    20-23    24-27    28-31
                        ├─ shared since open ─┤├─ committed ─┤├─ the request's own, and only its own ──┤
    may be shared        yes      yes      yes     yes      no       no       no       no
    hashed               yes      yes      yes*    yes*     no       no       no       no
    may be written       no       no       no      no       yes      yes      yes      yes
                                                        computed = 18 ┘└ newest token, drafts, room ──┤
                                                                    roll_back(18) gives back ├─────────┤
    (* unless another page already holds the same tokens: then this one stays unhashed and unshared)

Only full pages below `computed` are hashed. A draft stands at or above it, so no draft can reach the prefix cache.

Where new pages come from, in this order, so that a request's pages are mostly one run:
1. the page right after the request's last one, if it is free;
2. one of the largest free gaps: the one with the most room that the request before it is not expected to grow into, and
   beyond that room. Where all is spoken for, the gap is divided in proportion to what the two still expect;
3. cached unreferenced pages, least recently used first, the deepest of a chain first: only when the free ones do not
   suffice, but then as many as the request expects to need, so that they come as a run and not one by one, and up to as
   many again if no gap is that long yet.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from aspire_llm.cache.free_runs import FreeRuns
from aspire_llm.errors import UserError

_GAPS_TRIED = 8  # gaps compared when a request starts a new run
_EVICTED_AT_ONCE = 16  # pages evicted between two looks at the longest gap


@dataclass(slots=True)
class _Tenant:
    """What the allocator knows of a live request."""

    pages: list[int]
    hashes: list[bytes]  # of its committed pages: hashes[i] names pages[i] and everything before it
    root: bytes  # parent hash of the first page
    expected: int  # pages it is expected to reach; only placement depends on it
    query: tuple[int, int] | None  # (tokens looked up, tokens found), until counted
    cacheable: bool  # False once the prefix cache was reset under it


class PageAllocator:
    """Page lists of live requests and the prefix cache. Pages are the integers 0 … num_pages - 1; lengths are in tokens.

    Requests are named by their integer `key`. An unknown key raises KeyError. `release` is immediate: the caller holds it
    back until no step in flight names the request's pages.
    """

    def __init__(self, num_pages: int, page_size: int, prefix_caching: bool) -> None:
        if num_pages < 1:
            raise UserError(f"num_pages must be at least 1, got {num_pages}", "num_pages")
        if page_size < 1:
            raise UserError(f"page_size must be at least 1, got {page_size}", "page_size")
        self.num_pages = num_pages
        self.page_size = page_size
        self.prefix_caching = prefix_caching
        self.prefix_cache_queries = 0  # tokens looked up, each request once
        self.prefix_cache_hits = 0  # tokens of these found
        self._free = FreeRuns(num_pages)
        self._references = [0] * num_pages
        self._tenants: dict[int, _Tenant] = {}
        self._tenant_ending_at: dict[int, _Tenant] = {}  # last page -> one of the tenants whose list ends there
        self._page_of: dict[bytes, int] = {}  # the prefix cache
        self._hash_of: dict[int, bytes] = {}  # its inverse
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, next to be evicted first

    @property
    def num_free(self) -> int:
        """Pages that `reserve` can hand out: free ones and cached ones that no request references."""
        return self._free.count + len(self._evictable)

    @property
    def usage(self) -> float:
        """Share of the pages that live requests reference, 0 to 1."""
        return 1.0 - self.num_free / self.num_pages

    def pages(self, key: int) -> tuple[int, ...]:
        """The request's pages: entry i holds positions [i · page_size, (i + 1) · page_size)."""
        return tuple(self._tenants[key].pages)

    def match_prefix(self, token_ids: Sequence[int], *, salt: str | None = None, max_tokens: int) -> int:
        """Length of the longest cached prefix of `token_ids`: whole pages, at most `max_tokens`. Changes nothing.

        Requests share pages only with requests of the same salt.
        """
        return len(self._cached_chain(token_ids, _root_hash(salt), max_tokens)) * self.page_size

    def open(
        self,
        key: int,
        token_ids: Sequence[int],
        cached_tokens: int,
        *,
        salt: str | None = None,
        expected_tokens: int = 0,
    ) -> tuple[int, ...]:
        """Start a request's page list with the pages of a cached prefix, and return these.

        cached_tokens: what `match_prefix` said, or fewer whole pages. expected_tokens: the length that the request will
        probably reach (at least that of `token_ids` is assumed); a wrong guess costs adjacency or cached pages, no more.
        Raises ValueError, with nothing changed, if the key is open or that much of the prefix is not cached (any more).
        """
        if key in self._tenants:
            raise ValueError(f"request {key} is already open")
        if cached_tokens % self.page_size or not 0 <= cached_tokens <= len(token_ids):
            raise ValueError(
                f"cached_tokens must be whole pages of {self.page_size} within the tokens, got {cached_tokens}"
            )
        root = _root_hash(salt)
        chain = self._cached_chain(token_ids, root, cached_tokens)
        if len(chain) * self.page_size != cached_tokens:
            raise ValueError(f"request {key}: {cached_tokens} tokens are not cached, {len(chain) * self.page_size} are")
        pages = [self._page_of[block] for block in chain]
        for page in pages:
            self._references[page] += 1
            self._evictable.pop(page, None)
        tenant = _Tenant(
            pages=pages,
            hashes=chain,
            root=root,
            expected=self._pages_for(max(expected_tokens, len(token_ids))),
            query=(len(token_ids), cached_tokens) if self.prefix_caching else None,
            cacheable=self.prefix_caching,
        )
        self._tenants[key] = tenant
        self._note_end(tenant)
        return tuple(pages)

    def reserve(self, key: int, num_tokens: int) -> tuple[int, tuple[int, ...]] | None:
        """Make the request own pages for positions [0, num_tokens). Pages that it already has stay.

        Returns (index in its list of the first new page, the new pages), or None, with nothing changed, if there are not
        enough. The look-up in the prefix cache is counted at a request's first success, so that an admission tried
        again at every step counts once.
        """
        tenant = self._tenants[key]
        first = len(tenant.pages)
        wanted = self._pages_for(num_tokens) - first
        shortage = wanted - self._free.count
        if shortage > len(self._evictable):
            return None
        if tenant.query is not None:
            self.prefix_cache_queries += tenant.query[0]
            self.prefix_cache_hits += tenant.query[1]
            tenant.query = None
        if wanted <= 0:
            return first, ()
        if shortage > 0:
            self._make_room(tenant, wanted)
        self._forget_end(tenant)
        self._extend(tenant, wanted)
        self._note_end(tenant)
        return first, tuple(tenant.pages[first:])

    def first_uncommitted(self, key: int, num_computed: int) -> int | None:
        """From which position on `commit` needs tokens to cache what lies below `num_computed`; None: it would cache nothing."""
        tenant = self._tenants[key]
        if tenant.cacheable and num_computed // self.page_size > len(tenant.hashes):
            return len(tenant.hashes) * self.page_size
        return None

    def commit(self, key: int, token_ids: Sequence[int], num_computed: int, first: int = 0) -> None:
        """Positions below `num_computed` hold exact K/V of the request's tokens: cache the full pages below it.

        token_ids: its tokens from position `first` on; those of pages that are cached already and those at or above
        `num_computed` are not looked at.
        """
        tenant = self._tenants[key]
        known = first + len(token_ids)
        if num_computed > known or self._pages_for(num_computed) > len(tenant.pages):
            raise ValueError(
                f"request {key}: {num_computed} computed positions, but {known} tokens and "
                f"{len(tenant.pages)} pages of {self.page_size}"
            )
        if not tenant.cacheable:
            return
        done = len(tenant.hashes)
        if first % self.page_size or first > done * self.page_size:
            raise ValueError(
                f"request {key}: tokens from {first} on, but only {done} pages of {self.page_size} are cached"
            )
        for index in range(done, num_computed // self.page_size):
            parent = tenant.hashes[-1] if tenant.hashes else tenant.root
            block = self._block_hash(parent, token_ids, index - first // self.page_size)
            tenant.hashes.append(block)
            if block not in self._page_of:  # else another page holds the same already, and this one stays unhashed
                self._cache(block, tenant.pages[index])

    def roll_back(self, key: int, num_tokens: int) -> tuple[int, ...]:
        """Give back the pages that hold no position below `num_tokens`, and return them.

        Raises ValueError if that would cut into committed pages: these may be shared.
        """
        tenant = self._tenants[key]
        keep = self._pages_for(num_tokens)
        if num_tokens < len(tenant.hashes) * self.page_size:
            raise ValueError(
                f"request {key}: cannot roll back to {num_tokens}, {len(tenant.hashes) * self.page_size} are committed"
            )
        dropped = tuple(tenant.pages[keep:])
        if dropped:
            self._forget_end(tenant)
            del tenant.pages[keep:]
            for page in dropped:
                self._references[page] = 0
            self._free.give(dropped)
            self._note_end(tenant)
        return dropped

    def release(self, key: int) -> None:
        """The request leaves. Its cached pages stay findable until they are evicted, the others are free at once."""
        tenant = self._tenants.pop(key)
        self._forget_end(tenant)
        freed: list[int] = []
        for index in reversed(range(len(tenant.pages))):  # the deepest first, so that it is evicted first
            page = tenant.pages[index]
            self._references[page] -= 1
            if tenant.cacheable and index < len(tenant.hashes):
                block = tenant.hashes[index]
                # The page that held the same tokens may have been evicted since: this one takes its place, or the chain
                # would have a hole. If it is another request's and unreferenced, it was used now and moves to the end.
                if block not in self._page_of:
                    self._cache(block, page)
                holder = self._page_of[block]
                if not self._references[holder]:
                    self._evictable[holder] = None
                    self._evictable.move_to_end(holder)
            if not self._references[page] and page not in self._hash_of:
                freed.append(page)
        self._free.give(freed)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Live requests keep their pages, but what they have computed is never cached again."""
        self._evict(len(self._evictable))
        self._page_of.clear()
        self._hash_of.clear()
        for tenant in self._tenants.values():
            tenant.cacheable = False

    def check(self) -> None:
        """Raise AssertionError unless every table agrees with every other. O(num_pages): for tests and at idle."""
        self._free.check()
        references = [0] * self.num_pages
        for key, tenant in self._tenants.items():
            _require(len(set(tenant.pages)) == len(tenant.pages), f"request {key} has a page twice: {tenant.pages}")
            _require(len(tenant.hashes) <= len(tenant.pages), f"request {key} has more committed pages than pages")
            for page in tenant.pages:
                references[page] += 1
        _require(references == self._references, "reference counts differ from the page lists")

        free = [page for start, end in self._free.runs() for page in range(start, end)]
        held = [page for page in range(self.num_pages) if references[page]]
        states = sorted([*free, *self._evictable, *held])
        _require(states == list(range(self.num_pages)), "a page is not exactly one of free, evictable and referenced")

        inverse = {page: block for block, page in self._page_of.items()}
        _require(inverse == self._hash_of, "the two tables of the prefix cache are not inverse")
        unreferenced = {page for page in self._hash_of if not references[page]}
        _require(unreferenced == self._evictable.keys(), "evictable pages differ from cached unreferenced ones")

        for key, tenant in self._tenants.items():
            for index, page in enumerate(tenant.pages):
                if index < len(tenant.hashes) and tenant.cacheable:
                    same = self._hash_of.get(page, tenant.hashes[index]) == tenant.hashes[index]
                    _require(same, f"request {key}: page {page} is cached under another hash")
                else:
                    _require(page not in self._hash_of, f"request {key}: page {page} is cached, but not committed")
                if index >= len(tenant.hashes):
                    _require(references[page] == 1, f"request {key}: page {page} is writable, but shared")
        for page, tenant in self._tenant_ending_at.items():
            live = any(tenant is other for other in self._tenants.values())
            _require(live and tenant.pages[-1:] == [page], f"page {page} is not the last of the request noted there")

    def _pages_for(self, num_tokens: int) -> int:
        if num_tokens < 0:
            raise ValueError(f"a number of tokens cannot be negative, got {num_tokens}")
        return -(-num_tokens // self.page_size)

    def _block_hash(self, parent: bytes, token_ids: Sequence[int], index: int) -> bytes:
        """Hash of the tokens' page `index` and, through `parent`, of everything before it."""
        tokens = token_ids[index * self.page_size : (index + 1) * self.page_size]
        return blake2b(parent + struct.pack(f"<{self.page_size}q", *tokens), digest_size=32).digest()

    def _cached_chain(self, token_ids: Sequence[int], root: bytes, max_tokens: int) -> list[bytes]:
        chain: list[bytes] = []
        if not self._page_of:
            return chain
        for index in range(min(max_tokens, len(token_ids)) // self.page_size):
            block = self._block_hash(chain[-1] if chain else root, token_ids, index)
            if block not in self._page_of:
                break
            chain.append(block)
        return chain

    def _cache(self, block: bytes, page: int) -> None:
        self._page_of[block] = page
        self._hash_of[page] = block

    def _evict(self, count: int) -> None:
        """Free the `count` next evictable pages, or all if there are fewer."""
        pages = [self._evictable.popitem(last=False)[0] for _ in range(min(count, len(self._evictable)))]
        for page in pages:
            del self._page_of[self._hash_of.pop(page)]
        self._free.give(pages)

    def _make_room(self, tenant: _Tenant, wanted: int) -> None:
        """Evict until `wanted` pages are free, and some more for the sake of adjacency.

        Exactly what is wanted would be the tail of one old chain and the head of the next, and every generation of
        requests would fall into more pieces than the one before it.
        """
        goal = max(wanted, tenant.expected - len(tenant.pages))
        self._evict(goal - self._free.count)
        if tenant.pages and self._free.starts_at(tenant.pages[-1] + 1):
            return
        for done in range(0, goal, _EVICTED_AT_ONCE):
            if not self._evictable or self._free.largest(1)[0][1] >= goal:
                break
            self._evict(min(_EVICTED_AT_ONCE, goal - done))

    def _extend(self, tenant: _Tenant, count: int) -> None:
        """Append `count` free pages; that many are there."""
        while count:
            start, offset = tenant.pages[-1] + 1 if tenant.pages else 0, 0
            if not tenant.pages or not self._free.starts_at(start):
                start, offset = self._choose_gap(max(tenant.expected - len(tenant.pages), count))
            taken = self._free.take(start, offset, count)
            new = range(start + offset, start + offset + taken)
            for page in new:
                self._references[page] = 1
            tenant.pages.extend(new)
            count -= taken

    def _choose_gap(self, wanted: int) -> tuple[int, int]:
        """Where a new run of up to `wanted` pages starts: (start of the gap, offset in it)."""

        def claimed(start: int) -> int:  # pages that the request right before the gap still expects to need
            neighbour = self._tenant_ending_at.get(start - 1)
            return max(0, neighbour.expected - len(neighbour.pages)) if neighbour else 0

        gaps = [(length - claimed(start), length, start) for start, length in self._free.largest(_GAPS_TRIED)]
        room, length, start = max(gaps, key=lambda gap: gap[0])
        claim = length - room
        return start, claim if wanted <= room else length * claim // (claim + wanted)

    def _note_end(self, tenant: _Tenant) -> None:
        if tenant.pages:
            self._tenant_ending_at[tenant.pages[-1]] = tenant

    def _forget_end(self, tenant: _Tenant) -> None:
        if tenant.pages and self._tenant_ending_at.get(tenant.pages[-1]) is tenant:
            del self._tenant_ending_at[tenant.pages[-1]]


def _root_hash(salt: str | None) -> bytes:
    """Parent of a sequence's first page. No salt and an empty one differ."""
    return blake2b(b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _require(holds: bool, message: str) -> None:
    if not holds:  # not an assert statement: it must hold under python -O too
        raise AssertionError(f"page allocator: {message}")
