"""Start a long answer, forget it, and come back for it: from another process, at any event, or for the whole.

python ops/examples/background.py
"""

from broker import Client

with Client() as client:
    job = client.submit(
        messages=[{"role": "user", "content": "Write a long story."}],
        max_tokens=120,
        priority="background",
        idempotency_key="story-of-today",  # a repeated submission, also from elsewhere, is the same request
        deadline=3600,  # seconds, queueing included
    )
    print("request", job.id)

# Nothing holds the request now but the pool. A new client, a minute or a reboot later:
with Client() as client:
    request = client.request(job.id)
    last = None
    for event in request.events():
        last = event.id
        if event.sequence == 10:
            break  # as if the connection had been lost here

    print("again from", last)
    for event in request.events(after=last):  # nothing twice, nothing left out
        if event.kind == "end":
            print("end", event.state)

    print("whole", len(request.result().token_ids), "tokens")
