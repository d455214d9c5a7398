"""A progress bar on stderr, and results on stdout."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

WIDTH = 100  # of what is written into files and pipes


class ProgressBars:
    """One bar for each stage of the work, one below the other. Where stderr is no terminal, a line for each stage.

    unit: what is counted.
    """

    def __init__(self, unit: str = "tokens") -> None:
        self._errors = Console(stderr=True)
        self._output = Console(width=None if sys.stdout.isatty() else WIDTH)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn(unit),
            TimeElapsedColumn(),
            console=self._errors,
            disable=not self._errors.is_terminal,
        )
        self._stage: str | None = None
        self._task = self._progress.add_task("", start=False, visible=False)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def show(self, stage: str, done: int, most: int) -> None:
        """`stage` has done `done` of at most `most` (0: not counted)."""
        if stage != self._stage:
            self.stop_stage()
            self._stage = stage
            self._task = self._progress.add_task(stage, total=most or None)
            if not self._errors.is_terminal:
                self._errors.print(stage, highlight=False)
        self._progress.update(self._task, completed=done, total=most or None)

    def stop_stage(self) -> None:
        """The present stage is over: its bar is full, or gone if it counted nothing."""
        if self._stage is None:
            return
        task = next(task for task in self._progress.tasks if task.id == self._task)
        if task.total is None:
            self._progress.remove_task(self._task)
        else:
            self._progress.update(self._task, total=task.completed)
        self._stage = None

    def stop(self) -> None:
        self.stop_stage()
        self._progress.stop()

    def print(self, *results: RenderableType) -> None:
        for result in results:
            self._output.print(result, highlight=False)
