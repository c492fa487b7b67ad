"""Submit a question and print its answer as it comes.

    prism serve smollm2-135m        (in another terminal)
    python ops/examples/stream.py "Why is the sky blue?"

Without PRISM_REDIS_URL the embedded broker of this machine is used, as `prism serve` does.
"""

import sys

from broker import Client

question = " ".join(sys.argv[1:]) or "Why is the sky blue?"

with Client() as client:
    request = client.submit(messages=[{"role": "user", "content": question}], max_tokens=64, temperature=0.7, seed=1)
    for event in request.events():
        print(event.text, end="", flush=True)
    result = request.result()
    print(f"\n{result.state} ({result.reason}): {result.usage['completion_tokens']} tokens", file=sys.stderr)
