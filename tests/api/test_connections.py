"""What holds of every connection to a gateway."""

from __future__ import annotations

import socket

from tests.api.door import Door


def test_small_answers_are_sent_at_once_on_every_connection(door: Door) -> None:
    """With the delay of small writes on, each token of a stream may wait 40 ms for the client's acknowledgement."""
    with door.http() as client:
        assert client.get("/livez").status_code == 200

        def delays() -> list[int]:
            found = []
            for connection in door.server.server_state.connections:
                own = connection.transport.get_extra_info("socket")
                found.append(own.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            return found

        options = door.call(delays)
    assert options
    assert all(options)
