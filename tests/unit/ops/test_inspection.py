"""`prism models inspect` shows what a file says of itself, and a terminal shows no more than that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ops.bench import synthetic
from ops.cli.models import inspect


def test_a_name_that_commands_a_terminal_is_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "a\x1b[2J\x1b]0;owned\x07\nruns: False"
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1, vocab=400, extra={"general.name": name})
    inspect(str(path), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert all(line.isprintable() for line in lines)
    assert f"name: {name!r}" in lines
    assert "runs: True" in lines
    inspect(str(path), as_json=True)
    assert json.loads(capsys.readouterr().out)["name"] == name


def test_a_file_that_does_not_run_is_described_and_not_hashed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> str:
        raise AssertionError("read to its end for a digest that nobody needs")

    monkeypatch.setattr("prism_core.gguf.file.sha256_of", fail)
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1, vocab=400, extra={"qwen3.block_count": 7})
    inspect(str(path), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "qwen3"
    assert report["runs"] is False
    assert "lacks tensor blk.1.attn_norm.weight" in report["why_not"]
