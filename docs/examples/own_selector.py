"""A selector of one's own, in a real engine. Run: python docs/examples/own_selector.py"""

from collections.abc import Sequence
from importlib import resources

from torch import Tensor
from torch.nn.functional import avg_pool1d

from aspire_llm import LLM, SamplingParams
from aspire_llm.context.ranking import forced_counts, top_positions
from aspire_llm.context.selectors import Scores, SelectorSetting, store_by_layer
from aspire_llm.context.state import ContextState
from aspire_llm.request import RowKind


# --8<-- [start:selector]
class NeighbourhoodSelector:
    """Positions that the last verified token attended to together with their neighbours: its attention probabilities,
    averaged over 9 positions, top-k in every layer."""

    refresh_layers: tuple[int, ...] = ()  # no layer reads everything while drafting
    prompt_queries = 1  # of a prompt, the last query is scored

    def __init__(self, setting: SelectorSetting) -> None:
        self.score_layers = setting.full_layers

    def query_weights(self, kind: RowKind, num_tokens: int) -> list[float]:
        return [0.0] * (num_tokens - 1) + [0.0 if kind is RowKind.DRAFT else 1.0]

    def renew(
        self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores, prompt_ended: Sequence[bool]
    ) -> None:
        smooth = avg_pool1d(scores(self.score_layers), 9, stride=1, padding=4)  # [layers, requests, positions]
        sinks, recent = forced_counts(state.budget)
        every = lengths.expand(smooth.shape[:2])
        sets, counts = top_positions(smooth, every, state.budget, sinks=sinks, recent=recent)
        store_by_layer(state, slots, self.score_layers, sets, counts)
        state.tail_starts[slots] = lengths.int()  # drafts read everything from here on

    def refresh(self, state: ContextState, slots: Tensor, lengths: Tensor, scores: Scores) -> None:
        pass  # nothing changes between verifications


# --8<-- [end:selector]


def main() -> None:
    book = resources.files("aspire_llm").joinpath("data", "texts", "kjv_jonah.txt").read_text(encoding="utf-8")
    # --8<-- [start:use]
    llm = LLM(
        "smollm2-135m",
        method="vegas",  # its policy; its selector is replaced
        selector_factory=NeighbourhoodSelector,
        budget=64,
        max_model_len="2K",
        max_num_seqs=1,
    )
    (output,) = llm.generate(book[:2000], SamplingParams(temperature=0, max_tokens=32))
    print(output.outputs[0].text)
    print(output.metrics.speculative_decoding)
    # --8<-- [end:use]


if __name__ == "__main__":
    main()
