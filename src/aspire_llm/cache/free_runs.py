"""The free pages, kept as maximal runs of consecutive pages, so that neighbours are found without a scan."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


class FreeRuns:
    """A set of page numbers that knows its runs. Run [start, end): every page in it is free, start - 1 and end are not.

    Amortised cost: `take` O(log runs), `give` and `largest` O(log runs) for each run given back or returned.
    """

    def __init__(self, num_pages: int) -> None:
        self.count = num_pages
        self._end_of = {0: num_pages}  # start -> end
        self._start_of = {num_pages: 0}  # end -> start
        # A heap of (-length, start). Entries of runs that have changed since stay until they surface or outnumber the rest.
        self._by_length = [(-num_pages, 0)]

    def starts_at(self, page: int) -> bool:
        """Whether a run starts at `page`. A free page whose predecessor is taken always starts one."""
        return page in self._end_of

    def take(self, start: int, offset: int, limit: int) -> int:
        """Take pages from `start + offset` on, out of the run at `start`: at most `limit`, and no further than its end.

        Returns how many were taken (at least 1).
        """
        end = self._end_of.get(start)
        if end is None or limit < 1 or not 0 <= offset < end - start:
            raise ValueError(f"no free run at page {start} that {limit} pages from offset {offset} can be taken of")
        first = start + offset
        stop = min(first + limit, end)
        del self._end_of[start], self._start_of[end]
        self._add(start, first)
        self._add(stop, end)
        self.count -= stop - first
        return stop - first

    def give(self, pages: Iterable[int]) -> None:
        """Put back pages that are not free, in any order."""
        run: list[int] = []
        for page in sorted(pages):
            if run and page != run[1]:
                self._give_run(*run)
                run = []
            run = [run[0] if run else page, page + 1]
        if run:
            self._give_run(*run)

    def largest(self, limit: int) -> list[tuple[int, int]]:
        """The `limit` longest runs as (start, length), longest first; equal ones lowest first."""
        found: list[tuple[int, int]] = []
        while self._by_length and len(found) < limit:
            entry = heapq.heappop(self._by_length)
            if self._is_current(entry) and (not found or entry != found[-1]):  # a run that came back may be in twice
                found.append(entry)
        for entry in found:
            heapq.heappush(self._by_length, entry)
        return [(start, -negative) for negative, start in found]

    def runs(self) -> list[tuple[int, int]]:
        """All runs as (start, end), ascending. O(runs log runs): for checks."""
        return sorted(self._end_of.items())

    def check(self) -> None:
        """Raise AssertionError where the tables disagree."""
        runs = self.runs()
        if {end: start for start, end in runs} != self._start_of:
            raise AssertionError("free runs: the tables by start and by end disagree")
        if any(start >= end for start, end in runs):
            raise AssertionError(f"free runs: an empty run in {runs}")
        if any(runs[i][1] >= runs[i + 1][0] for i in range(len(runs) - 1)):
            raise AssertionError(f"free runs: two overlap or were not merged in {runs}")
        if sum(end - start for start, end in runs) != self.count:
            raise AssertionError(f"free runs: count is {self.count}, the runs hold another number of pages: {runs}")
        if {(start - end, start) for start, end in runs} - set(self._by_length):
            raise AssertionError("free runs: a run is missing from the order by length")

    def _is_current(self, entry: tuple[int, int]) -> bool:
        negative, start = entry
        return self._end_of.get(start) == start - negative

    def _give_run(self, start: int, end: int) -> None:
        self.count += end - start
        before = self._start_of.pop(start, None)
        if before is not None:
            del self._end_of[before]
            start = before
        after = self._end_of.pop(end, None)
        if after is not None:
            del self._start_of[after]
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if start == end:
            return
        self._end_of[start] = end
        self._start_of[end] = start
        heapq.heappush(self._by_length, (start - end, start))
        if len(self._by_length) > 2 * len(self._end_of) + 64:
            self._by_length = [(first - stop, first) for first, stop in self._end_of.items()]
            heapq.heapify(self._by_length)
