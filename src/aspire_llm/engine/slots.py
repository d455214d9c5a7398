"""Permanent rows on the device, one for each running request: what a step needs to know without asking the host."""

from __future__ import annotations

import torch


class SlotState:
    """S slots, and one more that padding rows point at.

    computed: int64 [S + 1], exact positions; pending: int64 [S + 1], drafts after the newest token; tokens: int64
    [S + 1, max_model_len + spare], every known token by position, drafts behind the newest one, and a last column for
    writes that go nowhere; page_table: int32 [S + 1, max pages].
    """

    def __init__(
        self, num_slots: int, max_model_len: int, max_drafts: int, page_size: int, device: torch.device
    ) -> None:
        rows = num_slots + 1
        self.num_slots = num_slots
        self.on_kernels = device.type == "cuda"  # whether Triton kernels do the arithmetic (see slot_ops)
        self.computed = torch.zeros(rows, dtype=torch.int64, device=device)
        self.pending = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros(rows, max_model_len + max_drafts + 2, dtype=torch.int64, device=device)
        self.page_table = torch.zeros(
            rows, -(-(max_model_len + max_drafts + 1) // page_size), dtype=torch.int32, device=device
        )

    @property
    def nowhere(self) -> int:
        """The column of `tokens` that nobody reads."""
        return self.tokens.shape[1] - 1
