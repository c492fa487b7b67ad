"""A model file, ready to run: its tokenizer, its packed weights, and decoders over them.

`open_model` checks everything about a file before it allocates anything for it: container, architecture,
hyperparameters, tensor shapes, rotation, tokenizer, and the memory that the model will need.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from prism_core.candidates import Compiled
from prism_core.engine import ModelDecoder
from prism_core.errors import InvalidRequest, ModelError
from prism_core.gguf import GgufFile, open_gguf
from prism_core.gguf import describe as describe_file
from prism_core.kernels.coding import Coding
from prism_core.kernels.drawing import draw
from prism_core.kernels.families import family_for
from prism_core.kernels.selection import highest
from prism_core.kernels.target import target
from prism_core.kernels.threads import MAX_THREADS
from prism_core.limits import MAX_CONTEXT_TOKENS
from prism_core.machine import memory_bytes, require_room
from prism_core.models import build_graph, check_architecture
from prism_core.models.assembly import Program, Scratch
from prism_core.models.graph import Graph
from prism_core.models.symbols import PAGE_TOKENS
from prism_core.packed import cache_bytes
from prism_core.tokenizer import ChatTemplate, Tokenizer
from prism_core.weights import Layout, Weights, load_weights, packed_type

DEFAULT_CONTEXT_TOKENS = 4096
TILE_TOKENS = 128
"""Most tokens that one prefill call takes through the layers together."""

KERNEL_BYTES = 160 << 20
"""Address space that is asked for before the compiler is: without it, LLVM would end the process."""

Progress = Callable[[str, float], None]


class Model:
    """An open model. Made by `open_model`; `close` it, or use it in a `with` statement."""

    def __init__(
        self, file: GgufFile, graph: Graph, layout: Layout, *, threads: int, context_tokens: int, exact: bool,
        tokenizer: Tokenizer, chat: ChatTemplate,
    ) -> None:  # fmt: skip
        self._file, self._graph, self._layout = file, graph, layout
        self.tokenizer = tokenizer
        self.chat = chat
        self.threads = threads
        self.context_tokens = context_tokens
        self.exact = exact
        self.architecture = file.architecture
        self.vocab_size = graph.hyper.vocab
        self._weights: Weights | None = None
        self._decoders: weakref.WeakSet[ModelDecoder] = weakref.WeakSet()

    @cached_property
    def identity(self) -> str:
        """SHA-256 of the file and the numeric contract: equal identities give bit-equal logits."""
        return f"{self._file.sha256()}+{numeric_contract(self.exact)}"

    @property
    def path(self) -> Path:
        """The file as it was named."""
        return self._file.path

    def load(self, progress: Progress | None = None) -> None:
        """Map (or make) the packed weights. `decoder()` does it when nobody has."""
        if self._weights is None:
            with self._naming_the_file():
                self._file.check_unchanged()
                self._weights = load_weights(self._file, self._layout, progress)

    @contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Errors of loading begin with the file's name, and memory that cannot be had is one of them."""
        try:
            yield
        except MemoryError as error:
            needed = _sum_of(self.memory(), self.context_tokens)
            raise ModelError(f"{self.path}: the system refuses the memory that it needs, {needed}") from error
        except ModelError as error:
            raise _named(self.path, error) from error

    def decoder(self, progress: Progress | None = None) -> ModelDecoder:
        """A new decoder in the empty state; the first one packs weights and compiles kernels, or loads both.

        `progress` is called with what is being done and how much of that is done, 0 to 1.
        """
        self.load(progress)
        assert self._weights is not None
        with self._naming_the_file():
            require_room(KERNEL_BYTES)
            program = Program(
                self._graph,
                self._weights.address,
                self._layout.family,
                tokens=min(TILE_TOKENS, self.context_tokens),
                threads=self.threads,
                context_tokens=self.context_tokens,
                cache_bytes=_cache_bytes(self.exact),
                progress=progress,
            )
            decoder = ModelDecoder(
                program,
                identity=self.identity,
                vocab_size=self.vocab_size,
                page_bytes=page_bytes(self._graph, self.exact),
                state_words=self._graph.state_words,
                context_tokens=self.context_tokens,
                threads=self.threads,
            )
        draw.warm()
        highest.warm()
        Compiled.lend(highest)
        self._decoders.add(decoder)
        return decoder

    def memory(self, context_tokens: int | None = None) -> dict[str, int]:
        """Bytes that one decoder needs at a context, by kind, and their sum."""
        context = context_tokens or self.context_tokens
        return memory_needed(self._graph, self._layout, context, self.threads, self.exact)

    def describe(self) -> dict[str, Any]:
        """What this model is, in plain values."""
        hyper = self._graph.hyper
        return describe_file(self._file) | {
            "identity": self.identity,
            "width": hyper.width,
            "feed_forward": max(hyper.feed_forward),
            "heads": max(hyper.heads),
            "kv_heads": max(hyper.kv_heads),
            "head_dim": hyper.head_dim,
            "vocab_size": self.vocab_size,
            "context_tokens": self.context_tokens,
            "recurrent_state_bytes": 4 * self._graph.state_words,
            "kv_bytes_per_token": page_bytes(self._graph, self.exact) // PAGE_TOKENS,
            "memory": self.memory(),
            "numerics": numeric_contract(self.exact),
            "chat": self.chat.describe(),
            "threads": self.threads,
        }

    def close(self) -> None:
        """Stop all decoders and let go of the file."""
        for decoder in list(self._decoders):
            decoder.close()
        self._file.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_model(
    path: str | os.PathLike[str],
    *,
    threads: int | None = None,
    context_tokens: int | None = None,
    exact: bool = False,
    memory_budget: int | None = None,
) -> Model:
    """Open a GGUF model.

    Args:
        path: the file, or the first shard of a split one.
        threads: threads of a decoder step; None = 1.
        context_tokens: longest conversation; None = the file's own context, at most 4096.
        exact: float32 weights, activations and KV cache: slow, for comparisons.
        memory_budget: bytes that weights, cache and scratch may take together; None = what the machine has, and
            weights that can be shared with other processes do not count.

    Raises:
        ModelError: the file cannot be used, or does not fit the budget. InvalidRequest: an argument out of range.
    """
    threads = _in_range("threads", 1 if threads is None else threads, 1, MAX_THREADS)
    file = open_gguf(Path(path))
    try:
        return _open(file, threads, context_tokens, exact, memory_budget)
    except ModelError as error:
        file.close()
        raise _named(file.path, error) from error
    except MemoryError as error:
        file.close()
        raise ModelError(f"{file.path}: the system refuses the memory for its tokenizer and tables") from error
    except BaseException:
        file.close()
        raise


def _open(
    file: GgufFile, threads: int, context_tokens: int | None, exact: bool, memory_budget: int | None
) -> Model:  # fmt: skip
    def coding_of(name: str) -> Coding:
        return family_for(packed_type(file.tensors[name].type, exact)).coding

    check_architecture(file.architecture)
    tokenizer = Tokenizer.from_metadata(file.metadata)
    chat = ChatTemplate.from_metadata(file.metadata, tokenizer)
    graph = build_graph(file, coding_of, tokenizer.vocab_size)
    longest = min(graph.hyper.context, MAX_CONTEXT_TOKENS)
    if context_tokens is None:
        context_tokens = min(longest, DEFAULT_CONTEXT_TOKENS)
    context_tokens = _in_range("context_tokens", context_tokens, 1, longest)
    layout = Layout(file, graph.tensors, exact=exact)
    _check_budget(memory_needed(graph, layout, context_tokens, threads, exact), context_tokens, memory_budget, exact)
    return Model(
        file, graph, layout, threads=threads, context_tokens=context_tokens, exact=exact, tokenizer=tokenizer, chat=chat
    )


def _check_budget(needed: dict[str, int], context_tokens: int, budget: int | None, exact: bool) -> None:
    """Before anything is mapped or allocated: the sum against the budget, or a process's own part of it against the
    machine."""
    limit, counted, name = budget, needed["total"], "the memory budget of"
    if limit is None:
        limit, name = memory_bytes(), "the machine's memory of"
        if not exact and needed["weights"] <= cache_bytes():
            counted, name = counted - needed["weights"], "the machine's memory, the weights aside, of"
    if limit is not None and counted > limit:
        raise ModelError(f"needs {_sum_of(needed, context_tokens)}, over {name} {limit:,}")


def _sum_of(needed: dict[str, int], context_tokens: int) -> str:
    parts = ", ".join(f"{name} {size:,}" for name, size in needed.items() if name != "total")
    return f"{needed['total']:,} bytes at a context of {context_tokens} tokens ({parts})"


def _named(path: Path, error: ModelError) -> ModelError:
    """The error, beginning with the file's name."""
    return error if str(error).startswith(str(path)) else ModelError(f"{path}: {error}")


def memory_needed(graph: Graph, layout: Layout, context_tokens: int, threads: int, exact: bool) -> dict[str, int]:
    """Bytes by kind: packed weights (shared by the processes of a host), and what each decoder adds."""
    scratch = Scratch(graph, min(TILE_TOKENS, context_tokens), threads, context_tokens).nbytes
    cache = -(-context_tokens // PAGE_TOKENS) * page_bytes(graph, exact)
    parts = {
        "weights": layout.nbytes,
        "kv_cache": cache,
        "recurrent_state": 2 * 4 * graph.state_words,
        "scratch": scratch + 4 * graph.hyper.vocab,
    }
    return parts | {"total": sum(parts.values())}


def page_bytes(graph: Graph, exact: bool) -> int:
    """Bytes of one page of 32 positions."""
    return _cache_bytes(exact) * sum(layer.elements for layer in graph.cache)


def _cache_bytes(exact: bool) -> int:
    return 4 if exact else 2


def numeric_contract(exact: bool) -> str:
    """The part of an identity that says how numbers are rounded."""
    fused = "" if target().fma else ".unfused"
    return ("f32.kv32.1" if exact else "a8.kv16.1") + fused


def _in_range(name: str, value: int, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"{name} must be an integer, not {type(value).__name__}")
    if not low <= value <= high:
        raise InvalidRequest(f"{name} must be in {low}..{high}, not {value}")
    return value
