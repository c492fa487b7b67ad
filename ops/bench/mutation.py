"""Mutation check: does a test fail for every small mistake that could be made in the Runtime?

    python -m ops.bench.mutation [--module prism_core.transaction ...] [--sample 100] [--seed 1] [--jobs 2] [--list]

One change at a time is made to a module's syntax tree: another comparison, `and` for `or`, a dropped `not`, another
operator, another number, a swapped branch, a statement left out, None for a returned value. Each mutant runs the tests
in a forked process of its own, the quick files first; one that fails, does not import, or hangs is killed. Messages,
annotations and the docstrings are not mutated. Survivors are printed with file, line and change. All of the Runtime's
mutants take some twenty minutes on two processors.

Nothing on disk is changed. It needs a system with `fork`.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TESTS = ROOT / "tests" / "unit" / "runtime"
MODULES = [
    f"prism_core.{name}"
    for name in ("runtime", "transaction", "conversation", "prefixes", "validation", "limits", "timings")
]
QUICK = [
    "golden_traces",
    "prefixes",
    "requests",
    "extensions",
    "copy_back",
    "one_at_a_time",
    "refusals",
    "decoder_base",
]
THOROUGH = ["memory", "selection", "interruptions", "any_instruction"]
SAMPLERS = [f"prism_core.{name}" for name in ("temperature", "penalties", "sampling", "candidates")]
"""Modules that are checked only when named, by other tests."""
SAMPLER_TESTS = (["sampling", "copy_back"], ["drawing", "selection", "memory"])
NOTHING_RAN = (3, 4, 5)  # pytest's exit codes for an internal error, a wrong call and no test at all
SLOWEST = 10.0  # how many times the unchanged tests' time a mutant may take before it counts as hanging

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
STATEMENTS = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Raise, ast.Delete)


@dataclass(frozen=True)
class Mutant:
    """One changed module, ready to run."""

    module: str
    path: Path
    line: int
    change: str
    code: CodeType

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.change}"


def short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else text[:67] + "..."


def alternatives(node: ast.AST, *, in_function: bool) -> Iterator[ast.AST]:
    """What could stand in the place of `node`."""
    changed: Any
    if isinstance(node, ast.Compare):
        for at, op in enumerate(node.ops):
            for other in COMPARISONS.get(type(op), ()):
                changed = copy.deepcopy(node)
                changed.ops[at] = other()
                yield changed
    elif isinstance(node, ast.BoolOp):
        changed = copy.deepcopy(node)
        changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield changed
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield node.operand
    elif isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        changed = copy.deepcopy(node)
        changed.op = OPERATORS[type(node.op)]()
        yield changed
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        yield ast.IfExp(node.test, node.orelse, node.body)
    elif isinstance(node, ast.If) and not isinstance(node.test, (ast.Compare, ast.UnaryOp)):  # those change themselves
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed
    elif isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield ast.Return(ast.Constant(None))
    if in_function and isinstance(node, STATEMENTS) and not is_pointless(node):
        yield ast.Pass()


def is_pointless(node: ast.AST) -> bool:
    """Whether leaving the statement out says nothing: a docstring, or a local name that is then missing."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Name) for target in node.targets)
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def places(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, bool]]:
    """(parent, field, index or None, node, in a function?) of every node that may be changed."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "type_comment", "decorator_list", "bases"):
            continue
        inside = in_function or isinstance(tree, (ast.FunctionDef, ast.Lambda))
        for index, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(node, ast.AST) or isinstance(node, ast.JoinedStr):
                continue
            yield tree, field, index, node, inside
            yield from places(node, inside)


def mutants_of(module: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    path = ROOT / (module.replace(".", "/") + ".py")
    tree = ast.parse(path.read_text())
    found = []
    for parent, field, index, node, inside in list(places(tree)):
        for other in alternatives(node, in_function=inside):
            replace(parent, field, index, other)
            ast.copy_location(other, node)
            change = f"`{short(node)}` became `{short(other)}`"
            if isinstance(node, ast.If):
                change = f"`if {short(node.test)}` was negated"
            code = compile(ast.fix_missing_locations(tree), str(path), "exec")
            replace(parent, field, index, node)
            found.append(Mutant(module, path, getattr(node, "lineno", 0), change, code))
    return sorted(found, key=lambda mutant: mutant.line)


def replace(parent: ast.AST, field: str, index: int | None, node: ast.AST) -> None:
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports a mutant in the place of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != self.mutant.module:
            return None
        return importlib.util.spec_from_file_location(name, self.mutant.path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self.mutant.code, module.__dict__)


def tests_pass(mutant: Mutant | None, files: list[str], limit_s: float) -> bool:
    """Whether the test files pass, in a child process; False if it takes longer than the limit."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(run_tests(mutant, files))
        finally:
            os._exit(70)
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            if code in NOTHING_RAN:
                raise SystemExit(f"pytest ran nothing (exit code {code}): {', '.join(files)} in {TESTS}")
            return code == 0
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def run_tests(mutant: Mutant | None, files: list[str]) -> int:
    """In the child: the exit code of pytest, with the mutant in place."""
    import pytest

    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.chdir(ROOT)
    if mutant is not None:
        sys.meta_path.insert(0, Changed(mutant))
    paths = [str(TESTS / f"test_{name}.py") for name in files]
    options = ["-x", "-q", "-m", "not full", "-p", "no:cacheprovider", "--tb=no", "--no-header", "-o", "addopts="]
    return int(pytest.main([*options, "--import-mode=importlib", *paths]))


def check(mutants: list[Mutant], jobs: int) -> list[Mutant]:
    """The mutants that survive."""
    limits = {}
    for files in sorted({tuple(files) for mutant in mutants for files in tests_of(mutant)}):
        start = time.monotonic()
        if not tests_pass(None, list(files), 600):
            raise SystemExit(f"the tests fail without any change: {', '.join(files)}")
        limits[files] = SLOWEST * (time.monotonic() - start) + 5
    survivors = []
    global _checked
    _checked = mutants, limits
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        for at, alive in enumerate(pool.imap(_survives, range(len(mutants)))):
            if alive:
                survivors.append(mutants[at])
                print(f"survived: {mutants[at]}", flush=True)
            if sys.stderr.isatty():
                print(f"\r{at + 1} of {len(mutants)}", end="", file=sys.stderr, flush=True)
    return survivors


def tests_of(mutant: Mutant) -> tuple[list[str], list[str]]:
    """The test files that may notice a mutant: quick ones, and thorough ones."""
    return SAMPLER_TESTS if mutant.module in SAMPLERS else (QUICK, THOROUGH)


_checked: tuple[list[Mutant], dict[tuple[str, ...], float]]
"""What a worker is to look at; it gets it by the fork, because code cannot be sent."""


def _survives(number: int) -> bool:
    mutants, limits = _checked
    return all(tests_pass(mutants[number], files, limits[tuple(files)]) for files in tests_of(mutants[number]))


def main(arguments: list[str] | None = None) -> float:
    """Prints the survivors and the share of killed mutants, and returns that share."""
    parser = argparse.ArgumentParser(description="Mutation check of the Runtime's modules.")
    parser.add_argument("--module", action="append", help="to mutate; may be repeated (default: the Runtime's)")
    parser.add_argument("--sample", type=int, help="check only so many, chosen by the seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args(arguments)
    mutants = [mutant for module in options.module or MODULES for mutant in mutants_of(module)]
    if options.sample is not None and options.sample < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.sample)
    if options.list:
        print(*mutants, sep="\n")
        return 0.0
    # Loaded before the forks, so that no child pays for them; the engine itself is imported by each child.
    import hypothesis.stateful  # noqa: F401
    import numpy as np  # noqa: F401
    import pytest  # noqa: F401

    print(f"seed {options.seed}: {len(mutants)} mutants", flush=True)
    survivors = check(mutants, options.jobs)
    share = 1 - len(survivors) / max(1, len(mutants))
    print(f"killed {len(mutants) - len(survivors)} of {len(mutants)} ({share:.1%})")
    return share


if __name__ == "__main__":
    main()
