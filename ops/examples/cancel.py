"""Cancel a request while it runs: its worker stops at the next step, and is free at once.

python ops/examples/cancel.py
"""

from broker import Client

with Client() as client:
    request = client.submit(messages=[{"role": "user", "content": "Count to a thousand."}], max_tokens=2000)
    tokens = 0
    for event in request.events():
        tokens += len(event.token_ids)
        if tokens >= 10 and event.kind == "delta":
            print("cancel:", request.cancel("seen enough"))
            break
    result = request.result()
    print(result.state, "-", result.reason)  # what it wrote until then is not an answer: disown it
    print("again:", request.cancel())  # any number of times
