"""Checks of what callers pass in. A refusal is an `InvalidRequest` that names the argument, the value and the limit.

Nothing is touched or kept: sequences are copied, and an endless one is read no further than its limit. An integer is
whatever Python can use as an index, numpy's integers too, but never a bool: a flag among token ids is a mistake.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice, pairwise
from numbers import Real
from reprlib import Repr
from typing import Any

import numpy as np
import numpy.typing as npt

from prism_core.errors import InvalidRequest
from prism_core.limits import (
    MAX_CHECKPOINTS,
    MAX_CONTEXT_TOKENS,
    MAX_PREFILL_BLOCK_TOKENS,
    MAX_STOP_TOKENS,
    MAX_VOCAB,
    Generation,
    Limits,
    Prefill,
)
from prism_core.timings import Timings

IntArray = npt.NDArray[np.int32]


class _Brief(Repr):
    """Cuts long values. An integer of thousands of digits, which Python refuses to write out, is told by its bits."""

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"<integer of {x.bit_length()} bits>"


short = _Brief().repr


def as_integer(value: object) -> int | None:
    """`value` as a Python int, or None if it is no integer (a bool is none)."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def any_integer(name: str, value: object) -> int:
    """`value` as an int of any size, else `InvalidRequest`."""
    whole = as_integer(value)
    if whole is None:
        raise InvalidRequest(f"{name} must be an integer, not {short(value)}")
    return whole


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int in low..high (no upper limit: None), else `InvalidRequest`."""
    whole = any_integer(name, value)
    if whole < low or (high is not None and whole > high):
        limit = f"at least {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{name} is {short(whole)}, but must be {limit}")
    return whole


def number(name: str, value: Any) -> float:
    """`value` as a float, infinities included, else `InvalidRequest`."""
    if isinstance(value, bool) or not isinstance(value, Real) or value != value:
        raise InvalidRequest(f"{name} must be a number, not {short(value)}")
    return nearest_float(value)


def nearest_float(value: Any) -> float:
    """A real number as a float; an infinity if no float is so large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def clock_seconds(value: object) -> Real | None:
    """A deadline as a number to compare a clock's float with; None if it is no number, which `number` refuses.

    A narrow number of numpy becomes one of Python: beside it, numpy would round the clock's reading to its width.
    """
    if isinstance(value, np.floating):
        value = value.item()
    return value if isinstance(value, Real) and not isinstance(value, bool) else None


def instance(name: str, value: object, kind: type) -> None:
    """`InvalidRequest` unless `value` is a `kind`."""
    if not isinstance(value, kind):
        raise InvalidRequest(f"{name} must be a {kind.__name__}, not {short(value)}")


def optional_callable(name: str, value: object) -> None:
    """`InvalidRequest` unless `value` is None or can be called."""
    if value is not None and not callable(value):
        raise InvalidRequest(f"{name} must be callable or None, not {short(value)}")


def integers(name: str, values: Any, most: int, *, unordered: bool = False) -> list[int]:
    """A copy of at most `most` integers of a sequence, a 1-D integer array or, if `unordered`, a set."""
    if hasattr(values, "__array__") or isinstance(values, memoryview):
        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise InvalidRequest(
                f"{name} must be a 1-D array of integers, not {array.ndim}-D of {array.dtype.name}: {short(values)}"
            )
        return list(array[:most].tolist())
    kind = type(values)
    sequence = hasattr(kind, "__len__") and hasattr(kind, "__getitem__") and not isinstance(values, Mapping)
    if not (sequence or (unordered and isinstance(values, Set))):
        raise InvalidRequest(f"{name} must be a sequence of integers, not {short(values)}")
    items: list[Any] = list(islice(values, most))
    if set(map(type, items)) <= {int}:
        return items
    return [any_integer(f"{name}[{at}]", item) for at, item in enumerate(items)]


def in_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    """`InvalidRequest` naming the first id outside 0..vocab_size-1."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        at = next(at for at, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"{name}[{at}] is {short(ids[at])}, outside the vocabulary 0..{vocab_size - 1}")


def check_limits(limits: Limits, checkpoint_ceiling: int) -> Limits:
    """The limits as plain integers, else `InvalidRequest`."""
    instance("limits", limits, Limits)
    ceiling = integer("checkpoint_ceiling", checkpoint_ceiling, MAX_CHECKPOINTS)
    return Limits(
        integer("context_tokens", limits.context_tokens, 1, MAX_CONTEXT_TOKENS),
        integer("checkpoints", limits.checkpoints, 0, ceiling),
        integer("checkpoint_bytes", limits.checkpoint_bytes, 1),
    )


def check_decoder(decoder: Any) -> int:
    """The decoder's vocabulary size, 1..1,048,576; `InvalidRequest` for another one or an empty identity."""
    vocab_size = integer("the decoder's vocab_size", decoder.vocab_size, 1, MAX_VOCAB)
    identity = decoder.identity
    if not isinstance(identity, str) or not identity:
        raise InvalidRequest(f"the decoder's identity must be a non-empty text, not {short(identity)}")
    return vocab_size


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a caller gave to `generate`, unchecked (see there)."""

    prompt: Sequence[int] | npt.NDArray[Any]
    options: Generation
    prefill: Prefill
    deadline: float | None
    sampler: Any
    emit: Callable[[int], object] | None
    save_at: Sequence[int]
    keep_saved: bool
    stop_when: Callable[[], object] | None
    on_prefix: Callable[[int], object] | None
    timings: Timings | None


@dataclass(frozen=True, slots=True)
class Request:
    """The checked arguments; `prompt` is a private int32 copy."""

    prompt: IntArray
    max_tokens: int
    stop_tokens: frozenset[int]
    block_tokens: int
    save_at: tuple[int, ...]
    kept: tuple[int, ...]
    """Lengths of which a reused prefix stays."""


def check_request(arguments: Arguments, context_tokens: int, vocab_size: int) -> Request:
    """Step 3 of a request: every argument checked, or `InvalidRequest`."""
    options = arguments.options
    instance("options", options, Generation)
    instance("prefill", arguments.prefill, Prefill)
    max_tokens = integer("max_tokens", options.max_tokens, 1)
    block_tokens = integer("block_tokens", arguments.prefill.block_tokens, 1, MAX_PREFILL_BLOCK_TOKENS)
    prompt = _prompt(arguments.prompt, max_tokens, context_tokens, vocab_size)
    stops = integers("stop_tokens", options.stop_tokens, MAX_STOP_TOKENS + 1, unordered=True)
    if len(stops) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"stop_tokens has {len(options.stop_tokens)} ids, but may have {MAX_STOP_TOKENS} at most")
    in_vocabulary("stop_tokens", stops, vocab_size)
    if arguments.deadline is not None:
        number("deadline", arguments.deadline)
    for name in ("emit", "stop_when", "on_prefix"):
        optional_callable(name, getattr(arguments, name))
    if arguments.timings is not None:
        instance("timings", arguments.timings, Timings)
    if arguments.sampler is not None and not callable(getattr(arguments.sampler, "sample", None)):
        raise InvalidRequest(f"sampler must have a method sample(logits), but is {short(arguments.sampler)}")
    save_at = _save_at(arguments.save_at, len(prompt))
    instance("keep_saved", arguments.keep_saved, bool)
    kept = save_at if arguments.keep_saved else ()
    return Request(np.array(prompt, dtype=np.int32), max_tokens, frozenset(stops), block_tokens, save_at, kept)


def _prompt(values: Any, max_tokens: int, context_tokens: int, vocab_size: int) -> list[int]:
    room = context_tokens - max_tokens
    prompt = integers("prompt", values, max(room, 0) + 1)
    if not prompt:
        raise InvalidRequest("prompt is empty, but must have at least 1 token")
    if len(prompt) > room:
        raise InvalidRequest(
            f"prompt has {len(values)} tokens and max_tokens is {short(max_tokens)}: "
            f"together {short(len(values) + max_tokens)}, "
            f"but context_tokens is {context_tokens}"
        )
    in_vocabulary("prompt", prompt, vocab_size)
    return prompt


def _save_at(values: Collection[int], prompt_tokens: int) -> tuple[int, ...]:
    positions = integers("save_at", values, prompt_tokens)
    for at, position in enumerate(positions):
        integer(f"save_at[{at}]", position, 1, prompt_tokens - 1)
    for at, (before, after) in enumerate(pairwise(positions)):
        if before >= after:
            raise InvalidRequest(f"save_at must strictly increase, but save_at[{at + 1}] is {after} after {before}")
    return tuple(positions)
