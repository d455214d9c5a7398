"""Triton's interpreter as exact as the device, for tests of bits.

Its products go through a BLAS, which rounds by where in a tile an element stands (the tensor cores do not), and multiplies
bfloat16 as integers; its conversions cut off instead of rounding, or drop a carry. Here products are summed in float64 and
rounded once, and torch converts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

TORCH = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
    "fp64": torch.float64,
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_torch(data: Any, dtype: Any) -> torch.Tensor:
    """The interpreter's array as the tensor that it stands for: small floats lie there as integers."""
    kind = TORCH[str(dtype.scalar)]
    raw = np.frombuffer(data.tobytes(), dtype=f"i{kind.itemsize}" if kind.itemsize > 1 else "u1").copy()
    return torch.from_numpy(raw).view(kind).reshape(data.shape)


def convert_float(data: Any, source: Any, target: Any, rounding_mode: object) -> Any:
    converted = as_torch(data, source).to(TORCH[str(target.scalar)])
    bits = converted.contiguous().view(BITS[converted.dtype.itemsize]).numpy()
    return bits.view(f"u{bits.itemsize}")


@pytest.fixture
def exact_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Does nothing on a GPU."""
    if torch.cuda.is_available():
        return
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: object, max_num_imprecise_acc: object) -> Any:
        product = as_torch(a.data, a.dtype).double() @ as_torch(b.data, b.dtype).double()
        total = (product + torch.from_numpy(d.data.astype(np.float64))).numpy().astype(d.data.dtype)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
