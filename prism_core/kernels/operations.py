"""Every operation that a graph may name, by that name."""

from __future__ import annotations

from prism_core.kernels import attention, deltanet, elementwise, faults, hadamard, norms, pages, products, rope
from prism_core.kernels.jit import Entry

OPERATIONS: dict[str, Entry] = {
    "add": elementwise.add_rows,
    "attention_f16": attention.attention_f16,
    "attention_f32": attention.attention_f32,
    "convolve": deltanet.convolve,
    "delta_gates": deltanet.delta_gates,
    "delta_scan": deltanet.delta_scan,
    "embed": elementwise.embed,
    "encode": elementwise.encode,
    "finish_logits": products.finish_logits,
    "gelu_multiply": elementwise.gelu_multiply,
    "head": products.head,
    "join_segments": attention.join_segments,
    "matmul": products.matmul,
    "rms_norm": norms.rms_norm,
    "rope_halves": rope.rope_halves,
    "rope_interleaved": rope.rope_interleaved,
    "rope_table": rope.rope_table,
    "rotate": hadamard.rotate,
    "scale": elementwise.scale,
    "sigmoid_gate": deltanet.sigmoid_gate,
    "silu_multiply": elementwise.silu_multiply,
    "store_kv_f16": pages.store_kv_f16,
    "store_kv_f32": pages.store_kv_f32,
    "unit_length": norms.unit_length,
    "unrotate": hadamard.unrotate,
    "watch": faults.watch,
}
