"""The unmodified OpenAI client against `prism serve` or `prism gateway`: only the address is another.

export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any      (a key of PRISM_API_KEYS, if it is set)
python ops/examples/openai_chat.py
"""

from openai import OpenAI

client = OpenAI()
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Say hello in three languages."}],
    max_tokens=32,
    stream=True,
    stream_options={"include_usage": True},
    # Turns of one conversation stay on the worker that has its beginning in memory.
    extra_headers={"X-Prism-Conversation": "hello"},
)
for chunk in stream:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    elif chunk.usage:
        print(f"\n{chunk.usage.completion_tokens} tokens")
