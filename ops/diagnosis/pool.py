"""The pool on a broker: workers, leases, turns that nobody can run, load of this host, RQ's view of it all."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

from broker import keys
from broker.admin import Snapshot, WorkerInfo
from ops.diagnosis.check import Check
from ops.diagnosis.machine import usable_cores

SAMPLE = 100
"""Open requests whose RQ records are compared."""
STARVED_MS = 60_000
RQ_STATUS = {"queued": "queued", "running": "started"}


def checks(snapshot: Snapshot, client: Any, url: str, where: str) -> list[Check]:
    """`url`: the broker's, without a password. `where`: how a command names it, ` --redis-url redis://host/0` or
    nothing."""
    return [
        members(snapshot, where),
        leases(snapshot.workers, where),
        parked(snapshot, where),
        starved(snapshot, where),
        cores(snapshot.workers, socket.gethostname(), usable_cores()),
        records(client, url),
    ]


def members(snapshot: Snapshot, where: str) -> Check:
    """Somebody must work here."""
    alive = [worker for worker in snapshot.workers if worker.state in ("idle", "busy")]
    draining = sum(worker.state == "draining" for worker in snapshot.workers)
    text = f"{len(alive)} live worker(s), {snapshot.open_requests} open request(s)"
    text += f", {draining} draining" if draining else ""
    if not alive:
        return Check("pool", "warning", text, f"prism worker MODEL{where}")
    return Check("pool", "good", text)


def leases(workers: Sequence[WorkerInfo], where: str) -> Check:
    """A lapsed worker is taken out of the pool within seconds by any supervisor; if it stays, there is none."""
    lapsed = [worker.name for worker in workers if worker.state in ("lapsed", "reaping")]
    if lapsed:
        return Check(
            "leases",
            "warning",
            f"lapsed: {', '.join(lapsed)}",
            f"any supervisor takes them out within seconds: start one (prism worker MODEL{where}) or see its log",
        )
    return Check("leases", "good", f"{len(workers)} held" if workers else "none to hold")


def parked(snapshot: Snapshot, where: str) -> Check:
    """Turns for a model that no worker runs wait until their deadline."""
    if not snapshot.parked:
        return Check("parked", "good", "no turn waits for a model that nobody runs")
    names = {identity: snapshot.models.get(identity) or identity[:12] for identity in snapshot.parked}
    waiting = ", ".join(f"{count} for {names[i] or 'any model'}" for i, count in snapshot.parked.items())
    starts = "; ".join(f"prism worker {name or 'MODEL'}{where}" for name in names.values())
    return Check("parked", "warning", f"turns with nobody to run them: {waiting}", starts)


def starved(snapshot: Snapshot, where: str) -> Check:
    """Interactive turns always go first: where they fill every slot, the others wait until their deadline."""
    waiting = snapshot.queued.background + snapshot.queued.batch
    if snapshot.behind_ms < STARVED_MS or snapshot.parked:
        return Check("fairness", "good", f"{waiting} background turn(s) and batch line(s) wait, none for long")
    return Check(
        "fairness",
        "warning",
        f"{waiting} background turn(s) and batch line(s) wait, the first for {snapshot.behind_ms / 1000:.0f} s: "
        "turns of higher priority take every slot, and those that wait end at their deadline",
        f"more workers (prism worker MODEL{where}; prism backlog{where} says how many), or longer deadlines",
    )


def cores(workers: Sequence[WorkerInfo], host: str, usable: float) -> Check:
    """Compute threads beyond the cores only take turns on them, and every step gets slower and uneven."""
    here = [worker for worker in workers if worker.lease and worker.lease.host == host]
    threads = sum(int(worker.stats.get("threads", 1)) for worker in here)
    text = f"{len(here)} worker(s) of this host with {threads} thread(s) on {usable:g} usable core(s)"
    if threads > usable:
        return Check("cores", "warning", text, f"run at most {max(1, int(usable))} compute thread(s) on this host")
    return Check("cores", "good", text)


def records(client: Any, url: str) -> Check:
    """RQ's own records of open requests must say what is true; they decide nothing, but people look at them."""
    try:
        wrong = _wrong_records(client)
        if wrong:  # a turn may have moved between the two looks
            wrong = {request: what for request, what in _wrong_records(client).items() if request in wrong}
    except ImportError as error:
        return Check("rq", "bad", str(error), "unset RQ_KEY_PREFIX")
    line = f"RQ_KEY_PREFIX={keys.RQ} rq info --url {url}"
    if wrong:
        request, what = next(iter(wrong.items()))
        return Check(
            "rq",
            "warning",
            f"{len(wrong)} record(s) of RQ are not true, such as {request}: {what}",
            f"let nothing else write or delete keys below {keys.RQ}:, such as rq empty; the turns themselves go on",
        )
    return Check("rq", "good", f"records are true; to see them: {line}")


def _wrong_records(client: Any) -> dict[str, str]:
    """Open requests whose RQ job is missing, unreadable, or in another state."""
    from workers.rq_adapter import TurnJob  # first: it sets RQ's prefix

    open_ids = [item.decode() for item in client.zrange(keys.LIVE, 0, SAMPLE - 1)]
    pipe = client.pipeline(transaction=False)
    for request in open_ids:
        pipe.hget(keys.request(request), "state")
    states = dict(zip(open_ids, pipe.execute(), strict=True))
    wrong = {}
    for request, state in states.items():
        expected = RQ_STATUS.get((state or b"").decode())
        if expected is not None and (found := _rq_status(request, client, TurnJob)) != expected:
            wrong[request] = f"it is {expected}, and RQ says {found}"
    return wrong


def _rq_status(request: str, client: Any, job_class: Any) -> str:
    from rq.exceptions import NoSuchJobError
    from rq.serializers import JSONSerializer

    try:
        job = job_class.fetch(request, connection=client, serializer=JSONSerializer)
        named = job.func_name
        return str(job.get_status(refresh=False).value) if named else "nothing"
    except NoSuchJobError:
        return "nothing"
    except Exception as error:
        return f"what cannot be read ({type(error).__name__})"
