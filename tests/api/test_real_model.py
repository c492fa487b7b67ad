"""The gateway over a real model: what OpenAI's client reads is what the engine says in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import prism_core
from tests.api.door import Door
from tests.pool import Pool

pytestmark = pytest.mark.model

QUESTION: Any = [{"role": "user", "content": "Name three colours of the rainbow."}]
TOKENS = 24


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Iterator[Any]:
    loaded = prism_core.open_model(smollm2_path, context_tokens=512)
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def smol(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    with (
        Pool(
            tmp_path_factory.mktemp("s"),
            1,
            model=str(smollm2_path),
            opener="prism_core.model:open_model",
            config={"context_tokens": 512},
        ) as pool,
        Door(pool) as door,
    ):
        yield door


def greedy(model: Any, tokens: int) -> list[int]:
    runtime = prism_core.Runtime(model.decoder(), prism_core.Limits(512, 0, 1 << 30))
    ids: list[int] = []
    runtime.generate(
        model.chat.encode(QUESTION),
        prism_core.Generation(tokens, model.tokenizer.stop_tokens),
        prefill=prism_core.Prefill(128),
        emit=ids.append,
    )
    return ids


def test_a_real_answer_is_the_engines_own_whole_and_streamed(smol: Door, model: Any):
    client = smol.openai(timeout=120.0)
    ids = greedy(model, TOKENS)
    text = model.tokenizer.decode(ids)
    asked: Any = {"model": "toy", "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0}
    done = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    assert done.choices[0].message.content == text
    assert done.usage is not None
    assert done.usage.prompt_tokens == len(model.chat.encode(QUESTION))
    logprobs: Any = done.choices[0].logprobs
    assert b"".join(bytes(entry.bytes) for entry in logprobs.content).decode(errors="replace") == text
    assert all(entry.top_logprobs[0].token == entry.token for entry in logprobs.content)
    streamed = "".join(
        chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**asked, stream=True)
    )
    assert streamed == text
    response = client.responses.create(model="toy", input=QUESTION, max_output_tokens=TOKENS, temperature=0)
    assert response.output_text == text


def test_a_stop_string_of_several_tokens_never_shows_a_part_of_itself(smol: Door, model: Any):
    text = model.tokenizer.decode(greedy(model, TOKENS))
    stop = text[10:22]
    assert len(model.tokenizer.encode(stop, add_bos=False)) > 1
    client = smol.openai(timeout=120.0)
    asked: Any = {"model": "toy", "messages": QUESTION, "max_tokens": TOKENS, "temperature": 0, "stop": stop}
    streamed = ""
    for chunk in client.chat.completions.create(**asked, stream=True):
        streamed += chunk.choices[0].delta.content or ""
        assert text.startswith(streamed)
    assert streamed == text[: text.index(stop)]
    assert chunk.choices[0].finish_reason == "stop"


def test_a_conversation_reuses_what_it_has_read(smol: Door):
    client = smol.openai(timeout=120.0)
    headers = {"X-Prism-Conversation": "rainbow"}
    asked: Any = {"model": "toy", "max_tokens": 8, "seed": 1, "extra_headers": headers}
    first = client.chat.completions.create(messages=QUESTION, **asked)
    assert first.usage is not None
    second = client.chat.completions.create(messages=[{"role": "user", "content": "And three more?"}], **asked)
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    cached = second.usage.prompt_tokens_details.cached_tokens or 0
    assert cached >= first.usage.prompt_tokens
