"""The pool end to end with a real model: SmolLM2-135M-Instruct, two worker processes, the public client."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import prism_core
from broker import Client, Event, Request
from prism_core.sampling import TemperatureSampler
from tests.pool import FAST, Pool, wait_for

pytestmark = pytest.mark.model
CONTEXT = 3072
OPENER = "prism_core.model:open_model"


class Bare:
    """The same model on a Runtime of this process, no pool around it."""

    def __init__(self, path: Path) -> None:
        self.model = prism_core.open_model(path, context_tokens=CONTEXT)
        self.runtime = prism_core.Runtime(self.model.decoder(), prism_core.Limits(CONTEXT, 8, 1 << 30))

    def ids(self, prompt: list[int], tokens: int, sampler: Any = None) -> list[int]:
        ids: list[int] = []
        self.runtime.generate(
            prompt,
            prism_core.Generation(tokens, self.model.tokenizer.stop_tokens),
            prefill=prism_core.Prefill(128),
            sampler=sampler,
            emit=ids.append,
        )
        return ids

    def chat(self, messages: list[dict[str, Any]], answers: dict[int, list[int]] | None = None) -> list[int]:
        return list(self.model.chat.encode_turn(messages, answers=answers or {}).token_ids)


@pytest.fixture(scope="module")
def bare(smollm2_path: Path) -> Bare:
    return Bare(smollm2_path)


@pytest.fixture(scope="module")
def pool(smollm2_path: Path, bare: Bare, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """`bare` comes first, so that the workers find the kernels compiled and the weights packed."""
    folder = tmp_path_factory.mktemp("m")
    with Pool(
        folder, 2, model=str(smollm2_path), opener=OPENER, config={"context_tokens": CONTEXT, "threads": 1}, pool=FAST
    ) as pool:
        yield pool


@pytest.fixture
def client(pool: Pool) -> Iterator[Client]:
    pool.wait_ready()
    with Client(pool.broker.url) as client:
        yield client


def tell(request: Request) -> list[Event]:
    return list(request.events(timeout=120))


def ids_of(events: list[Event]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_twenty_requests_over_five_conversations_answer_as_the_bare_runtime_does(client: Client, bare: Bare):
    topics = ["rivers", "bread", "the moon", "chess", "bees"]
    ask = "Say one thing about {topic}, number {turn}."
    requests: dict[str, list[Request]] = {topic: [] for topic in topics}
    for turn in range(4):
        for topic, made in requests.items():
            message = user(ask.format(topic=topic, turn=turn))
            made.append(client.submit(messages=[message], conversation=topic.split()[-1], max_tokens=12))
    for topic, made in requests.items():
        messages: list[dict[str, Any]] = []
        answers: dict[int, list[int]] = {}
        workers = set()
        for turn, request in enumerate(made):
            events = tell(request)
            messages.append(user(ask.format(topic=topic, turn=turn)))
            ids = ids_of(events)
            assert ids == bare.ids(bare.chat(messages, answers), 12)
            result = request.result(timeout=5)
            assert result.state == "done"
            assert result.text == text_of(events)
            start = next(event for event in events if event.kind == "start")
            # Later conversations find the system prompt that all share, so even a first turn may reuse something.
            assert turn == 0 or start.data["reused_tokens"] > len(bare.chat(messages[:-2]))
            workers.add(start.data["worker"])
            answers[len(messages)] = ids
            messages.append({"role": "assistant", "content": text_of(events)})
        assert len(workers) == 1


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.8, "seed": 3, "top_k": 40, "top_p": 0.95}], ids=["greedy", "t0.8"]
)
def test_a_worker_killed_in_mid_stream_is_never_noticed_in_the_answer(pool: Pool, client: Client, bare: Bare, options):
    prompt = "Once upon a time, in a village by the sea, there lived"
    expected = bare.ids(bare.model.tokenizer.encode(prompt), 160, TemperatureSampler(**options) if options else None)
    request = client.submit(prompt=prompt, max_tokens=160, **options)
    events: list[Event] = []
    killed = False
    for event in request.events(timeout=120):
        events.append(event)
        if not killed and len(ids_of(events)) >= 30:
            pool.kill(pool.worker_of(request.id))
            killed = True
    assert killed
    assert ids_of(events) == expected
    assert text_of(events) == bare.model.tokenizer.decode(expected)
    assert [event.kind for event in events].count("moved") == 1
    assert [event.kind for event in events].count("end") == 1
    assert [event.sequence for event in events] == list(range(1, len(events) + 1))


def test_a_generation_is_cancelled_between_two_steps(client: Client):
    request = client.submit(prompt="The history of the world began", max_tokens=2000)
    events: list[Event] = []
    asked = 0.0
    for event in request.events(timeout=120):
        events.append(event)
        if not asked and len(ids_of(events)) >= 10:
            asked = time.monotonic()
            request.cancel()
    print(f"cancel to end: {(time.monotonic() - asked) * 1000:.1f} ms")
    assert events[-1].state == "cancelled"
    assert len(ids_of(events)) < 2000


def test_a_prompt_of_two_thousand_tokens_is_cancelled_while_it_is_read(client: Client, bare: Bare):
    words = bare.model.tokenizer.encode("word " * 1990)[:2000]
    request = client.submit(token_ids=words, max_tokens=50)
    asked = 0.0
    kinds = []
    for event in request.events(timeout=120):
        kinds.append(event.kind)
        if event.kind == "start":
            asked = time.monotonic()
            request.cancel()
    print(f"cancel in prefill to end: {(time.monotonic() - asked) * 1000:.1f} ms")
    assert kinds == ["start", "end"]
    assert request.result().state == "cancelled"


def test_a_worker_whose_turn_was_cancelled_answers_the_next_one_as_if_it_had_not_been(client: Client, bare: Bare):
    first = [user("Name a colour.")]
    told = tell(client.submit(messages=first, conversation="colour", max_tokens=8))
    broken = client.submit(messages=[user("Write a very long story.")], conversation="colour", max_tokens=800)
    for event in broken.events(timeout=60):
        if event.kind == "delta":
            broken.cancel()
    assert broken.result().state == "cancelled"
    after = tell(client.submit(messages=[user("Name another.")], conversation="colour", max_tokens=8))
    messages = [*first, {"role": "assistant", "content": text_of(told)}, user("Name another.")]
    assert ids_of(after) == bare.ids(bare.chat(messages, {1: ids_of(told)}), 8)
    assert after[0].data["reused_tokens"] >= len(bare.chat(first)) + len(ids_of(told))


def test_an_edited_message_reuses_exactly_the_unedited_prefix(client: Client, bare: Bare):
    system = {"role": "system", "content": "You answer in few words."}
    one = [system, user("What do bees make?")]
    first = tell(client.submit(messages=one, conversation="bees2", max_tokens=10))
    tell(client.submit(messages=[user("Is it sweet?")], conversation="bees2", max_tokens=10))
    answer = {"role": "assistant", "content": text_of(first)}
    edited = [*one, answer, user("Is it heavy?")]
    events = tell(client.submit(messages=edited, conversation="bees2", max_tokens=10))
    assert events[0].data["reused_tokens"] == len(bare.chat(one)) + len(ids_of(first))
    assert ids_of(events) == bare.ids(bare.chat(edited, {2: ids_of(first)}), 10)


def test_a_stop_string_and_log_probabilities_come_through_the_pool(client: Client, bare: Bare):
    prompt = "Roses are red, violets are"
    plain = tell(client.submit(prompt=prompt, max_tokens=24))
    words = text_of(plain)
    stop = words[8:12]
    request = client.submit(prompt=prompt, max_tokens=24, stop=[stop], logprobs=2)
    events = tell(request)
    assert text_of(events) == words[: words.find(stop)]
    assert request.result().reason == "stop"
    marks = [mark for event in events if event.kind == "delta" for mark in event.data.get("lp", [])]
    assert len(marks) == len(ids_of(events))
    assert all(mark["lp"] == pytest.approx(mark["top"][0][1]) for mark in marks), "greedy takes the best"


def test_a_prompt_over_the_context_is_refused_in_one_line(client: Client):
    result = client.submit(prompt="word " * 4000, max_tokens=10).result(timeout=60)
    assert result.state == "failed"
    assert result.reason.startswith("invalid_request: ")
    assert str(CONTEXT) in result.reason


def test_killed_workers_leave_no_process_behind(pool: Pool, client: Client):
    """The process that renders chat templates ends with its worker."""
    tell(client.submit(messages=[user("hi")], max_tokens=2))
    worker = pool.workers()[0]
    pid = pool.pid_of(worker)
    children = _children(pid)
    pool.kill(worker)
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in children), "its children to end")


def _children(pid: int) -> list[int]:
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid:
            found.append(int(status.parent.name))
    return found
