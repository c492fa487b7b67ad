"""Hints: heard at once, and again after the connection that brings them was cut."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import PrivateBroker
from tests.pool import wait_for
from workers.hints import Hints


class Heard:
    """What two channels brought."""

    def __init__(self, broker: PrivateBroker) -> None:
        self.client = broker.client()
        self.one: list[bytes] = []
        self.two: list[bytes] = []
        self.hints = Hints(broker.client(), {"one": self.one.append, "two": self.two.append})
        self.hints.start()

    def say(self, channel: str, what: str) -> None:
        """Publishes until somebody hears."""
        wait_for(lambda: self.client.publish(channel, what), f"a listener on {channel}")


@pytest.fixture
def heard(broker: PrivateBroker) -> Iterator[Heard]:
    made = Heard(broker)
    yield made
    made.hints.stop()


def test_each_channel_has_its_own_handler(heard: Heard):
    heard.say("one", "a")
    heard.say("two", "b")
    wait_for(lambda: heard.one and heard.two, "both")
    assert (heard.one, heard.two) == ([b"a"], [b"b"])


def test_a_worker_whose_connections_were_cut_obeys_commands_again(heard: Heard):
    """The symptom elsewhere: after a short disconnect a worker ignores all commands until it is restarted."""
    for number in range(3):
        heard.say("one", str(number))
        wait_for(lambda: heard.one and heard.one[-1] == str(number).encode(), "the hint")  # noqa: B023
        heard.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")


def test_a_handler_that_fails_does_not_end_the_listening(broker: PrivateBroker):
    heard = Heard(broker)
    heard.hints.stop()
    calls: list[bytes] = []

    def fail_once(message: bytes) -> None:
        calls.append(message)
        if len(calls) == 1:
            raise ValueError("what is this?")

    hints = Hints(broker.client(), {"one": fail_once})
    hints.start()
    try:
        heard.say("one", "a")
        wait_for(lambda: calls, "the first")
        heard.say("one", "b")
        wait_for(lambda: len(calls) == 2, "the second")
    finally:
        hints.stop()
