"""What LongBench's tasks ask, in our own words: the long text first, then the question and the form of the answer.

The prompts differ from LongBench's own in their wording, so scores are comparable between methods, not with its tables.
"""

from __future__ import annotations

from collections.abc import Mapping

SHORT = "Give only the answer, in a few words, without an explanation."
SUMMARY = "Write a summary of the text above, in one or a few paragraphs."

# {context} and {input} are replaced
TEMPLATES: Mapping[str, str] = {
    "narrativeqa": "Here is a story, or the script of a film.\n\n{context}\n\nAnswer this question about it. " + SHORT
    + "\n\nQuestion: {input}\nAnswer:",
    "qasper": "Here is a scientific article.\n\n{context}\n\nAnswer the question from the article, as briefly as you can. If the "
    "article does not say, answer \"unanswerable\"; a question of yes or no is answered \"yes\", \"no\" or \"unanswerable\"."
    "\n\nQuestion: {input}\nAnswer:",
    "multifieldqa_en": "Here is a text.\n\n{context}\n\nAnswer this question about it. " + SHORT
    + "\n\nQuestion: {input}\nAnswer:",
    "hotpotqa": "Here are several passages.\n\n{context}\n\nAnswer the question from these passages. " + SHORT
    + "\n\nQuestion: {input}\nAnswer:",
    "2wikimqa": "Here are several passages.\n\n{context}\n\nAnswer the question from these passages. " + SHORT
    + "\n\nQuestion: {input}\nAnswer:",
    "musique": "Here are several passages.\n\n{context}\n\nAnswer the question by putting facts of several passages together. "
    + SHORT + "\n\nQuestion: {input}\nAnswer:",
    "gov_report": "Here is a report of a government agency.\n\n{context}\n\n" + SUMMARY + "\n\nSummary:",
    "qmsum": "Here is the transcript of a meeting.\n\n{context}\n\nAnswer the request about the meeting in one or a few "
    "sentences.\n\nRequest: {input}\nAnswer:",
    "multi_news": "Here are several news articles about one event.\n\n{context}\n\nWrite one summary of all of the articles."
    "\n\nSummary:",
    "vcsum": "Here is the transcript of a meeting.\n\n{context}\n\nSummarise the meeting, in its language.\n\nSummary:",
    "trec": "Tell what kind of thing each question asks for. Here are examples.\n\n{context}\n{input}",
    "triviaqa": "Answer the last question from the passage before it, with the answer only. Here are examples.\n\n"
    "{context}\n\n{input}",
    "samsum": "Summarise the last dialogue in a few sentences, as in these examples.\n\n{context}\n\n{input}",
    "lsht": "Tell the category of the last news item, as in these examples.\n\n{context}\n{input}",
    "passage_count": "Some of the following paragraphs may be repeated.\n\n{context}\n\nHow many different paragraphs are there, "
    "repetitions counted once? Answer with the number only.\n\nNumber:",
    "passage_retrieval_en": "Here are numbered paragraphs and the summary of one of them.\n\n{context}\n\nSummary: {input}\n\n"
    "Which paragraph is it the summary of? Answer in the form \"Paragraph N\".\n\nAnswer:",
    "passage_retrieval_zh": "Here are numbered paragraphs and the summary of one of them.\n\n{context}\n\nSummary: {input}\n\n"
    "Which paragraph is it the summary of? Answer in the form \"段落N\".\n\nAnswer:",
    "lcc": "Complete the next line of this code.\n{context}Next line:\n",
    "repobench-p": "Complete the next line of the last of these files.\n{context}{input}Next line:\n",
}  # fmt: skip
WITH_QUESTION = (
    "Here is a text.\n\n{context}\n\nAnswer this question about it, in its language.\n\nQuestion: {input}\nAnswer:"
)
WITHOUT_QUESTION = "Here is a text.\n\n{context}\n\n" + SUMMARY + "\n\nSummary:"


def longbench_prompt(task: str, context: str, question: str) -> str:
    """The prompt of a row; a task without a template of its own gets a general one."""
    template = TEMPLATES.get(task) or (WITH_QUESTION if question.strip() else WITHOUT_QUESTION)
    # one after the other would put a question into a context that says "{input}"
    before, _, after = template.partition("{context}")
    return before + context + after.replace("{input}", question)


def longbench_v2_prompt(context: str, question: str, choices: Mapping[str, str]) -> str:
    """A question with four choices; the answer is one letter."""
    listed = "\n".join(f"{letter}. {choice}" for letter, choice in choices.items())
    return (
        f"Here is a text.\n\n{context}\n\nChoose the right answer to this question about it.\n\n"
        f"Question: {question}\n{listed}\n\nGive only the letter of the right answer.\n\nAnswer:"
    )
