"""The sweep over how finely drafts' sets are cut, with the smallest sizes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPTS = str(Path(__file__).parent.parent / "benchmarks")
sys.path.append(SCRIPTS)  # only while it is imported
from splits import Split, lines, main  # noqa: E402

sys.path.remove(SCRIPTS)


@pytest.mark.kernel
def test_a_tiny_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "splits.json"
    main(
        "--shape tiny --rows 2 --sets 64 --length 128 --page 16 --layers 1 --programs 2,16 --min-blocks 1,6 --repeats 1"
        f" --out {out}".split()
    )
    found = json.loads(out.read_text())
    assert [(split["programs"], split["min_blocks"]) for split in found] == [(2, 1), (2, 6), (16, 1), (16, 6)]
    assert [split["pieces"] for split in found] == [2, 2, 4, 2]  # two rows of 6 blocks: whole, or in halves
    assert all(split["bytes"] == 2 * (64 + 32) * 2 * 2 * 16 * 4 for split in found)  # set and tail, K and V
    assert len(capsys.readouterr().out.splitlines()) == 5


def test_the_fastest_of_each_batch_is_marked() -> None:
    def split(rows: int, programs: int, seconds: float) -> Split:
        return Split(rows, 512, programs, 2, 4, seconds / 2, seconds, 10**6)

    table = lines([split(6, 264, 2e-5), split(6, 528, 1e-5), split(32, 264, 4e-5), split(32, 528, 5e-5)])
    assert [line.endswith("*") for line in table] == [False, False, True, True, False]
    assert "20.0" in table[1]
    assert "0.10" in table[2]  # TB/s
