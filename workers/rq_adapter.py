"""Everything of Prism that touches RQ, its private methods included, in this one file (pinned: rq >= 3.0, < 3.1).

Invariant: RQ's records of workers and jobs say what is true, so that `rq info` and dashboards can be believed, and they
never decide anything: the pool's own keys do, and the broker's scripts make a job's record true by themselves if this
process dies on the way. Nothing that is stored in Redis can name code to run: jobs resolve to an allow-list of one
function, callbacks and webhooks of a record are ignored, and the serializer is JSON.
Not promised: RQ's retries, repeats, dependencies and scheduler; the pool has its own words for all of them.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

from broker import keys

# RQ reads it once, when it is imported; whatever it is set to for some other RQ application does not matter here.
os.environ["RQ_KEY_PREFIX"] = keys.RQ

import redis
import rq.defaults
from rq.executions import Execution
from rq.job import Job, JobStatus
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now
from rq.worker.base import BaseWorker, WorkerStatus

if rq.defaults.RQ_KEY_PREFIX != keys.RQ:
    raise ImportError(f"rq was imported before workers.rq_adapter, with the key prefix {rq.defaults.RQ_KEY_PREFIX!r}")

log = logging.getLogger(__name__)

TURN_FUNC = "prism.turn"
WORKER_TTL_S = 30
EXECUTION_TTL_S = 90
HEARTBEAT_S = 10.0
FAILURE_TTL_S = 86_400
COMMANDS = {"shutdown": "shutdown", "stop-job": "stop", "stop-execution": "stop"}


class TurnFailed(Exception):
    """How a failed turn is shown in RQ's failure records: its one line, no traceback, no text of the request."""


def run_turn(request: str) -> None:
    """Stands for a turn in RQ's records. A turn runs in a TurnWorker's loop, never through RQ's `perform`."""
    raise TurnFailed(f"request {request} must be run by a prism worker")


ALLOWED: Mapping[str, Callable[..., Any]] = {TURN_FUNC: run_turn}


class TurnJob(Job):  # type: ignore[misc]
    """A job whose record can only ever mean `run_turn`, whoever wrote it."""

    @property
    def func(self) -> Callable[..., Any]:
        name = self.func_name
        if name not in ALLOWED or self.instance:
            raise TurnFailed(f"job {self.id} names {str(name)[:80]!r}, which no prism worker runs")
        return ALLOWED[name]

    @property
    def success_callback(self) -> None:
        return None

    @property
    def failure_callback(self) -> None:
        return None

    @property
    def stopped_callback(self) -> None:
        return None

    def restore(self, raw_data: Any) -> Any:
        """Reads a record without what could reach out of it: webhooks, retries, repeats."""
        result = super().restore(raw_data)
        self.webhooks: list[Any] = []
        self.retries_left = None
        self.repeats_left = None
        return result


class RqWorker(BaseWorker):  # type: ignore[misc]
    """RQ's record of one worker incarnation and of the turn it runs.

    Its Redis client is its own (RQ changes socket timeouts and names connections). Every method swallows a broker that
    is away: the record is then late, and made true by the next one.
    """

    job_class = TurnJob
    log_job_description = False
    log_result_lifespan = False

    def __init__(self, client: redis.Redis, name: str) -> None:
        super().__init__(
            [Queue(f"w.{name}", connection=client, job_class=TurnJob, serializer=JSONSerializer)],
            name=name,
            connection=client,
            worker_ttl=WORKER_TTL_S,
            serializer=JSONSerializer,
            default_result_ttl=FAILURE_TTL_S,
        )
        self._job: TurnJob | None = None
        self._execution: Execution | None = None

    def _set_connection(self, connection: redis.Redis) -> redis.Redis:
        """RQ would stretch the socket timeout to outlast its BLPOP, which this worker never calls."""
        return connection

    def procline(self, message: str) -> None:
        """RQ would rename the process."""

    def born(self) -> None:
        """Registers the incarnation; its name is new, so nobody can hold it. `beat` does it again if this could not."""
        with _lenient("birth"):
            self.register_birth()
            self.set_state(WorkerStatus.IDLE)

    def beat(self) -> None:
        """Keeps the worker's record, and its running job's, alive; call each `HEARTBEAT_S` from any thread."""
        job, execution = self._job, self._execution
        with _lenient("heartbeat"):
            if not self.connection.exists(self.key):  # the broker was away for longer than the record lives
                state = self.get_state()
                self.register_birth()
                self.set_state(state)
            if job is not None and execution is not None:
                self.maintain_heartbeats(job, execution)
            else:
                self.heartbeat(WORKER_TTL_S + 60)

    def begin(self, request: str) -> None:
        """Shows the turn as started by this worker. The claim itself has already marked the job so."""
        with _lenient("begin"):
            job = self.job_class.fetch(request, connection=self.connection, serializer=self.serializer)
            job.started_at = now()
            execution = self.prepare_execution(job)
            self._job, self._execution = job, execution

    def end(self, request: str, *, state: str, reason: str, tokens: int) -> None:
        """Makes the ended turn's record final. `settle` does what is missing if this could not."""
        job, execution = self._job, self._execution
        self._job = self._execution = None
        with _lenient("end"):
            if job is not None and execution is not None and job.id == request:
                job._status = JobStatus.STARTED
                queue = Queue(job.origin, connection=self.connection, job_class=TurnJob, serializer=self.serializer)
                summary = {"state": state, "reason": reason, "n": tokens}
                if state == "done":
                    self._finalize_success(job, queue, execution, summary)
                elif state != "cancelled":
                    job.failure_ttl = FAILURE_TTL_S
                    error = TurnFailed(f"{state}: {reason}")
                    self._finalize_failure(job, queue, execution, (TurnFailed, error, None))
            self.set_state(WorkerStatus.IDLE)
        self.executions.clear()

    def dropped(self) -> None:
        """The turn left this worker without an end. The script that moved it has cleaned its record, but this worker
        may have shown itself as running it after that: a process can be stopped for long between take and `begin`."""
        job, execution = self._job, self._execution
        self._job = self._execution = None
        self.executions.clear()
        with _lenient("dropped"), self.connection.pipeline() as pipeline:
            if job is not None and execution is not None:
                execution.delete(job=job, pipeline=pipeline)
            self.set_state(WorkerStatus.IDLE, pipeline=pipeline)
            pipeline.execute()

    def died(self) -> None:
        """Takes the worker out of RQ's lists."""
        with _lenient("death"):
            self.register_death()

    def handle_exception(self, job: Job, *exc_info: Any) -> None:
        """RQ would log the job's arguments and a traceback; the worker logs every turn itself."""

    @property
    def command_channel(self) -> str:
        """Where `rq` sends this worker its commands."""
        return str(self.pubsub_channel_name)

    @staticmethod
    def command(message: bytes) -> tuple[str, str] | None:
        """("shutdown", "") or ("stop", request id) from RQ's command channel; None for all else."""
        try:
            payload = json.loads(message)
            return COMMANDS[payload["command"]], str(payload.get("job_id", ""))
        except (ValueError, KeyError, TypeError):
            return None


def forget_expired(client: redis.Redis) -> None:
    """Drops executions whose worker died between showing and dropping them, from the lists of started jobs.

    RQ's own maintenance would mark such jobs as failed, whatever has become of them since.
    """
    for queue in Queue.all(connection=client, job_class=TurnJob, serializer=JSONSerializer):
        client.zremrangebyscore(queue.started_job_registry.key, 0, now().timestamp())


class _lenient:
    """Inside, a broker that is away costs a log line only."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if kind is None or not issubclass(kind, Exception):
            return False
        log.warning("rq record is late", extra={"step": self._what, "error": kind.__name__})
        return True
