"""The command tree, and the one place where an error becomes a line and an exit code.

Exit codes: 0 done, 1 the work failed, 2 the command line is wrong, 75 try again (no broker, or this worker was
declared dead), 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import cast

import typer

from ops.cli import backlog, batch, bench, doctor, gateway, local, models, pool, requests
from ops.cli.output import say
from prism_core.errors import PrismError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TRY_AGAIN = 75
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="prism",
    help="A queue-backed pool of CPU inference workers for GGUF models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (
    pool.serve,
    pool.worker,
    gateway.gateway,
    local.run,
    requests.chat,
    requests.submit,
    requests.tail,
    requests.cancel,
    pool.top,
    backlog.backlog,
    pool.drain,
    doctor.doctor,
):
    app.command()(cast("Callable[..., None]", command))
app.command("workers")(pool.workers_table)
app.add_typer(models.app, name="models")
app.add_typer(batch.app, name="batch")
app.add_typer(bench.app, name="bench")


def main() -> None:
    """Runs the command line; never shows a traceback for a user's mistake."""
    sys.exit(run())


def run() -> int:
    try:
        app()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return EXIT_FAILED
    except PrismError as error:
        say(str(error))
        return exit_code(error)
    return 0


def exit_code(error: PrismError) -> int:
    return EXIT_TRY_AGAIN if type(error).__name__ == "BrokerUnavailable" else EXIT_FAILED
