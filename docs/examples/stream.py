"""Read two requests while they are being decoded together. Run: python docs/examples/stream.py"""

import asyncio

from aspire_llm import AsyncLLM, SamplingParams


# --8<-- [start:body]
async def read(llm: AsyncLLM, prompt: str) -> str:
    text = ""
    async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24)):
        text = output.outputs[0].text  # all of it so far
    return text


async def decode() -> None:
    llm = AsyncLLM("smollm2-135m", max_model_len="2K", max_num_seqs=2)
    try:
        print(await asyncio.gather(read(llm, "Once upon a time"), read(llm, "In the beginning")))
    finally:
        llm.shutdown()


# --8<-- [end:body]


def main() -> None:
    asyncio.run(decode())


if __name__ == "__main__":
    main()
