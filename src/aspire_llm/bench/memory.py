"""Peak memory of a stretch of work."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

CLEAR_REFS = Path("/proc/self/clear_refs")  # Linux: writing 5 sets the peak back to the present size
STATUS = Path("/proc/self/status")


class PeakMemory:
    """Most bytes in use since the last `reset`.

    CPU: resident memory of this process, everything it holds included (weights, KV cache, the interpreter). On Linux the
    kernel keeps the peak; elsewhere it is the largest value seen by `sample`, to be called after every step.
    GPU: bytes that torch has allocated there.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._process = psutil.Process()
        self._kernel_keeps_it = False
        self._sampled = 0

    @property
    def what(self) -> str:
        return "memory allocated on the GPU" if self._device.type == "cuda" else "resident memory of the whole process"

    def reset(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            CLEAR_REFS.write_text("5")
            self._kernel_keeps_it = True
        except OSError:
            self._kernel_keeps_it = False
        self._sampled = 0
        self.sample()

    def sample(self) -> None:
        if self._device.type != "cuda" and not self._kernel_keeps_it:
            self._sampled = max(self._sampled, self._process.memory_info().rss)

    def peak_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device))
        if self._kernel_keeps_it:
            for line in STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        self.sample()
        return self._sampled
