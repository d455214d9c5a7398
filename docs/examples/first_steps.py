"""Decode a batch and look at what was drafted. Run: python docs/examples/first_steps.py"""

from aspire_llm import LLM, SamplingParams


def main() -> None:
    # --8<-- [start:body]
    llm = LLM("smollm2-135m", max_model_len="2K", max_num_seqs=2)
    prompts = ["The capital of France is", "A list of prime numbers: 2, 3, 5,"]
    for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32)):
        print(output.prompt, output.outputs[0].text)
        print(output.metrics.steps, output.metrics.speculative_decoding["mean_acceptance_length"])
    # --8<-- [end:body]


if __name__ == "__main__":
    main()
