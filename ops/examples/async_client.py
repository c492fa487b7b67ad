"""Many requests from one event loop, each streamed; the same calls as the plain client's, awaited.

python ops/examples/async_client.py
"""

import asyncio

from broker import AsyncClient

QUESTIONS = ["Name a colour.", "Name an animal.", "Name a city.", "Name a river."]


async def answer(client: AsyncClient, question: str) -> str:
    request = await client.submit(messages=[{"role": "user", "content": question}], max_tokens=16)
    text = ""
    async for event in request.events():
        text += event.text
    return text


async def main() -> None:
    async with AsyncClient() as client:
        answers = await asyncio.gather(*(answer(client, question) for question in QUESTIONS))
    for question, text in zip(QUESTIONS, answers, strict=True):
        print(question, "->", " ".join(text.split()))


asyncio.run(main())
