"""`prism batch`: run a file of requests, look at batches, cancel one."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ops.cli import options
from ops.cli.output import PLAIN_LINE_SECONDS, print_json, print_table, say, stderr
from prism_core.errors import InvalidRequest, PrismError

if TYPE_CHECKING:
    from broker.batch.job import Job, JobFiles, JobResult
    from broker.batch.lease import Known
    from broker.batch.totals import Progress as BatchProgress
    from broker.batch.totals import Totals

app = typer.Typer(help="Run files of requests (OpenAI's batch format).", no_args_is_help=True, rich_markup_mode=None)
EXIT_INTERRUPTED = 130
SHOWN_PROBLEMS = 20


class SomeFailed(PrismError):
    """The batch is over, and not every line was answered."""


@app.command()
def run(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The requests, one JSON object a line.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Answers; OUT.part while it runs.", metavar="OUT")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an earlier run.")] = False,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Go on, and run the failed lines again.")
    ] = False,
    ordered: Annotated[bool, typer.Option("--sort", help="Put the answers in the order of the requests.")] = False,
    model: Annotated[str, typer.Option(help="Takes the place of the model that each line names.")] = "",
    window: Annotated[int, typer.Option(min=1, max=64, help="Lines in the pool for each worker.")] = 4,
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """Answer every line of IN exactly once; failed ones go to a file of their own, with .errors in its name.

    Every line is checked before the first one runs. Ctrl-C stops; `--resume` goes on, also after a crash.
    """
    from broker.batch.errors import BadFile, Interrupted
    from broker.batch.job import Job, JobFiles
    from broker.batch.pool import LinePool
    from broker.config import PoolConfig
    from broker.connect import connect
    from broker.keys import new_ulid

    errors = output.with_name(f"{output.stem}.errors{output.suffix}")
    files = JobFiles(source, output, errors, output.with_name(output.name + ".batch"))
    if _is_over(files, resume=resume, retry=retry_errors, model=model, as_json=as_json):
        return
    connection = connect(redis_url)
    try:
        job = Job(
            files,
            LinePool(connection.redis, PoolConfig()),
            new_ulid(),
            model=model,
            window=window,
            ordered=ordered,
            retry_failed=retry_errors,
            afresh=not (resume or retry_errors),
        )
        with _stop_on_signals(job.stop), _shown(job, as_json):
            result = job.run()
    except BadFile as error:
        for problem in error.problems[:SHOWN_PROBLEMS]:
            say(f"{source}: {problem}")
        if as_json:
            print_json({"problems": [vars(problem) for problem in error.problems], "total": error.total})
        begun = " stopped it; what is done is kept" if files.plan.exists() else "; nothing of it was run"
        raise InvalidRequest(f"{source}: {error.total} problem(s){begun}") from error
    except Interrupted as error:
        say(f"stopped; go on with: prism batch run {source} -o {output} --resume")
        raise SystemExit(EXIT_INTERRUPTED) from error
    finally:
        connection.close()
    _tell_end(files, result, as_json)


def _is_over(files: JobFiles, *, resume: bool, retry: bool, model: str, as_json: bool) -> bool:
    """Whether an earlier run left nothing to do. Refuses what would lose somebody's file, or mix two batches."""
    from broker.batch.job import JobResult
    from broker.batch.ledger import part_of, recorded
    from broker.batch.plan import Plan, PlanUnreadable
    from broker.batch.validate import digest

    _check_names(files)
    part = part_of(files.output)
    begun = part.exists() and part.stat().st_size > 0
    if not (files.plan.exists() and files.plan.stat().st_size):
        for path in (files.output, part, files.errors):
            if path.exists() and path.stat().st_size:
                raise InvalidRequest(
                    f"{path} is there already, and not from a batch: remove it, or name another output"
                )
        return False
    if not (resume or retry):
        if begun or files.output.exists():
            raise InvalidRequest(f"{files.output} was begun by an earlier run: add --resume to go on with it")
        return False
    try:
        plan = Plan.load(files.plan)
    except PlanUnreadable:
        if begun or files.output.exists():
            raise
        return False  # an earlier run died before its first line, or one is just beginning
    if model and model != plan.model:
        raise InvalidRequest(f"the batch was begun with model {plan.model or 'as each line says'!r}, not {model!r}")
    if part.exists() or not files.output.exists() or (retry and files.errors.exists()):
        return False
    if digest(files.input) != plan.sha256:
        raise InvalidRequest(f"{files.input} is not the file that {files.output} was made from: it has changed since")
    _tell_end(files, JobResult(plan.batch, "completed", recorded(plan, files.output, files.errors)), as_json)
    return True


def _check_names(files: JobFiles) -> None:
    if not files.input.exists():
        raise InvalidRequest(f"there is no file {files.input}")
    names = [path.resolve() for path in (files.input, files.output, files.errors, files.plan)]
    if len(set(names)) < len(names):
        raise InvalidRequest("input, output and errors must be different files")
    if not files.output.parent.is_dir():
        raise InvalidRequest(f"there is no folder {files.output.parent}")
    for path in (files.output, files.errors):
        if path.exists() and not path.is_file():
            raise InvalidRequest(f"{path} is no regular file")


@app.command()
def status(
    batch: Annotated[str | None, typer.Argument(metavar="ID", help="One batch; without it, all.")] = None,
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """How far batches are, those of the gateways included."""
    from broker.batch.lease import read_batch, read_batches
    from broker.connect import connect

    connection = connect(redis_url)
    try:
        known = [read_batch(connection.redis, _ulid(batch))] if batch else read_batches(connection.redis)
    finally:
        connection.close()
    if as_json:
        rows = [{"batch": one.batch, "runner": one.runner, **one.facts} for one in known]
        print_json(rows[0] if batch else rows)
        return
    columns = ("batch", "state", "done", "failed", "running", "of", "tokens/s", "left", "runner")
    print_table(columns, [_row(one) for one in known])


def _row(known: Known) -> tuple[str, ...]:
    facts = known.facts
    state = known.state
    if state in ("running", "cancelling", "validating", "finalizing") and not known.runner:
        state = "stopped"
    counts = [facts.get(name, "") for name in ("done", "failed", "running", "total")]
    alive = bool(known.runner)
    left = human_time(float(facts["eta_s"])) if alive and facts.get("eta_s") else ""
    host, _, rest = known.runner.partition(":")
    runner = f"{host} pid {rest.partition(':')[0]}" if alive else ""
    return (known.batch, state, *counts, facts.get("tokens_per_s", "") if alive else "", left, runner)


@app.command()
def cancel(
    batch: Annotated[str, typer.Argument(metavar="ID", help="The batch, as `prism batch status` shows it.")],
    redis_url: options.RedisUrl = None,
    as_json: options.Json = False,
) -> None:
    """Stop a batch: finished lines are kept, the rest become errors."""
    from broker.batch.lease import cancel_batch
    from broker.config import PoolConfig
    from broker.connect import connect

    connection = connect(redis_url)
    try:
        answer = cancel_batch(connection.redis, PoolConfig(), _ulid(batch))
    finally:
        connection.close()
    meaning = {
        "cancelling": "is being cancelled by its runner",
        "waiting": "has no runner now; it is cancelled when one takes it up (`prism batch run ... --resume`)",
    }
    if as_json:
        print_json({"batch": _ulid(batch), "answer": answer})
    else:
        print(f"{batch} {meaning.get(answer, f'is over already: {answer}')}")


def _ulid(batch: str) -> str:
    """The id without what the HTTP interface puts before it."""
    return batch.removeprefix("batch_")


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """The first signal stops in order, the second at once."""

    def handle(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _shown(job: Job, as_json: bool) -> Iterator[None]:
    """Progress on standard error: a bar on a terminal, else a line each ten seconds."""
    if stderr.is_terminal and not as_json:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, TextColumn("{task.fields[rate]}"), console=stderr) as bar:
            task = bar.add_task("checking", total=None, rate="")

            def draw(progress: BatchProgress) -> None:
                totals = progress.totals
                finished = totals.done + totals.failed
                bar.update(task, description="lines", completed=finished, total=totals.lines, rate=told(progress))

            job.on_check = lambda done, total: bar.update(task, completed=done, total=total or None)
            job.on_progress = draw
            yield
        return
    due = time.monotonic() + PLAIN_LINE_SECONDS

    def line(progress: BatchProgress) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + PLAIN_LINE_SECONDS
            totals = progress.totals
            say(f"{totals.done + totals.failed} of {totals.lines} lines; {told(progress)}")

    job.on_progress = line
    yield


def told(progress: BatchProgress) -> str:
    """How it goes, in a few words."""
    parts = [f"{progress.totals.failed} failed"] if progress.totals.failed else []
    parts.append(f"{progress.running} running")
    parts.append(f"{progress.tokens_per_s:.0f} tokens/s")
    if progress.waiting_for:
        parts.append(f"waiting for {progress.waiting_for}")
    elif progress.eta_s is not None:
        parts.append(f"{human_time(progress.eta_s)} left")
    return ", ".join(parts)


def human_time(seconds: float) -> str:
    """`40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{math.ceil(seconds)} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def _tell_end(files: JobFiles, result: JobResult, as_json: bool) -> None:
    totals = result.totals
    if as_json:
        print_json(_summary(files, result))
    say(f"batch {result.batch} {result.ended}: {totals.done} lines in {files.output}{_tokens(totals)}")
    if totals.failed:
        again = f"prism batch run {files.input} -o {files.output} --retry-errors"
        raise SomeFailed(f"{totals.failed} of {totals.lines} lines failed; see {files.errors}; run them again: {again}")


def _tokens(totals: Totals) -> str:
    return (
        f"; {totals.prompt_tokens} prompt tokens ({totals.cached_tokens} reused) and"
        f" {totals.completion_tokens} new ones"
    )


def _summary(files: JobFiles, result: JobResult) -> dict[str, Any]:
    totals = result.totals
    return {
        "batch": result.batch,
        "state": result.ended,
        "total": totals.lines,
        "done": totals.done,
        "failed": totals.failed,
        "output": str(files.output),
        "errors": str(files.errors) if totals.failed else None,
        "usage": totals.usage(),
    }
