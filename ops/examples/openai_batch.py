"""A batch through the OpenAI client: upload a file of requests, wait, read answers by custom_id.

    export OPENAI_BASE_URL=http://127.0.0.1:8000/v1 OPENAI_API_KEY=any      (a key of PRISM_API_KEYS, if it is set)
    python ops/examples/openai_batch.py

The same file runs without a gateway: prism batch run requests.jsonl -o answers.jsonl
"""

import json
import time

from openai import OpenAI

client = OpenAI()
model = client.models.list().data[0].id
lines = [
    {
        "custom_id": f"number-{n}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": model, "messages": [{"role": "user", "content": f"Spell {n}."}], "max_tokens": 12},
    }
    for n in range(8)
]
content = "".join(json.dumps(line) + "\n" for line in lines)

source = client.files.create(file=("requests.jsonl", content.encode()), purpose="batch")
batch = client.batches.create(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
while batch.status not in ("completed", "failed", "cancelled", "expired"):
    time.sleep(0.2)
    batch = client.batches.retrieve(batch.id)
print(batch.status)

if batch.output_file_id:
    for line in client.files.content(batch.output_file_id).text.splitlines():
        answer = json.loads(line)
        text = answer["response"]["body"]["choices"][0]["message"]["content"]
        print(answer["custom_id"], "->", " ".join(text.split()))
