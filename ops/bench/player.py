"""One side of `prism bench engine`, alone in its process: it loads a model and answers timed orders on standard input.

An order is a JSON line; so is its answer. Orders: {"do": "prefill", "tokens": n}, {"do": "decode", "tokens": n,
"depth": d}, {"do": "memory"} and, of the peer alone, {"do": "slots", "prompts": [[ids]], "tokens": n, "slots": k}. Run
as `python -m ops.bench.player SIDE MODEL THREADS`; the side `llama.cpp` needs only this file's folder and llama_cpp, so
it may be another interpreter.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any, Protocol

import numpy as np

CONTEXT_TOKENS = 2048
SLOTS = 16
"""The most sequences in one batch of the peer's."""
SEED = 20261130


class Side(Protocol):
    """What is measured: tokens go in, nothing else is counted."""

    vocab: int

    def reset(self) -> None:
        """Forget everything."""

    def prefill(self, tokens: list[int]) -> None:
        """Take a prompt, with logits of its last token."""

    def step(self, token: int) -> None:
        """One decode step."""


class Prism:
    """Our engine, by the same calls that the Runtime makes."""

    def __init__(self, path: str, threads: int) -> None:
        import prism_core

        self.model = prism_core.open_model(path, threads=threads, context_tokens=CONTEXT_TOKENS)
        self.decoder = self.model.decoder()
        self.vocab = self.decoder.vocab_size
        self.logits = np.empty(self.vocab, np.float32)

    def reset(self) -> None:
        self.decoder.reset()

    def prefill(self, tokens: list[int]) -> None:
        for at in range(0, len(tokens) - 1, 512):
            self.decoder.ingest_block(tokens[at : min(at + 512, len(tokens) - 1)], lambda: None)
        self.step(tokens[-1])

    def step(self, token: int) -> None:
        self.decoder.evaluate_into(token, self.logits)


class LlamaCpp:
    """The peer, by its C interface, so that no Python of its own is in the way."""

    def __init__(self, path: str, threads: int) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self.lib: Any = llama_cpp
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(path.encode(), self.lib.llama_model_default_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {path}")
        params = self.lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = CONTEXT_TOKENS, 512, 512
        params.n_threads = params.n_threads_batch = threads
        params.n_seq_max, params.kv_unified = SLOTS, True
        self.context = self.lib.llama_init_from_model(self.model, params)
        self.memory = self.lib.llama_get_memory(self.context)
        self.vocab = int(self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model)))

    def reset(self) -> None:
        self.lib.llama_memory_clear(self.memory, True)

    def prefill(self, tokens: list[int]) -> None:
        for at in range(0, len(tokens), 512):
            self._decode(tokens[at : at + 512])

    def step(self, token: int) -> None:
        self._decode([token])

    def slots(self, prompts: list[list[int]], tokens: int, slots: int) -> float:
        """Seconds to give each prompt `tokens` greedy tokens, `slots` sequences in one batch as the server does it.

        A server would also parse, tokenize, detokenize and send: this is its upper bound.
        """
        began = time.perf_counter()
        for at in range(0, len(prompts), slots):
            self.reset()
            wave = prompts[at : at + slots]
            for slot, prompt in enumerate(wave):
                self._decode_batch(
                    [(token, position, slot) for position, token in enumerate(prompt)], [len(prompt) - 1]
                )
                wave[slot] = [*prompt, self._best(len(prompt) - 1)]
            for _ in range(tokens - 1):
                batch = [(sequence[-1], len(sequence) - 1, slot) for slot, sequence in enumerate(wave)]
                self._decode_batch(batch, list(range(len(wave))))
                for slot, sequence in enumerate(wave):
                    sequence.append(self._best(slot))
        return time.perf_counter() - began

    def _best(self, index: int) -> int:
        """The highest logit at a place of the last batch."""
        row = self.lib.llama_get_logits_ith(self.context, index)
        return int(np.ctypeslib.as_array(row, (self.vocab,)).argmax())

    def _decode_batch(self, entries: list[tuple[int, int, int]], wanted: list[int]) -> None:
        """One batch of (token, position, sequence), with logits where `wanted`."""
        batch = self.lib.llama_batch_init(len(entries), 0, 1)
        batch.n_tokens = len(entries)
        for at, (token, position, sequence) in enumerate(entries):
            batch.token[at], batch.pos[at], batch.n_seq_id[at] = token, position, 1
            batch.seq_id[at][0], batch.logits[at] = sequence, at in wanted
        status = self.lib.llama_decode(self.context, batch)
        self.lib.llama_batch_free(batch)
        if status != 0:
            raise SystemExit("llama.cpp could not decode")

    def _decode(self, tokens: list[int]) -> None:
        array = (self.lib.llama_token * len(tokens))(*tokens)
        if self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(array, len(tokens))) != 0:
            raise SystemExit("llama.cpp could not decode")


SIDES: dict[str, type[Prism] | type[LlamaCpp]] = {"prism": Prism, "llama.cpp": LlamaCpp}


def perform(side: Side, order: dict[str, Any]) -> dict[str, Any]:
    """Carry out one order; the answer's numbers are tokens per second, GB/s or bytes."""
    rng = np.random.default_rng(SEED)
    if order["do"] == "prefill":
        tokens = rng.integers(0, side.vocab, order["tokens"]).tolist()
        side.reset()
        began = time.perf_counter()
        side.prefill(tokens)
        return {"tokens_per_second": len(tokens) / (time.perf_counter() - began)}
    if order["do"] == "decode":
        tokens = rng.integers(0, side.vocab, order["depth"] + order["tokens"] + 1).tolist()
        side.reset()
        side.prefill(tokens[: order["depth"] + 1])
        began = time.perf_counter()
        for token in tokens[order["depth"] + 1 :]:
            side.step(token)
        return {"tokens_per_second": order["tokens"] / (time.perf_counter() - began)}
    if order["do"] == "slots" and isinstance(side, LlamaCpp):
        return {"seconds": side.slots(order["prompts"], order["tokens"], order["slots"])}
    if order["do"] == "memory":
        return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    raise SystemExit(f"unknown order {order}")


def main() -> None:
    name, path, threads = sys.argv[1:4]
    began = time.perf_counter()
    side: Side = SIDES[name](path, int(threads))
    side.prefill([1, 2])
    print(json.dumps({"ready_seconds": time.perf_counter() - began}), flush=True)
    for line in sys.stdin:
        print(json.dumps(perform(side, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
