"""Workloads: formats of rows, selection by length, text, needles, random tokens, and what is left out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aspire_llm.bench.datasets import Dataset
from aspire_llm.bench.presets import demo_dataset
from aspire_llm.bench.workloads.formats import FORMATS, read_rows
from aspire_llm.bench.workloads.longbench import TEMPLATES, longbench_prompt
from aspire_llm.bench.workloads.named import open_dataset
from aspire_llm.bench.workloads.needles import Needle, NeedleDataset, haystack_sentences, make_needles, needle_row
from aspire_llm.bench.workloads.random_tokens import RandomDataset
from aspire_llm.bench.workloads.rows import Row, RowDataset
from aspire_llm.bench.workloads.text import TextDataset
from aspire_llm.cli.numbers import length_range
from aspire_llm.engine.inputs import InputProcessor
from aspire_llm.errors import UserError
from aspire_llm.models.load import load_tokenizer
from saved_model import save_tiny_model

TEXT = "".join(f"{i} is a number and {i * i} its square.\n" for i in range(200))
SHARED = Path(__file__).parents[2] / "shared" / "data"  # samples that may not be shipped; not everywhere


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    loaded = load_tokenizer(str(save_tiny_model(tmp_path_factory.mktemp("model"))))
    return InputProcessor(loaded.tokenizer, loaded.config.vocab_size, loaded.eos_token_ids, 0)


def written(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def text_of(inputs: InputProcessor, token_ids: list[int]) -> str:
    assert inputs.tokenizer is not None
    return str(inputs.tokenizer.decode(token_ids))


def only(dataset: Dataset, inputs: InputProcessor) -> tuple[str, tuple[str, ...]]:
    (sample,) = dataset.select(inputs, 1, 100_000, 0).samples
    return text_of(inputs, sample.token_ids), sample.answers


USER = {"role": "user", "content": "Hi"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}
LONGBENCH = {"input": "Who?", "context": "Ann came.", "answers": ["Ann", "She"], "dataset": "hotpotqa", "length": 2}
ASKED = longbench_prompt("hotpotqa", "Ann came.", "Who?")
V2 = {
    "context": "Ann came.",
    "question": "Who?",
    "choice_A": "Ann",
    "choice_B": "Bo",
    "choice_C": "Cy",
    "choice_D": "Di",
}


@pytest.mark.parametrize(
    ("row", "named", "expected", "answers"),
    [
        ({"prompt": "Hi"}, "openai", "Hi", ()),
        ({"messages": [USER]}, "openai", "<user> Hi\n<assistant>", ()),
        ({"messages": [PARTS]}, "openai", "<user> Hi\n<assistant>", ()),
        ({"custom_id": "1", "url": "/v1", "body": {"messages": [USER]}}, "openai", "<user> Hi\n<assistant>", ()),
        ({"custom_id": "1", "body": {"model": "m", "prompt": "Hi"}}, "openai", "Hi", ()),
        (
            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]},
            "sharegpt",
            "<user> Hi\n<assistant>",
            ("Yes",),
        ),
        (
            {"conversations": [{"from": "gpt", "value": "?"}, {"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"},
                               {"from": "human", "value": "Go"}]},
            "sharegpt",
            "<user> Hi\n<assistant> Yes\n<user> Go\n<assistant>",
            (),
        ),
        ({"prompt": "1+1", "answer": 2}, "aime", "<user> 1+1\n<assistant>", ("2",)),
        ({"prompt": "Sort.", "question_id": "x", "tests": {}}, "livecodebench", "<user> Sort.\n<assistant>", ()),
        ({"input": "Find it.", "outputs": ["a", "b"]}, "ruler", "Find it.", ("a", "b")),
        ({**LONGBENCH, "dataset": "trec"}, "longbench", longbench_prompt("trec", "Ann came.", "Who?"), ("Ann", "She")),
        (LONGBENCH, "longbench", f"<user> {ASKED}\n<assistant>", ("Ann", "She")),
        ({**LONGBENCH, "answers": "['Ann']"}, "longbench", f"<user> {ASKED}\n<assistant>", ("Ann",)),
    ],
)  # fmt: skip
def test_shapes_are_recognised(
    row: dict[str, Any], named: str, expected: str, answers: tuple[str, ...], inputs: InputProcessor, tmp_path: Path
) -> None:
    file = written(tmp_path / "rows.jsonl", row)
    for dataset in (open_dataset(file), open_dataset(file, named)):
        assert dataset.format == named
        assert only(dataset, inputs) == (expected, answers)
    array = tmp_path / "rows.json"
    array.write_text(json.dumps([row], indent=1))
    assert only(open_dataset(str(array)), inputs) == (expected, answers)


def test_longbench_v2(inputs: InputProcessor, tmp_path: Path) -> None:
    text, answers = only(open_dataset(written(tmp_path / "v2.jsonl", {**V2, "answer": "A"})), inputs)
    assert answers == ("A",)
    for part in ("Ann came.", "Who?", "A. Ann\nB. Bo\nC. Cy\nD. Di"):
        assert part in text


@pytest.mark.parametrize("task", [*TEMPLATES, "a task of tomorrow"])
def test_longbench_prompts_have_the_context_once_and_the_question_after_it(task: str) -> None:
    context, question = "A {input} and {context}, too.", "Where is {context}?"
    prompt = longbench_prompt(task, context, question)
    assert prompt.count(context) == 1
    if question in prompt:
        assert prompt.index(question) > prompt.index(context)
    else:  # tasks without a question: summaries, counting, code
        assert task in ("gov_report", "multi_news", "vcsum", "passage_count", "lcc")
    assert "{input}" not in prompt.replace(context, "").replace(question, "")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.jsonl", '{"text": "x"}', ("line 1", "'text'", "sharegpt")),
        ("a.jsonl", "{}", ("line 1", "nothing")),
        ("a.jsonl", '"x"', ("line 1", "not a JSON object")),
        ("a.json", "[]", ("empty",)),
        ("a.json", '[{"prompt": "x"}, 3]', ("row 2", "not a JSON object")),
        ("a.json", '[{"prompt"', ("not JSON",)),
        ("a.jsonl", '{"prompt": "x"}\n{"messages": []}', ("line 2", "messages")),
        ("a.jsonl", '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', ("line 1", "part of content")),
        ("a.jsonl", '{"conversations": [{"from": "human"}]}', ("line 1", "conversations")),
        ("a.jsonl", '{"context": "x", "input": 3}', ("line 1", "LongBench")),
        ("a.jsonl", '{"prompt": "", "answer": 3}', ("line 1", "answer")),
        ("a.jsonl", '{"prompt": "x", "answer": 3}\n{"prompt": "x"}', ("line 2", "answer")),
        ("a.jsonl", '{"context": "x", "input": "y", "answers": [{}]}', ("line 1", "answers")),
    ],
)  # fmt: skip
def test_broken_rows(name: str, content: str, words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as error:
        open_dataset(str(tmp_path / name))
    for word in words:
        assert word in str(error.value)


def test_conversations_that_cannot_be_asked_are_counted(inputs: InputProcessor, tmp_path: Path) -> None:
    file = written(
        tmp_path / "chat.jsonl",
        {"conversations": []},
        {"conversations": [{"from": "gpt", "value": "Hello"}]},
        {"conversations": [{"from": "tool", "value": "3"}]},
        {"conversations": [{"from": "human", "value": "Hi"}]},
    )
    selection = open_dataset(file).select(inputs, None, 1000, 0)
    assert len(selection.samples) == 1
    assert selection.skipped == {
        "rows without a user's turn": 2,
        "rows with a speaker who is neither user nor assistant": 1,
    }


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=30),
    st.integers(1, 70),
    st.tuples(st.integers(1, 60), st.integers(0, 30)) | st.none(),
    st.integers(1, 12) | st.none(),
    st.integers(0, 5),
)
def test_selection_loses_no_row(
    inputs: InputProcessor, sizes: list[int], room: int, bucket: tuple[int, int] | None, count: int | None, seed: int
) -> None:
    """What is chosen fits; what is not chosen was counted, or not needed."""
    lengths = (bucket[0], bucket[0] + bucket[1]) if bucket is not None else None
    dataset = RowDataset("rows", [Row(text="x" * size) for size in sizes], lengths=lengths)
    low, high = lengths or (1, 1000)
    fits = [size for size in sizes if low <= size <= min(high, room)]
    if len(fits) < (count or 1):
        with pytest.raises(UserError, match="requests = "):
            dataset.select(inputs, count, room, seed)
        return
    selection = dataset.select(inputs, count, room, seed)
    chosen = list(map(len, selection.prompts))
    assert all(low <= size <= min(high, room) for size in chosen)
    assert len(chosen) == (count or min(8, len(fits)))
    assert sum(selection.skipped.values()) <= len(sizes) - len(fits)
    if len(chosen) < 8 and count is None:
        assert sum(selection.skipped.values()) == len(sizes) - len(fits)
    assert selection == dataset.select(inputs, count, room, seed)


def test_rows_are_chosen_by_seed(inputs: InputProcessor) -> None:
    dataset = RowDataset("rows", [Row(text="x" * (i + 1)) for i in range(20)])
    first = dataset.select(inputs, 5, 100, seed=1)
    assert first == dataset.select(inputs, 5, 100, seed=1) != dataset.select(inputs, 5, 100, seed=2)
    assert len(dataset.select(inputs, 20, 100, seed=1).samples) == 20
    assert len(dataset.select(inputs, None, 100, seed=1).samples) == 8


def test_text_is_cut_by_seed_into_different_lengths_and_places(inputs: InputProcessor) -> None:
    dataset = TextDataset("text", TEXT, (50, 90))
    first = dataset.select(inputs, 5, 500, seed=3).prompts
    assert first == dataset.select(inputs, 5, 500, seed=3).prompts
    assert first != dataset.select(inputs, 5, 500, seed=4).prompts
    assert sorted(map(len, first)) == [50, 60, 70, 80, 90]
    assert len({tuple(prompt) for prompt in first}) == 5
    whole = inputs.token_ids(TEXT)
    for prompt in first:
        assert any(whole[i : i + len(prompt)] == prompt for i in range(len(whole)))
    with pytest.raises(UserError, match="room for 80"):
        dataset.select(inputs, 5, 80, seed=0)
    with pytest.raises(UserError, match="longer text"):
        TextDataset("text", "short", (50, 90)).select(inputs, 5, 500, seed=0)
    assert max(map(len, TextDataset("text", TEXT).select(inputs, None, 120, seed=0).prompts)) == 120


def test_a_folder_of_texts(inputs: InputProcessor, tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("B" * 40)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "c.py").write_text("C" * 40)
    (tmp_path / "a.bin").write_bytes(b"\xff\xfe\x00")
    (tmp_path / ".hidden").write_text("D" * 40)
    selection = open_dataset(str(tmp_path), None, (82, 82)).select(inputs, 1, 100, 0)
    assert text_of(inputs, selection.prompts[0]) == "B" * 40 + "\n\n" + "C" * 40
    assert selection.skipped == {"files that are not text": 1}
    (tmp_path / "b.txt").unlink()
    (tmp_path / "sub" / "c.py").unlink()
    with pytest.raises(UserError, match="no text in it"):
        open_dataset(str(tmp_path))


def test_random_tokens(inputs: InputProcessor) -> None:
    dataset = RandomDataset((30, 90))
    first = dataset.select(inputs, 4, 100, seed=1).prompts
    assert list(map(len, first)) == [30, 50, 70, 90]
    assert first == dataset.select(inputs, 4, 100, seed=1).prompts != dataset.select(inputs, 4, 100, seed=2).prompts
    tokens = {token for prompt in first for token in prompt}
    assert tokens <= set(range(inputs.vocab_size)) - inputs.eos_token_ids
    assert len(tokens) > 50
    with pytest.raises(UserError, match="room for 80"):
        dataset.select(inputs, 4, 80, seed=1)
    bare = InputProcessor(None, 50, frozenset(), 0)  # no tokenizer is needed
    assert list(map(len, RandomDataset().select(bare, 2, 40, seed=0).prompts)) == [40, 40]


@settings(max_examples=15, deadline=None)
@given(st.integers(900, 5000), st.integers(1, 12), st.integers(0, 99))
def test_needles_are_of_the_length_and_hold_the_answer(
    inputs: InputProcessor, size: int, needles: int, seed: int
) -> None:
    dataset = NeedleDataset((size, size), needles)
    first, second = dataset.select(inputs, 2, size, seed).samples
    assert [first, second] == dataset.select(inputs, 2, size, seed).samples
    assert first.token_ids != second.token_ids
    for sample in (first, second):
        assert size - 350 < len(sample.token_ids) <= size
        text = text_of(inputs, sample.token_ids)
        (answer,) = sample.answers
        asked = text.rpartition("What is the secret number of the ")[2].partition("?")[0]
        assert text.count(Needle(asked, answer).sentence) == 1
        assert text.count("The secret number of the") == needles
        assert text.count(answer) == 1


def test_needles_lie_where_they_are_put() -> None:
    hay = [f"Sentence {i}." for i in range(10)]
    needles = make_needles(3, random.Random(0))
    assert len({needle.key for needle in needles}) == len({needle.value for needle in needles}) == 3
    text = needle_row(hay, needles, [0.0, 0.5, 1.0], needles[1]).text
    assert text is not None
    places = [text.index(needle.sentence) for needle in needles]
    assert places[0] < text.index("Sentence 0.")
    assert text.index("Sentence 4.") < places[1] < text.index("Sentence 5.")
    assert places[2] > text.index("Sentence 9.")


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (NeedleDataset((5000, 5000)), "room for 4000"),
        (NeedleDataset((100, 100)), "alone are"),
        (NeedleDataset(None, 0), "needles 0"),
        (NeedleDataset(None, 500), "needles 500"),
    ],
)
def test_needles_that_do_not_fit(dataset: NeedleDataset, words: str, inputs: InputProcessor) -> None:
    with pytest.raises(UserError, match=words):
        dataset.select(inputs, 2, 4000, 0)


def test_haystack_says_no_secret() -> None:
    assert len(haystack_sentences()) > 1000
    assert not any("secret number" in sentence for sentence in haystack_sentences())


def test_demo_fits_the_interface(inputs: InputProcessor) -> None:
    selection = demo_dataset().select(inputs, 2, 40_000, 0)
    assert all(sample.messages for sample in selection.samples)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4000-6000", (4000, 6000)),
        ("100", (100, 100)),
        ("16-18K", (16 * 1024, 18 * 1024)),
        ("16K-18k", (16 * 1024, 18 * 1024)),
        ("512-1K", (512 * 1024, 1024)),
        ("90K", (90 * 1024, 90 * 1024)),
        ("0-5", None),
        ("6-5", None),
        ("x", None),
        ("5-", None),
    ],
)
def test_length_ranges(text: str, expected: tuple[int, int] | None) -> None:
    if expected is None or expected[0] > expected[1]:
        with pytest.raises(UserError, match="--prompt-tokens"):
            length_range(text)
    else:
        assert length_range(text) == expected


@pytest.mark.parametrize(
    ("file", "named", "rows"),
    [
        ("aime24.jsonl", "aime", 30),
        ("aime25.jsonl", "aime", 30),
        ("livecodebench_v5.jsonl", "livecodebench", 279),
        ("longbench_multi_news_20.jsonl", "longbench", 20),
        ("ruler_niah_multikey_3_4096_20.jsonl", "ruler", 20),
    ],
)
def test_published_data(file: str, named: str, rows: int) -> None:
    path = SHARED / file
    if not path.exists():
        pytest.skip("shared/data, which is not ours to ship, does not lie beside this checkout; where CI runs it does")
    dataset = read_rows(str(path))
    assert dataset.format == named
    assert named in FORMATS
    assert len(dataset.rows) == rows
    assert all(row.text and row.unusable is None for row in dataset.rows)
    assert all(bool(row.answers) == (named != "livecodebench") for row in dataset.rows)
