"""Files that a user might be given: whole synthetic models, each with one thing that is odd, extreme or wrong.

A case is a name and a function that writes the file to a path and returns it, or None where the change does not apply.
Nothing here says which of them must be refused: those that run are held against the float64 equations instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ops.bench import synthetic
from ops.bench.synthetic import Typed
from prism_core.gguf import SUPPORTED, open_gguf

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "qwen35")
Case = tuple[str, Callable[[Path], Path | None]]
Tensors = list[Any]
TYPES = [*(kind.name for kind in SUPPORTED), "Q2_0_G128"]

INTEGERS = [0, 1, 2, 3, 7, 33, 64, 1023, 1025, 65536, 2**31, 2**32 - 1, -1, -(2**31), Typed("u64", 2**64 - 1)]
REALS = [0.0, 1e-45, 1e-7, 1.0, 1.0000001, 1e6, 3e38, float("inf"), float("nan"), -1.0]
REALS += [Typed("f64", value) for value in (5e-324, 1e-60, 1 + 2**-52, 1e300)]
ODD = [1.5, "x", "\x1b[2J\n", True, None, Typed("i8", [1, 1]), Typed("f32", []), Typed("string", ["a"])]
INTEGER_KEYS = (
    "block_count", "embedding_length", "feed_forward_length", "context_length", "vocab_size", "attention.head_count",
    "attention.head_count_kv", "attention.key_length", "attention.value_length", "rope.dimension_count",
)  # fmt: skip
REAL_KEYS = (
    "attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scale_linear",
    "rope.scaling.attn_factor",
)  # fmt: skip
OWN_INTEGERS = {
    "gemma3": ("attention.sliding_window", "attention.sliding_window_pattern"),
    "qwen35": (
        "ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size",
        "full_attention_interval", "nextn_predict_layers",
    ),
}  # fmt: skip
OWN_REALS = {"gemma3": ("rope.freq_base_swa", "final_logit_softcapping")}
YARN = ("factor", "attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_beta_fast", "yarn_beta_slow")
TOKENIZER_KEYS = (
    "model", "pre", "tokens", "token_type", "scores", "merges", "bos_token_id", "eos_token_id", "add_bos_token",
)  # fmt: skip
TEMPLATES = [
    "", "{% for", "{{ 1 / 0 }}", "{{ ''.__class__.__mro__ }}", "{{ 'x' * 10 ** 9 }}", "{{ '\\ud800' }}", "{" * 200_000,
    "{% for i in range(10 ** 9) %}{% endfor %}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", 1, "x" * 300_000,
    "{{ '\U0001f600' * 4000000 }}", b"\xed\xa0\x80", "{{ raise_exception('\x1b[2J' + messages[1].content) }}",
]  # fmt: skip


def tiny(path: Path, architecture: str, **options: Any) -> Path:
    """A model of some kilobytes."""
    base = {"layers": 2, "embd": 64, "ffn": 96, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab": 400}
    if architecture == "qwen35":
        base |= {"layers": 4, "key_heads": 1, "value_heads": 2, "state": 32}
    return synthetic.build(path, architecture, **base | options)


def rewritten(path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The file with another list of (name, shape, type id, data)."""
    with open_gguf(path) as file:
        tensors = [(t.name, t.shape, t.type_id, np.array(t.data)) for t in file.tensors.values()]
        keys = dict(file.metadata)
    return synthetic.write_gguf(path, keys, change(tensors))


def hyperparameters() -> Iterator[Case]:
    for a in ARCHITECTURES:
        for keys, values in (
            ([*INTEGER_KEYS, *OWN_INTEGERS.get(a, ())], [*INTEGERS, *ODD]),
            ([*REAL_KEYS, *OWN_REALS.get(a, ())], [*REALS, *ODD]),
            (["rope.scaling.type"], ["yarn", "linear", "none", "", "x" * 100_000, Typed("i32", [1, 2]), *ODD]),
        ):
            for key in keys:
                for value in values:
                    yield f"{a}.{key} = {shown(value)}", with_keys(a, {f"{a}.{key}": value})
        yarn = {f"{a}.rope.scaling.{key}": value for key, value in (("type", "yarn"), ("original_context_length", 64))}
        for key in YARN:
            for value in REALS:
                yield f"{a} yarn {key} = {shown(value)}", with_keys(a, {**yarn, f"{a}.rope.scaling.{key}": value})
    for flags in ([1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1], [1, 1], [0, 1, 0, 1]):
        key = "qwen35.attention.recurrent_layers"
        yield f"recurrent layers {flags}", with_keys("qwen35", {key: np.array(flags, dtype=bool)})
    for key in ("block_count", "nextn_predict_layers", "full_attention_interval"):
        for value in range(1, 9):
            yield f"8 layers, {key} {value}", with_keys("qwen35", {f"qwen35.{key}": value}, layers=8)


def shown(value: Any) -> str:
    return repr(value)[:40]


def with_keys(architecture: str, extra: dict[str, Any], **options: Any) -> Callable[[Path], Path]:
    return lambda path: tiny(path, architecture, extra=extra, **options)


def shapes() -> Iterator[Case]:
    plain: list[dict[str, Any]] = [
        {"heads": 1, "kv_heads": 1, "head_dim": 2}, {"heads": 3, "kv_heads": 3, "head_dim": 6}, {"embd": 1, "ffn": 1},
        {"heads": 1, "kv_heads": 1, "head_dim": 1024}, {"heads": 64, "kv_heads": 1, "head_dim": 2}, {"context": 1},
        {"embd": 2, "ffn": 3}, {"embd": 31, "ffn": 33}, {"embd": 65, "ffn": 127, "head_dim": 34}, {"context": 2},
        {"heads": 5, "kv_heads": 5, "head_dim": 30, "embd": 37, "ffn": 41}, {"context": 33},
        {"vocab": 523, "tied": False},
    ]  # fmt: skip
    for a in ARCHITECTURES:
        for kind in ("F32", "F16", "BF16"):
            for options in plain:
                yield f"{a} {kind} {options}", with_shape(a, type=kind, **options)
        for kind in TYPES:
            block = 256 if "_K" in kind or kind.startswith("TQ") else 128
            if kind in ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL", "Q1_0_V1"):
                block = 32
            same = {"embd": block, "ffn": block, "heads": 1, "kv_heads": 1, "head_dim": block, "state": block}
            yield f"{a} {kind}, one block wide", with_shape(a, type=kind, vocab=501, **same)
    for options in (
        {"key_heads": 3, "value_heads": 3},
        {"state": 1024, "value_heads": 1},
        {"layers": 1},
        {"layers": 3},
    ):
        yield f"hybrid {options}", with_shape("qwen35", type="F16", **options)


def with_shape(architecture: str, **options: Any) -> Callable[[Path], Path]:
    return lambda path: tiny(path, architecture, **options)


def types() -> Iterator[Case]:
    """Each type for each class of tensors, and small tensors in types that they may and may not have."""
    wide = {"embd": 256, "ffn": 256, "heads": 2, "kv_heads": 1, "head_dim": 128, "state": 128, "key_heads": 1}
    for a in ("llama", "qwen35", "gemma3"):
        for kind in TYPES:
            for mark in ("token_embd", "output.weight", "attn_", "ffn_", "ssm_"):

                def build(path: Path, a: str = a, kind: str = kind, mark: str = mark) -> Path:
                    def chosen(name: str) -> str:
                        return kind if name.startswith(mark) or (mark in name and "blk." in name) else "Q8_0"

                    return tiny(path, a, type=chosen, tied=a == "gemma3", layers=4 if a == "qwen35" else 1, **wide)

                yield f"{a} {mark} in {kind}", build
    marks = ("attn_norm", "output_norm", "attn_q_norm", "ssm_conv1d", "ssm_norm", "ssm_dt", "ssm_beta", "attn_q.bias")
    for a in ARCHITECTURES:
        for kind in ("F16", "BF16", "Q8_0", "Q4_K"):
            for mark in marks:
                yield f"{a} {mark} in {kind}", small_in(a, mark, kind)


def small_in(architecture: str, mark: str, kind: str) -> Callable[[Path], Path | None]:
    block = {"Q8_0": 32, "Q4_K": 256}.get(kind, 1)

    def build(path: Path) -> Path | None:
        options = {"embd": 256, "ffn": 256, "heads": 1, "kv_heads": 1, "head_dim": 256, "state": 256, "value_heads": 1}
        layers = 4 if architecture == "qwen35" else 1
        tiny(path, architecture, layers=layers, key_heads=1, **options)
        touched: list[str] = []

        def change(tensors: Tensors) -> Tensors:
            out = []
            for name, shape, number, data in tensors:
                if mark in name and number == 0 and shape[0] % block == 0:
                    touched.append(name)
                    values = data.view(np.float32).reshape(-1, shape[0])
                    number, data = synthetic.resolve(kind)[1], synthetic.quantize(kind, values).reshape(-1)
                out.append((name, shape, number, data))
            return out

        rewritten(path, change)
        return path if touched else None

    return build


def tensors() -> Iterator[Case]:
    for a in ARCHITECTURES:
        for index in range(0, 30, 2):
            for name, change in CHANGES.items():
                yield f"{a} tensor {index} {name}", changed(a, index, change)
    for name in (
        "blk.\u00b2.attn_norm.weight",
        "blk.9999999999999999.x",
        "blk.-1.x",
        "blk.4.x.weight",
        "b\nl\x1b[31mk",
    ):
        for a in ("llama", "qwen35"):
            yield (
                f"{a} with {name!r}",
                changed(a, 0, lambda one, name=name: [one, (name, (4,), 0, np.zeros(16, np.uint8))]),
            )
    for value in (0.0, 1e-45, 1e9, 1e30, float("nan"), float("inf")):
        for a in ARCHITECTURES:
            for mark in (
                "token_embd",
                "attn_norm",
                "attn_k.",
                "attn_v.",
                "ffn_down",
                "output_norm",
                "ssm_a",
                "ssm_norm",
            ):
                yield f"{a} {mark} all {value}", filled(a, mark, value)


def _resized(by: int) -> Callable[[Any], Tensors]:
    def change(one: Any) -> Tensors:
        name, shape, number, _ = one
        shape = (*shape[:-1], max(1, shape[-1] + by))
        return [(name, shape, number, np.zeros(4 * int(np.prod(shape)), np.uint8))]

    return change


CHANGES: dict[str, Callable[[Any], Tensors]] = {
    "left out": lambda one: [],
    "twice": lambda one: [one, one],
    "renamed": lambda one: [(one[0] + "x", *one[1:])],
    "transposed": lambda one: [(one[0], one[1][::-1], *one[2:])],
    "flat": lambda one: [(one[0], (int(np.prod(one[1])),), *one[2:])],
    "with more dimensions": lambda one: [(one[0], (*one[1], 1, 1), *one[2:])],
    "one larger": _resized(1),
    "one smaller": _resized(-1),
    "in another layer": lambda one: [one, (one[0].replace("blk.0.", "blk.77."), *one[1:])],
    "as integers": lambda one: [(one[0], one[1], 26, one[3])],
}


def changed(architecture: str, index: int, change: Callable[[Any], Tensors]) -> Callable[[Path], Path | None]:
    def build(path: Path) -> Path | None:
        tiny(path, architecture, type="F32")
        with open_gguf(path) as file:
            if index >= len(file.tensors):
                return None
        return rewritten(path, lambda all_: [*all_[:index], *change(all_[index]), *all_[index + 1 :]])

    return build


def filled(architecture: str, mark: str, value: float) -> Callable[[Path], Path | None]:
    def build(path: Path) -> Path | None:
        tiny(path, architecture, type="F32")
        with open_gguf(path) as file:
            names = [name for name in file.tensors if mark in name and "alpha" not in name]

        def change(tensors: Tensors) -> Tensors:
            return [
                (*one[:3], np.full(len(one[3]) // 4, value, np.float32).view(np.uint8)) if one[0] in names else one
                for one in tensors
            ]

        return rewritten(path, change) if names else None

    return build


def magnitudes() -> Iterator[Case]:
    """Weights that are finite one by one, and together may be too large for float32 somewhere on the way."""
    for a in ARCHITECTURES:
        for seed in range(80):
            yield f"{a} with magnitudes of seed {seed}", magnified(a, seed)


def magnified(architecture: str, seed: int) -> Callable[[Path], Path]:
    """Every tensor, or some of one to three kinds, times a power of two up to what a file may hold."""

    def build(path: Path) -> Path:
        draw = np.random.default_rng([seed, 5])
        tiny(path, architecture, type="Q8_0" if seed % 3 == 0 else "F32", layers=4 if architecture == "qwen35" else 2)

        def change(tensors: Tensors) -> Tensors:
            kinds = sorted({one[0].split(".", 2)[-1] for one in tensors} - {"rope_freqs.weight"})
            count = len(kinds) if seed % 4 == 0 else int(draw.integers(1, 4))
            powers = dict(zip(draw.permutation(kinds)[:count], draw.integers(-20, 31, count), strict=True))
            for number, (name, shape, type_id, data) in enumerate(tensors):
                power = powers.get(name.split(".", 2)[-1], 0)
                if type_id == 0:
                    tensors[number] = name, shape, type_id, _times(data, power)
            return tensors

        return rewritten(path, change)

    return build


def _times(data: Any, power: int) -> Any:
    return np.clip(data.view(np.float32) * np.float32(2.0**power), -4e9, 4e9).view(np.uint8)


def tokenizers() -> Iterator[Case]:
    values: list[Any] = [*ODD, "", Typed("string", []), Typed("string", ["a"] * 400), Typed("i32", [1] * 400), -1]
    values += [Typed("string", ["a b"] * 3), Typed("string", [f"\x1b[2J{n}" for n in range(400)]), float("nan")]
    for a, make in (("llama", synthetic.bpe), ("gemma3", synthetic.spm)):
        for number in range(8):
            types = Typed("i32", [number] * 400)
            yield f"{a} token types all {number}", with_keys(a, {"tokenizer.ggml.token_type": types})
        for key in TOKENIZER_KEYS:
            for value in values:
                yield f"{a} tokenizer {key} = {shown(value)}", with_keys(a, {f"tokenizer.ggml.{key}": value})
        for template in TEMPLATES:
            yield f"{a} template {shown(template)}", with_keys(a, {"tokenizer.chat_template": template})
        for rows, named in ((400, 401), (401, 400), (1000, 400)):
            yield f"{a} {rows} rows for {named} tokens", with_shape(a, vocab=rows, tokenizer=make(named))
    for key, values in GENERAL.items():
        for value in values:
            yield f"{key!r} = {shown(value)}", with_keys("llama", {key: value})


GENERAL: dict[str, Sequence[Any]] = {
    "general.architecture": ["lla\nma\x1b[1m", "", "x" * 64, "x" * 65, 1, None, "clip"],
    "general.name": ["a\x1b[2J\nb", 1],
    "general.alignment": [0, 3, 64, Typed("u64", 2**63)],
    "\x1b[31mkey\n": [1],
    "llama.expert_count": [8],
    "llama.attention.causal": [False],
    "prism.hadamard.version": [1, 2, 3],
    "prism.hadamard.block_size": [64],
    "split.count": [2, 1, 1000, -1],
}

FAMILIES = {"hyperparameters": hyperparameters, "shapes": shapes, "types": types, "tensors": tensors}
FAMILIES |= {"magnitudes": magnitudes, "tokenizers": tokenizers}


def shape_at_random(draw: np.random.Generator) -> tuple[str, dict[str, Any]]:
    """An architecture, and `synthetic.build` options of a small shape in up to three types that its rows can hold."""

    def one(values: Sequence[Any]) -> Any:
        return values[int(draw.integers(len(values)))]

    a, kv_heads = one(ARCHITECTURES), one([1, 1, 2, 3, 5])
    # of a hybrid's heads half turns, which must be an even number
    dim = one([4, 8, 12, 32, 36, 64, 128, 132] if a == "qwen35" else [2, 6, 8, 16, 18, 30, 32, 34, 64, 96, 128, 130])
    options: dict[str, Any] = {
        "heads": kv_heads * one([1, 2, 3, 7, 16]), "kv_heads": kv_heads, "head_dim": dim, "vocab": one([364, 400, 517]),
        "embd": one([1, 17, 31, 32, 33, 64, 72, 96, 128, 256]), "ffn": one([1, 7, 32, 33, 96, 100, 128, 256]),
        "layers": 4 if a == "qwen35" else one([1, 2]), "tied": one([None, True, False]),
    }  # fmt: skip
    if a == "qwen35":
        groups = one([1, 2, 3])
        options |= {"key_heads": groups, "value_heads": groups * one([1, 2, 3]), "state": one([32, 64, 96])}
    kinds = [one([kind for kind in TYPES if fits(kind, options)]) for _ in range(3)]
    return a, options | {"type": lambda name: kinds[len(name) % 3]}


def at_random(seed: int) -> Callable[[Path], Path | None]:
    """Some shape of some architecture in some types, with up to two keys that are extreme."""
    draw = np.random.default_rng([seed, 99])
    a, options = shape_at_random(draw)

    def one(values: Sequence[Any]) -> Any:
        return values[int(draw.integers(len(values)))]

    extra = {}
    for _ in range(one([0, 0, 1, 2])):
        key = one([*INTEGER_KEYS, *REAL_KEYS, *OWN_INTEGERS.get(a, ()), *OWN_REALS.get(a, ())])
        extra[f"{a}.{key}"] = one([*INTEGERS, *REALS])
    return with_shape(a, context=one([1, 31, 32, 33, 2048]), extra=extra, seed=seed, **options)


def fits(kind: str, options: dict[str, Any]) -> bool:
    """Whether every matrix of the shape has whole blocks of a type."""
    block = synthetic.resolve(kind)[0].block_size
    widths = [options["embd"], options["ffn"], options["heads"] * options["head_dim"]]
    widths.append(options.get("value_heads", 0) * options.get("state", 0))
    return all(width % block == 0 for width in widths)


def huge(path: Path) -> Path:
    """A sparse file that costs its maker nothing and says that it is a model of half a terabyte."""
    tiny(path, "llama", type="F32", head_dim=20)
    with open_gguf(path) as file:
        keys = dict(file.metadata) | {"llama.embedding_length": 1 << 17}
        shapes = {t.name: tuple({64: 1 << 17, 400: 1 << 20}.get(n, n) for n in t.shape) for t in file.tensors.values()}
    at, table = 0, b""
    for name, shape in shapes.items():
        table += synthetic.record_bytes(name, shape, 0, at)
        at += -(-4 * int(np.prod(shape)) // 32) * 32
    head = synthetic.header_bytes(len(shapes), len(keys)) + synthetic.metadata_bytes(keys) + table
    with path.open("wb") as out:
        out.write(head + bytes(-len(head) % 32))
        out.truncate(out.tell() + at)
    return path
