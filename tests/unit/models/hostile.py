"""A process that opens files which nobody should trust, one forked child for each: a script, run by test_hostile_files.

A child does what a worker and `prism models inspect` do with a file, under a limit of address space, and says how it
ended. What may come out: the file ran, and float64 equations agree with it, or it was refused with one printable
sentence that begins with its path, or a step was, because its numbers overflow. Anything else (another error, a signal,
memory beyond the limit, no answer in time, numbers that differ) is a finding.

Lines of JSON both ways: {"path", "options", "seconds"} to [kind, text].
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench import synthetic
from ops.inspection import inspect_model
from prism_core import (
    DecoderError,
    Generation,
    InvalidRequest,
    Limits,
    Model,
    ModelError,
    Prefill,
    PrismError,
    Runtime,
    open_model,
)
from tests.unit.engine.stepping import each
from tests.unit.models.float64 import Forward

BUDGET = 192 << 20
"""What a child gives as the memory budget, and its address space beyond what it begins with and the file's map."""
SLACK = 512 << 20
"""Address space for what is no part of the budget: the tokenizer, its copy of the header, one tensor on its way."""
STEPS, COMPARED = 24, 10
BOUND = 3e-4
"""Largest error of float32 weights and cache against float64, of a logit relative to the largest."""
TEXT = "hello wörld 123 <|im_end|> \U0001f600\n\n  x"
CHAT = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi <|im_end|>"}]


def check_sentence(text: str, path: str) -> None:
    assert text.startswith(path), f"no path: {text!r}"
    assert text.isprintable(), f"not one printable line: {text!r}"
    assert len(text) < 1000, f"{len(text)} characters: {text[:200]!r}"


def examine(path: str, options: dict[str, Any]) -> str:
    """All that is done with a file; the text says how far it is from the equations."""
    report = inspect_model(Path(path))
    json.dumps(report)
    if not report["runs"]:
        check_sentence(report["why_not"], path)
    with open_model(path, memory_budget=BUDGET, **options) as model:
        assert report["runs"], f"inspect says that it does not run: {report['why_not']}"
        use_tokenizer(model)
        logits = use_decoder(model)
    return compare(path, logits, options)


def use_tokenizer(model: Model) -> None:
    for special in ("literal", "parse"):
        model.tokenizer.decode(model.tokenizer.encode(TEXT, special=special))
    try:
        model.chat.encode(CHAT)
    except InvalidRequest as refused:
        sentence = str(refused)
        if not sentence.isprintable():
            raise AssertionError(f"not one printable line: {sentence!r}") from refused


def tokens_of(model: Model) -> list[int]:
    count = min(STEPS, model.context_tokens)
    return [int(t) for t in np.random.default_rng(3).integers(0, model.tokenizer.vocab_size, count)]


def use_decoder(model: Model) -> Any:
    """Token by token, then as a block: the same bits; then through a Runtime."""
    ids, decoder = tokens_of(model), model.decoder()
    logits = each(decoder, ids)
    decoder.reset()
    if len(ids) > 1:
        decoder.ingest_block(ids[:-1], lambda: None)
    assert np.array_equal(each(decoder, ids[-1:])[0], logits[-1]), "a block gives other logits than its tokens"
    decoder.reset()
    if len(ids) > 3:
        runtime = Runtime(decoder, Limits(model.context_tokens, 1, 1 << 30))
        runtime.generate(ids[:-3], Generation(3), prefill=Prefill(8))
    return logits


def compare(path: str, logits: Any, options: dict[str, Any]) -> str:
    with open_model(path, exact=True, **options) as model:
        ids, named = tokens_of(model)[:COMPARED], model.tokenizer.vocab_size
        got = each(model.decoder(), ids)[:, :named]
    wanted = Forward(Path(path)).each(ids)[:, :named]
    error = distance(got, wanted)
    if not error < BOUND:
        # A model may be so ill-conditioned that the last bits of its weights matter as much.
        moved = distance(perturbed(path).each(ids)[:, :named], wanted)
        assert error < 10 * moved, f"float32 is {error:.1e} away from the equations; their own rounding, {moved:.1e}"
    return f"{error:.1e}"


def distance(got: Any, wanted: Any) -> float:
    """The largest difference, relative to the largest logit of its position."""
    return float((np.abs(got - wanted).max(axis=1) / np.maximum(np.abs(wanted).max(axis=1), 1e-30)).max())


def perturbed(path: str) -> Forward:
    """The equations, with every weight moved by about half a unit in the last place of float32."""
    forward, draw = Forward(Path(path)), np.random.default_rng(5)
    for name in forward.file.tensors:
        exact = forward.tensor(name)
        forward._matrices[name] = exact * (1 + 2.0**-24 * draw.standard_normal(exact.shape))
    return forward


def child(path: str, options: dict[str, Any], out: int) -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = used + BUDGET + SLACK + min(Path(path).stat().st_size, 1 << 40)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    answer = ("traceback", "")
    try:
        answer = ("ran", examine(path, options))
    except ModelError as error:
        answer = ("refused", str(error))
    except PrismError as error:
        overflows = isinstance(error, DecoderError) and "overflow float32" in str(error)
        answer = ("overflowed" if overflows else type(error).__name__, str(error))
    except BaseException:
        answer = ("traceback", traceback.format_exc()[-1500:])
    os.write(out, json.dumps(answer).encode())
    os._exit(0)


def outcome(path: str, options: dict[str, Any], seconds: float) -> tuple[str, str]:
    """Fork, wait, classify."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(reader)
        child(path, options, writer)
    os.close(writer)
    deadline, said = time.monotonic() + seconds, b""
    while select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]:
        piece = os.read(reader, 1 << 16)
        if not piece:
            break
        said += piece
    else:
        os.kill(process, signal.SIGKILL)
    os.close(reader)
    status = os.waitpid(process, 0)[1]
    if time.monotonic() >= deadline:
        return "hang", f"no answer in {seconds:g} s"
    if not said:
        return "signal", signal.strsignal(os.WTERMSIG(status)) or str(status)
    kind, text = json.loads(said)
    if kind == "refused":
        try:
            check_sentence(text, path)
        except AssertionError as error:
            return "unclear", str(error)
    return kind, text


def warm(folder: Path) -> None:
    """Compile or load the kernels that most files need, so that children find them."""
    small = {"embd": 64, "ffn": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab": 400, "state": 32}
    for architecture in ("llama", "gemma3", "qwen35"):
        layers = 4 if architecture == "qwen35" else 1
        path = synthetic.build(folder / "warm.gguf", architecture, layers=layers, **small)
        for exact in (False, True):
            with open_model(path, exact=exact) as model:
                each(model.decoder(), [1, 2])


def main() -> None:
    warm(Path(sys.argv[1]))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(outcome(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
