"""What the guides tell people to type works; what they name exists."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from broker.gateway.metrics import exported_names
from ops.diagnosis import diagnose
from tests.unit.deploy.commands import ROOT
from tests.unit.deploy.test_manifests import parses

GUIDES = {path.stem: path.read_text() for path in sorted((ROOT / "ops/deploy").glob("*.md"))}
SOURCES = ("broker", "workers", "prism_core", "ops")


def blocks(text: str) -> list[str]:
    """The lines of indented blocks."""
    return [line.strip() for line in text.splitlines() if line.startswith("    ")]


def commands() -> list[tuple[str, list[str]]]:
    """Every `prism ...` command line, in blocks behind variables, paths and users, and between backquotes."""
    found = []
    for name, text in GUIDES.items():
        lines = [re.sub(r"\s+#.*$|[;|)].*$", "", line) for line in blocks(text)]
        lines += [quoted for quoted in re.findall(r"`(prism [^`]*)`", text) if not re.search(r"[|…]|\.\.\.", quoted)]
        for line in lines:
            command = re.search(r"(?:^|[\s/(])prism ((?!-)[a-z].*)$", line)
            if command and not re.match(r"(useradd|mkdir|chown|docker|docker-compose)\b", line):
                found.append((name, shlex.split(re.sub(r"\$\{[^}]*\}|\b[N]\b", "4", command[1]))))
    return found


@pytest.mark.parametrize(("guide", "words"), commands(), ids=lambda value: " ".join(value) if value else "")
def test_a_command_of_a_guide_is_one_that_prism_takes(guide: str, words: list[str]) -> None:
    parses(words, whole=len(words) > 1)  # a single word in a sentence names the command


def test_the_guides_have_commands_to_check() -> None:
    assert len(commands()) >= 25


@pytest.mark.parametrize("guide", sorted(GUIDES))
def test_the_files_that_a_guide_names_exist(guide: str) -> None:
    links = re.findall(r"\]\(([^)#]+)\)", GUIDES[guide])
    assert links
    for link in links:
        assert (ROOT / "ops/deploy" / link).exists(), link
    for path in re.findall(r"\bops/[\w./-]+\w", GUIDES[guide]):
        assert (ROOT / path.removesuffix("/*")).exists(), path


@pytest.mark.parametrize("guide", sorted(GUIDES))
def test_the_variables_and_metrics_that_a_guide_names_are_known(guide: str) -> None:
    known = "".join(
        path.read_text()
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in (".py", ".sh", ".service", ".yaml", "")
    )
    for variable in set(re.findall(r"\bPRISM_[A-Z_]+\b", GUIDES[guide])):
        assert variable in known, variable
    for metric in set(re.findall(r"\bprism_(?!core|broker\b)[a-z_]+\b", GUIDES[guide])):
        assert metric in exported_names(), metric


def test_the_guide_lists_every_check_of_the_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRISM_HOME", str(tmp_path / "h"))
    monkeypatch.delenv("PRISM_REDIS_URL", raising=False)
    table = GUIDES["guide"].partition("| check | warns of |")[2].partition("\n\n")[0]
    listed = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    assert listed == {check.name for check in diagnose(None, None, lambda *_: None)}


def test_the_scripts_that_people_run_can_be_run() -> None:
    assert os.access(ROOT / "ops/deploy/broker/credentials.sh", os.X_OK)


def test_no_guide_has_a_line_that_is_too_long_to_read() -> None:
    for guide, text in GUIDES.items():
        for line in text.splitlines():
            assert len(line) <= 140 or line.startswith("|"), (guide, line)
