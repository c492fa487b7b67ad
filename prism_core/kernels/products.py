"""Matrix products and the logits: the operations that call a weight family's entry."""

from __future__ import annotations

from typing import Any

import numpy as np

from prism_core.kernels.jit import entry
from prism_core.kernels.memory import call_entry, load_f32, store_f32
from prism_core.kernels.words import LOGITS, OPERATION, TOKENS, argument, real, word

MASKED_LOGIT = np.float32(-1e30)
"""The logit of ids that pad the vocabulary: finite, so that a sampler may divide or scale it, and never chosen."""


@entry(OPERATION)
def matmul(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(family entry, weights, rows, cols, activations, their stride, out, out pitch): out = W x for all tokens."""
    weights, rows, cols = argument(operation, 1), argument(operation, 2), argument(operation, 3)
    activations, stride = argument(operation, 4), argument(operation, 5)
    out, pitch, tokens = argument(operation, 6), argument(operation, 7), word(context, TOKENS)
    call_entry(argument(operation, 0), (weights, rows, cols, begin, end, activations, stride, tokens, out, pitch))


@entry(OPERATION)
def head(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(family entry, weights, rows, cols, activations, their stride): logits = W x of the call's last token."""
    weights, rows, cols = argument(operation, 1), argument(operation, 2), argument(operation, 3)
    stride, logits = argument(operation, 5), word(context, LOGITS)
    activations = argument(operation, 4) + (word(context, TOKENS) - 1) * stride
    call_entry(argument(operation, 0), (weights, rows, cols, begin, end, activations, stride, 1, logits, rows))


@entry(OPERATION)
def finish_logits(operation: Any, context: Any, begin: Any, end: Any, thread: Any) -> None:
    """(rows, tokens of the vocabulary, cap): cap * tanh(logit / cap) where cap > 0; padding ids masked."""
    logits, rows, named, cap = word(context, LOGITS), argument(operation, 0), argument(operation, 1), real(operation, 2)
    if cap > 0:
        for i in range(named):
            store_f32(logits + 4 * i, cap * np.tanh(load_f32(logits + 4 * i) / cap))
    for i in range(named, rows):
        store_f32(logits + 4 * i, MASKED_LOGIT)
