"""A conversation: send only the new message, the pool keeps the rest; then edit an earlier message.

python ops/examples/conversation.py
"""

from broker import Client
from broker.keys import new_ulid

name = f"example-{new_ulid()}"


def ask(client: Client, text: str) -> str:
    request = client.submit(
        messages=[{"role": "user", "content": text}], history="append", conversation=name, max_tokens=24
    )
    result = request.result()
    print(f"{result.usage['prompt_tokens']} prompt tokens, {result.usage['reused_tokens']} of them known already")
    return result.text


with Client() as client:
    first = ask(client, "Name a fruit.")
    ask(client, "Name another one.")  # the first turn is not computed again
    print(len(client.transcript(name)), "turns")

    # An edit is the whole list again, changed: what comes after the change is dropped, what stands before it is reused.
    edited = client.submit(
        messages=[
            {"role": "user", "content": "Name a fruit."},
            {"role": "assistant", "content": first},
            {"role": "user", "content": "Now name a tree."},
        ],
        history="replace",
        conversation=name,
        max_tokens=24,
    )
    print("edited:", edited.result().state)
    print(len(client.transcript(name)), "turns, the last of them:", client.transcript(name)[-1].messages[0]["content"])
