"""The builder in which a model file writes its equations: it turns them into phases of operations on named buffers.

A graph is symbolic. It knows which tensors it reads (and checks their shapes), which float32 buffers it needs and in
which order the operations run, but holds no address: `assembly.py` turns it into the table that `kernels/program.py`
interprets.

Invariant: the operations of a phase either work token by token (a chain: token t of one needs nothing but token t of
those before it) or write disjoint outputs (a split). So a phase may be shared by any number of threads, and any
number of tokens may go through it at once, without changing a single bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from prism_core.errors import ModelError
from prism_core.models.hyper import MIN_FACTOR, Hyper, Rope
from prism_core.models.rotation import Rotation
from prism_core.models.symbols import (
    BLOCKS,
    Argument,
    Buffer,
    CacheLayer,
    Encoded,
    Encoder,
    FamilyEntry,
    Operation,
    PageOffset,
    Partials,
    Phase,
    Stride,
    TensorUse,
    Weight,
    Workspace,
    round_up,
)

if TYPE_CHECKING:
    from prism_core.kernels.coding import Coding

PLAIN = "f32"
"""The coding that is the vector itself."""
ALL_TOKENS = 1 << 40
"""A unit span that makes one unit cover every token of a call."""
STATE_BYTES = 128
"""Of one row of attention: its maximum and sums; or 32 scores."""
QUERIES_PER_UNIT = 16
"""Consecutive queries of one kv head's group that attention handles together."""


@dataclass
class Graph:
    """The phases of one model.

    `shapes`: the file's tensors, name -> ne; `coding_of`: tensor name -> the coding that its family reads.
    """

    hyper: Hyper
    shapes: Mapping[str, Sequence[int]]
    coding_of: Callable[[str], Coding]
    rotation: Rotation
    named_tokens: int
    """Ids at and above this pad the vocabulary: their logits are masked."""
    phases: list[Phase] = field(default_factory=list)
    tensors: dict[str, TensorUse] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    """Buffer name -> the widest use of it."""
    encodings: set[Encoded] = field(default_factory=set)
    cache: list[CacheLayer] = field(default_factory=list)
    partial_bytes: int = 0
    """What one segment of a token's keys leaves, all kv heads of a layer."""
    workspace_bytes: int = 0
    """Scratch that an operation may ask for, for each thread."""
    state_words: int = 0
    """Float32 words of recurrent state of one sequence."""
    ingest_phases: int = 0
    """Phases [0, ingest_phases) leave the KV cache and the state complete: enough where no logits are wanted."""
    ignored: list[str] = field(default_factory=list)
    """Tensors that the architecture knows and does not need."""
    _fresh: set[tuple[str, str]] = field(default_factory=set)
    """(buffer, coding or rotation) pairs that hold what the buffer holds now."""

    # -- tensors ------------------------------------------------------------------------------------------------

    def has(self, name: str) -> bool:
        """Whether the file has this tensor."""
        return name in self.shapes

    def matrix(self, name: str, rows: int, cols: int) -> Weight:
        """A matrix of `rows` outputs and `cols` inputs (ne = [cols, rows])."""
        self._claim(name, (cols, rows), TensorUse(rows, cols, matrix=True))
        return Weight(name)

    def vector(self, name: str, *ne: int, low: float = -math.inf, high: float = math.inf) -> Weight:
        """A small tensor, read as float32, whose values must lie in [low, high]."""
        self._claim(name, ne, TensorUse(1, int(np.prod(ne)), matrix=False, low=low, high=high))
        return Weight(name)

    def _claim(self, name: str, ne: tuple[int, ...], use: TensorUse) -> None:
        found = self.shapes.get(name)
        if found is None:
            raise ModelError(f"the file lacks tensor {name}, which architecture {self.hyper.architecture} needs")
        if _squeezed(found) != _squeezed(ne):
            raise ModelError(f"tensor {name} has shape {_text(found)} where the hyperparameters say {_text(ne)}")
        self.tensors[name] = use

    def refuse_unread(self) -> None:
        """Raise `ModelError` if the file has a tensor that no operation reads: running without it would be wrong."""
        unread = sorted(set(self.shapes) - set(self.tensors) - set(self.ignored))
        if unread:
            more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
            raise ModelError(
                f"the file has tensor {_shown(unread[0])}{more}, which architecture {self.hyper.architecture} does not "
                "know"
            )

    # -- buffers and phases -------------------------------------------------------------------------------------

    def buffer(self, name: str, width: int) -> Buffer:
        """The buffer of that name, at least this wide."""
        self.widths[name] = max(width, self.widths.get(name, 0))
        return Buffer(name, width)

    def chain(self, kernel: str, *arguments: Argument, writes: Buffer | None = None) -> None:
        """Append an operation that works token by token to the open chain, or open one."""
        if not self.phases or self.phases[-1].split:
            self.phases.append(Phase([], split=False))
        self.phases[-1].operations.append(Operation(kernel, arguments))
        self._changed(writes)

    def split(self, operations: Sequence[Operation], writes: Sequence[Buffer] = ()) -> None:
        """A phase of its own: operations with disjoint outputs, shared out by units."""
        self.phases.append(Phase(list(operations), split=True))
        for buffer in writes:
            self._changed(buffer)

    def _changed(self, buffer: Buffer | None) -> None:
        if buffer is not None:
            self._fresh = {pair for pair in self._fresh if pair[0] != buffer.name}

    # -- the vocabulary of the model files ----------------------------------------------------------------------

    def embed(self) -> Buffer:
        """x = the embedding of each token."""
        name, width = "token_embd.weight", self.hyper.width
        table = self.matrix(name, self.hyper.vocab, width)
        x = self.buffer("x", width)
        self.chain("embed", FamilyEntry(name, "row"), table, self.hyper.vocab, width, x, x.pitch, writes=x)
        signs = self.rotation.embedding_signs(name, width)
        if signs is not None:
            self.chain("unrotate", x, x.pitch, width, self.rotation.block, signs, writes=x)
        return x

    def scale(self, x: Buffer, factor: float) -> None:
        """x *= factor."""
        self.chain("scale", x, x.pitch, x.width, float(factor), writes=x)

    def add(self, x: Buffer, y: Buffer) -> None:
        """x += y."""
        self.chain("add", x, x.pitch, y, y.pitch, x.width, writes=x)

    def bias(self, x: Buffer, name: str, *, required: bool = False) -> None:
        """x += vector, where the file has it."""
        if required or self.has(name):
            self.chain("add", x, x.pitch, self.vector(name, x.width), 0, x.width, writes=x)

    def rms_norm(self, x: Buffer, weight: str, into: str = "normed") -> Buffer:
        """x / sqrt(mean(x^2) + eps) * weight, over the whole row."""
        out = self.buffer(into, x.width)
        self._norm(x, out, weight, x.width, 1, x.width)
        return out

    def head_norm(self, x: Buffer, weight: str, heads: int, stride: int) -> None:
        """The same over each head's head_dim elements, in place; `stride` floats from head to head."""
        self._norm(x, x, weight, self.hyper.head_dim, heads, stride)

    def _norm(self, x: Buffer, out: Buffer, weight: str, dim: int, heads: int, stride: int) -> None:
        scale = self.vector(weight, dim)
        self.chain("rms_norm", x, x.pitch, out, out.pitch, scale, dim, heads, stride, float(self.hyper.eps), writes=out)

    def norm_of(self, x: Buffer, weight: str, dim: int, heads: int) -> None:
        """RMS norm of `heads` runs of `dim` values, in place."""
        self._norm(x, x, weight, dim, heads, dim)

    def linear(self, x: Buffer, *outputs: tuple[str, str, int]) -> list[Buffer]:
        """W x for each (tensor, buffer, rows): the matrices share one phase, and one encoding of x per coding."""
        operations, results = [], []
        for name, into, rows in outputs:
            out = self.buffer(into, rows)
            operations.append(self._product("matmul", x, name, rows, out, out.pitch))
            results.append(out)
        self.split(operations, writes=results)
        return results

    def _product(self, kernel: str, x: Buffer, name: str, rows: int, *output: Argument) -> Operation:
        weight = self.matrix(name, rows, x.width)
        source = self._encode(self._rotate(x, name), self.coding_of(name))
        arguments = (FamilyEntry(name, "matmul"), weight, rows, x.width, source, Stride(source), *output)
        return Operation(kernel, arguments, span=ALL_TOKENS, tiles_of=name)

    def _rotate(self, x: Buffer, name: str) -> Buffer:
        """H(s * P(x)) where tensor `name` is declared rotated, else x; computed once per value of x."""
        step = self.rotation.forward(name, x.width)
        if step is None:
            return x
        out = self.buffer(f"{x.name}.{step.key}", x.width)
        if (x.name, step.key) not in self._fresh:
            self.chain(
                "rotate", x, x.pitch, out, out.pitch, x.width, self.rotation.block, step.signs,
                step.groups, step.repeats, step.head_width, writes=out,
            )  # fmt: skip
            self._fresh.add((x.name, step.key))
        return out

    def _encode(self, x: Buffer, coding: Coding) -> Encoded:
        encoded = Encoded(x, coding)
        self.encodings.add(encoded)
        if coding.name != PLAIN and (x.name, coding.name) not in self._fresh:
            if x.width % coding.block:
                raise ModelError(f"rows of {x.width} values are not whole blocks of {coding.block}")
            self.chain("encode", Encoder(coding), x, 4 * x.pitch, x.width, encoded, Stride(encoded))
            self._fresh.add((x.name, coding.name))
        return encoded

    def gated(self, activation: str, gate: Buffer, up: Buffer) -> Buffer:
        """gate = activation(gate) * up, for `silu` or `gelu` (its tanh form)."""
        self.chain(f"{activation}_multiply", gate, gate.pitch, up, up.pitch, gate.width, writes=gate)
        return gate

    def rope_table(self, rope: Rope, name: str = "rope", *, divisors: str = "") -> Buffer:
        """For each token the cosines, then the sines, of its dims/2 angles, times the magnitude.

        `divisors`: a tensor that divides the angles, where the file has it.
        """
        pairs = rope.dims // 2
        factors: Argument = 0
        if divisors and self.has(divisors):
            factors = self.vector(divisors, pairs, low=MIN_FACTOR, high=1 / MIN_FACTOR)
        table = self.buffer(name, rope.dims)
        frequencies = np.array(rope.frequencies(), dtype=np.float64)
        self.chain("rope_table", table, table.pitch, frequencies, factors, pairs, float(rope.magnitude), writes=table)
        return table

    def rope(self, x: Buffer, table: Buffer, heads: int, stride: int, *, interleaved: bool = False) -> None:
        """Turn the leading pairs of each head: (2i, 2i+1) when interleaved, else (i, i + dims/2)."""
        kernel = "rope_interleaved" if interleaved else "rope_halves"
        self.chain(kernel, x, x.pitch, table, table.pitch, table.width // 2, heads, stride, writes=x)

    def attention(
        self, q: Buffer, k: Buffer, v: Buffer, *, layer: int, scale: float, q_stride: int = 0, window: int = 0
    ) -> Buffer:
        """softmax(scale q K + mask) V for each head, after k and v have joined the cache.

        `q_stride`: floats from one head of q to the next (default head_dim). `window`: a query at i sees the keys j
        with i - j < window (0: all earlier ones).
        """
        dim, heads, kv_heads = self.hyper.head_dim, self.hyper.heads[layer], self.hyper.kv_heads[layer]
        offset = PageOffset(sum(known.elements for known in self.cache))
        cached = CacheLayer(kv_heads, dim)
        self.cache.append(cached)
        row, group = cached.value_row, heads // kv_heads
        work = self.workspace(attention_workspace(QUERIES_PER_UNIT * group, row))
        partial = group * (4 * row + 2 * STATE_BYTES)
        self.partial_bytes = max(self.partial_bytes, kv_heads * partial)
        for buffer in (q, k, v):
            self.watch(buffer)
        self.chain("store_kv", k, k.pitch, v, v.pitch, offset, kv_heads, dim, row)
        self.ingest_phases = len(self.phases)
        out = self.buffer("attended", heads * dim)
        arguments: tuple[Argument, ...] = (
            q, q.pitch, q_stride or dim, out, out.pitch, offset, kv_heads, group, dim, row, window, float(scale),
            QUERIES_PER_UNIT, *work, Partials(), partial,
        )  # fmt: skip
        self.split([Operation("attention", arguments, kv_heads, BLOCKS)], writes=[out])
        self.chain("join_segments", out, kv_heads, group, dim, row, Partials(), partial, *work, window)
        return out

    def watch(self, x: Buffer) -> None:
        """End the step with an error where a value of x is too large to go on with; norms and `gated` do so anyway."""
        self.chain("watch", x, x.pitch, x.width)

    def workspace(self, size: int) -> tuple[Workspace, int]:
        """Scratch of `size` bytes for each thread: its address, and the bytes."""
        size = round_up(size, 64)
        self.workspace_bytes = max(self.workspace_bytes, size)
        return Workspace(), size

    def state(self, words: int) -> int:
        """Reserve float32 words of recurrent state; their offset. Ingesting must reach at least the next phase."""
        offset = self.state_words
        self.state_words += round_up(words, 16)
        return offset

    def recurrent(self, operation: Operation, writes: Buffer) -> None:
        """A phase that advances recurrent state."""
        self.split([operation], writes=[writes])
        self.ingest_phases = len(self.phases)

    def head(self, x: Buffer, *, softcap: float = 0.0) -> None:
        """logits = head . (rms(x) * output_norm), of the call's last token; the embedding table where tied."""
        normed = self.rms_norm(x, "output_norm.weight")
        name = "output.weight" if self.has("output.weight") else "token_embd.weight"
        self.split([self._product("head", normed, name, self.hyper.vocab)])
        self.split([Operation("finish_logits", (self.hyper.vocab, self.named_tokens, float(softcap)), span=ALL_TOKENS)])


def attention_workspace(rows: int, row: int) -> int:
    """Bytes of scratch for `rows` query rows: queries, sums and states of all segments, then those of one segment and
    its scores."""
    return rows * (12 * row + 3 * STATE_BYTES)


def _squeezed(shape: Sequence[int]) -> list[int]:
    """The shape without trailing ones: writers differ about them."""
    dims = [int(n) for n in shape]
    while len(dims) > 1 and dims[-1] == 1:
        dims.pop()
    return dims


def _shown(name: str) -> str:
    """A name out of the file, on one line whatever is in it."""
    return name if name.isprintable() else repr(name)


def _text(shape: Sequence[int]) -> str:
    return "[" + ", ".join(str(int(n)) for n in shape) + "]"
