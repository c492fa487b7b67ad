"""Files whose numbers or tensors do not fit their architecture are refused with one sentence that says which, and why.

Groups 10 and 11 of the loader's reject list; the container's own groups are tested in tests/unit/gguf.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ops.bench import synthetic
from ops.bench.synthetic import Typed
from prism_core import InvalidRequest, ModelError, open_model
from prism_core.gguf import open_gguf
from prism_core.machine import memory_bytes
from tests.unit.engine.stepping import each

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3", "qwen35")
Tensors = list[Any]


def refusal(path: Path, **options: Any) -> str:
    """The sentence with which the file is refused."""
    with pytest.raises(ModelError) as caught:
        open_model(path, **options)
    text = str(caught.value)
    assert text.startswith(str(path))
    assert "\n" not in text
    return text


def rewritten(path: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """The file with another list of (name, shape, type id, data)."""
    with open_gguf(path) as file:
        tensors = [(t.name, t.shape, t.type_id, np.array(t.data)) for t in file.tensors.values()]
        return synthetic.write_gguf(path.with_name("changed.gguf"), dict(file.metadata), change(tensors))


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: [tensor for tensor in tensors if tensor[0] != name]


def replaced(name: str, shape: tuple[int, ...], kind: str = "F32") -> Callable[[Tensors], Tensors]:
    rows = int(np.prod(shape[1:]))
    data = synthetic.quantize(kind, np.ones((rows, shape[0]), dtype=np.float32)).reshape(-1)
    number = synthetic.resolve(kind)[1]
    return lambda tensors: [(name, shape, number, data) if tensor[0] == name else tensor for tensor in tensors]


def with_values(name: str, values: np.ndarray[Any, Any]) -> Callable[[Tensors], Tensors]:
    data = values.astype(np.float32).view(np.uint8)
    return lambda tensors: [(*tensor[:3], data) if tensor[0] == name else tensor for tensor in tensors]


def added(name: str, shape: tuple[int, ...]) -> Callable[[Tensors], Tensors]:
    data = np.zeros(4 * int(np.prod(shape)), dtype=np.uint8)
    return lambda tensors: [*tensors, (name, shape, 0, data)]


NUMBERS: list[tuple[str, Any, str]] = [
    ("block_count", None, "lacks qwen3.block_count"),
    ("block_count", 0, "qwen3.block_count must be in 1..1024, not 0"),
    ("block_count", 1025, "qwen3.block_count must be in 1..1024, not 1025"),
    ("block_count", 2.0, "qwen3.block_count must be an integer, not a float"),
    ("block_count", "two", "qwen3.block_count must be an integer, not a string"),
    ("block_count", True, "qwen3.block_count must be an integer, not a boolean"),
    ("block_count", 3, "lacks tensor blk.2.attn_norm.weight"),
    ("block_count", 1, "has tensor blk.1.attn_k.weight and 10 more, which architecture qwen3 does not know"),
    ("embedding_length", 0, "qwen3.embedding_length must be in 1..131072, not 0"),
    (
        "embedding_length",
        512,
        "tensor token_embd.weight has shape [256, 1024] where the hyperparameters say [512, 1024]",
    ),
    ("context_length", 0, "qwen3.context_length must be in 1..16777216, not 0"),
    ("attention.head_count", 0, "qwen3.attention.head_count must be in 1..1024, not 0"),
    ("attention.head_count", np.array([4, 4, 4], np.int32), "qwen3.attention.head_count has 3 entries for 2 layers"),
    ("attention.head_count_kv", 3, "head_count 4 is not a multiple of attention.head_count_kv 3"),
    ("attention.head_count_kv", np.array([2], np.int32), "head_count_kv has 1 entries for 2 layers"),
    ("attention.head_count_kv", 0, "layer 0 attends, but its attention.head_count_kv is 0"),
    ("attention.head_count_kv", np.array([2, 0], np.int32), "layer 1 attends, but its attention.head_count_kv is 0"),
    ("attention.key_length", 0, "qwen3.attention.key_length must be in 1..1024, not 0"),
    ("attention.key_length", 63, "qwen3.attention.key_length must be even, not 63"),
    ("attention.key_length", 1026, "qwen3.attention.key_length must be in 1..1024, not 1026"),
    ("attention.value_length", 32, "value_length 32 differs from key_length 64"),
    ("attention.layer_norm_rms_epsilon", 0.0, "layer_norm_rms_epsilon must be above 0, not 0"),
    ("attention.layer_norm_rms_epsilon", -1e-6, "layer_norm_rms_epsilon must be in 0..1, not -1e-06"),
    ("attention.layer_norm_rms_epsilon", float("nan"), "layer_norm_rms_epsilon must be in 0..1, not nan"),
    ("attention.layer_norm_rms_epsilon", "small", "layer_norm_rms_epsilon must be a number, not a string"),
    ("attention.layer_norm_rms_epsilon", Typed("f64", 1e-60), "rms_epsilon must be at least 1.17549e-38, not 1e-60"),
    ("rope.freq_base", 0.0, "qwen3.rope.freq_base must be above 0, not 0"),
    ("rope.freq_base", 1.0, "qwen3.rope.freq_base must be above 1, not 1"),
    ("rope.freq_base", float("inf"), "qwen3.rope.freq_base must be in 0..1e+12, not inf"),
    ("rope.dimension_count", 66, "qwen3.rope.dimension_count must be even and at most 64 (the head size), not 66"),
    ("rope.dimension_count", 31, "qwen3.rope.dimension_count must be even and at most 64 (the head size), not 31"),
    ("rope.scaling.factor", 0.0, "qwen3.rope.scaling.factor must be above 0, not 0"),
    ("rope.scaling.factor", float("nan"), "qwen3.rope.scaling.factor must be in 0..1e+06, not nan"),
    ("rope.scaling.factor", Typed("f64", 5e-324), "rope.scaling.factor must be at least 0.001, not 4.94066e-324"),
    ("rope.scale_linear", 1e-38, "rope.scale_linear must be at least 0.001, not 1e-38"),
    ("rope.scaling.type", np.array([1, 2], np.int32), "qwen3.rope.scaling.type must be a string, not an array"),
    ("rope.scaling.type", "longrope", "qwen3.rope.scaling.type must be one of none, linear, yarn, not 'longrope'"),
    ("feed_forward_length", 0, "qwen3.feed_forward_length must be in 1..1048576, not 0"),
    ("feed_forward_length", np.array([512, 256, 1], np.int32), "feed_forward_length has 3 entries for 2 layers"),
    ("feed_forward_length", np.array([512, 256], np.int32), "tensor blk.1.ffn_gate.weight has shape [256, 512] where"),
    ("vocab_size", 1000, "qwen3.vocab_size is 1000 but token_embd.weight has 1024 rows"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), NUMBERS, ids=lambda value: str(value)[:40])
def test_hyperparameters_out_of_range_are_named(tmp_path: Path, key: str, value: Any, sentence: str) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", extra={f"qwen3.{key}": value})
    assert sentence in refusal(path)


HYBRIDS: list[tuple[str, Any, str]] = [
    ("ssm.conv_kernel", 3, "qwen35.ssm.conv_kernel must be 4, not 3"),
    ("ssm.state_size", 48, "qwen35.ssm.state_size must be a multiple of 32, not 48"),
    ("ssm.group_count", 3, "qwen35.ssm.time_step_rank 4 is not a multiple of ssm.group_count 3"),
    ("ssm.inner_size", 128, "qwen35.ssm.inner_size is 128, but 4 heads x 64 is not"),
    ("ssm.time_step_rank", None, "lacks qwen35.ssm.time_step_rank"),
    ("full_attention_interval", 0, "qwen35.full_attention_interval must be in 1..1024, not 0"),
    ("attention.recurrent_layers", np.array([True]), "qwen35.attention.recurrent_layers has 1 entries for 4 layers"),
    ("nextn_predict_layers", 4, "qwen35.nextn_predict_layers must be in 0..3, not 4"),
]


@pytest.mark.parametrize(("key", "value", "sentence"), HYBRIDS, ids=lambda value: str(value)[:40])
def test_delta_net_sizes_must_fit_each_other(tmp_path: Path, key: str, value: Any, sentence: str) -> None:
    path = synthetic.qwen35(tmp_path / "model.gguf", layers=4, extra={f"qwen35.{key}": value})
    assert sentence in refusal(path)


@pytest.mark.parametrize("key", ["yarn_beta_fast", "yarn_beta_slow", "yarn_attn_factor", "attn_factor", "factor"])
def test_yarn_settings_that_give_no_angles_are_refused(tmp_path: Path, key: str) -> None:
    extra = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, f"rope.scaling.{key}": Typed("f64", 5e-324)}
    path = synthetic.qwen3(tmp_path / "model.gguf", extra={f"qwen3.{name}": value for name, value in extra.items()})
    assert f"qwen3.rope.scaling.{key} must be at least 0.001, not 4.94066e-324" in refusal(path)


def test_a_softcap_near_nothing_is_refused(tmp_path: Path) -> None:
    path = synthetic.gemma3(tmp_path / "model.gguf", extra={"gemma3.final_logit_softcapping": 1e-40})
    assert "gemma3.final_logit_softcapping must be 0 or at least 0.001, not 9.99995e-41" in refusal(path)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e-30, 3e38, float("nan")])
def test_divisors_of_angles_must_divide(tmp_path: Path, value: float) -> None:
    path = synthetic.llama(tmp_path / "model.gguf", layers=1, rope_factors=True)
    factors = np.full(32, 2.0, np.float32)
    factors[7] = value
    changed = rewritten(path, with_values("rope_freqs.weight", factors))
    assert "tensor rope_freqs.weight: value 7 must be in 0.001..1000, not" in refusal(changed)


def test_a_decay_that_grows_is_refused(tmp_path: Path) -> None:
    # the logarithm that the checkpoint has, stored without the change of sign and exponent that the format asks for
    path = synthetic.qwen35(tmp_path / "model.gguf", layers=4)
    changed = rewritten(path, with_values("blk.1.ssm_a", np.array([-1.0, -0.0, 0.5, 1.0], np.float32)))
    assert "tensor blk.1.ssm_a: value 2 must be at most 0, not 0.5" in refusal(changed)


@pytest.mark.parametrize("named", [1, 4, 7])
def test_a_hybrid_with_more_layers_than_it_says_is_not_run_without_them(tmp_path: Path, named: int) -> None:
    path = synthetic.qwen35(tmp_path / "model.gguf", layers=8, extra={"qwen35.block_count": named})
    assert f"has tensor blk.{named}.attn" in refusal(path)


def test_llama_turns_whole_heads(tmp_path: Path) -> None:
    path = synthetic.llama(tmp_path / "model.gguf", extra={"llama.rope.dimension_count": 32})
    assert "llama.rope.dimension_count 32 must equal the head size 64" in refusal(path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_tensor_of_an_architecture_is_needed(tmp_path: Path, architecture: str) -> None:
    path = synthetic.build(
        tmp_path / "model.gguf", architecture, layers=4 if architecture == "qwen35" else 1, tied=True
    )
    with open_gguf(path) as file:
        names = [name for name in file.tensors if not name.endswith(".bias") or architecture == "qwen35"]
    for name in names:
        if name.startswith(("blk.1.", "blk.2.")):
            continue
        sentence = refusal(rewritten(path, without(name)))
        assert f"lacks tensor {name}" in sentence or name == "token_embd.weight", name


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_tensor_that_nothing_reads_is_refused_rather_than_ignored(tmp_path: Path, architecture: str) -> None:
    path = synthetic.build(tmp_path / "model.gguf", architecture, layers=4 if architecture == "qwen35" else 1)
    sentence = refusal(rewritten(path, added("blk.0.attn_sinks.weight", (4,))))
    assert f"has tensor blk.0.attn_sinks.weight, which architecture {architecture} does not know" in sentence


@pytest.mark.parametrize("name", ["blk.\u00b2.attn_norm.weight", "blk.9999999999.x.y", "b\nc\x1b[31m", "\u202eblk.0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
def test_a_name_of_any_characters_is_refused_on_one_line(tmp_path: Path, architecture: str, name: str) -> None:
    path = synthetic.build(tmp_path / "model.gguf", architecture, layers=4 if architecture == "qwen35" else 1)
    sentence = refusal(rewritten(path, added(name, (4,))))
    assert sentence.isprintable()
    assert f"has tensor {name if name.isprintable() else repr(name)}, which" in sentence


@pytest.mark.parametrize(
    ("name", "shape", "kind", "sentence"),
    [
        ("blk.0.attn_norm.weight", (128,), "F32", "has shape [128] where the hyperparameters say [256]"),
        ("blk.0.attn_norm.weight", (256,), "Q8_0", "blk.0.attn_norm.weight must be F32, F16 or BF16, not Q8_0"),
        ("blk.0.attn_q.weight", (256, 128), "F32", "has shape [256, 128] where the hyperparameters say [256, 256]"),
        ("blk.0.ffn_down.weight", (256, 512), "F32", "has shape [256, 512] where the hyperparameters say [512, 256]"),
        ("blk.0.attn_q.weight", (256, 16, 16), "F32", "has shape [256, 16, 16] where the hyperparameters say"),
        ("token_embd.weight", (1024,), "F32", "lacks the matrix token_embd.weight"),
        ("token_embd.weight", (256, 1000), "F32", "the tokenizer has 1024 tokens, but token_embd.weight has 1000 rows"),
    ],
)  # fmt: skip
def test_shapes_and_types_of_tensors_are_checked(
    tmp_path: Path, name: str, shape: tuple[int, ...], kind: str, sentence: str
) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1)
    assert sentence in refusal(rewritten(path, replaced(name, shape, kind)))


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_norms_may_be_of_any_plain_type(tmp_path: Path, kind: str) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1)
    open_model(rewritten(path, replaced("blk.0.attn_norm.weight", (256,), kind))).close()


@pytest.mark.parametrize(
    ("architecture", "sentence"),
    [
        ("dspark", "architecture dspark is a drafter for speculative decoding, not a language model"),
        ("clip", "architecture clip is a vision projector (mmproj), not a language model"),
        ("mamba", "architecture 'mamba' is not supported; this engine runs llama, qwen2, qwen3, qwen35, gemma3"),
    ],
)
def test_other_architectures_are_refused_by_name(tmp_path: Path, architecture: str, sentence: str) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1, extra={"general.architecture": architecture})
    assert sentence in refusal(path)


def test_a_value_that_is_not_finite_is_refused_when_the_weights_are_packed(tmp_path: Path) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1)

    def poison(tensors: Tensors) -> Tensors:
        for name, _, _, data in tensors:
            if name == "blk.0.ffn_up.weight":
                data[34:36] = [0, 0x7C]  # the second block's scale: infinity
        return tensors

    with (
        open_model(rewritten(path, poison)) as model,
        pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight.*block 1") as caught,
    ):
        model.decoder()
    assert str(caught.value).startswith(str(path.with_name("changed.gguf")))


def test_padding_ids_are_masked_and_never_chosen(tmp_path: Path) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1, vocab=1024, tokenizer=synthetic.bpe(1000, pre="qwen2"))
    with open_model(path) as model:
        logits = np.empty(1024, dtype=np.float32)
        model.decoder().evaluate_into(5, logits)
    assert model.vocab_size == 1024
    assert np.isfinite(logits).all()
    assert (logits[1000:] == np.float32(-1e30)).all()
    assert logits[:1000].min() > -100


def test_keys_of_the_converter_that_wrote_llm_are_understood(tmp_path: Path) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1)
    with open_gguf(path) as file:
        keys = {key.replace("qwen3.", "llm."): value for key, value in file.metadata.items()}
        tensors = [(t.name, t.shape, t.type_id, np.array(t.data)) for t in file.tensors.values()]
    other = synthetic.write_gguf(tmp_path / "other.gguf", keys, tensors)
    with open_model(path) as model, open_model(other) as same:
        assert np.array_equal(each(same.decoder(), [1, 2, 3]), each(model.decoder(), [1, 2, 3]))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"threads": 0}, "threads must be in 1..256, not 0"),
        ({"threads": 2.0}, "threads must be an integer, not float"),
        ({"context_tokens": 0}, "context_tokens must be in 1..2048, not 0"),
        ({"context_tokens": 4096}, "context_tokens must be in 1..2048, not 4096"),
        ({"context_tokens": True}, "context_tokens must be an integer, not bool"),
    ],
)
def test_arguments_out_of_range_are_named(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1)
    with pytest.raises(InvalidRequest) as caught:
        open_model(path, **options)
    assert sentence in str(caught.value)


def test_a_model_over_the_memory_budget_is_refused_with_the_sum(tmp_path: Path) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf")
    with open_model(path) as model:
        needed = model.memory()["total"]
    open_model(path, memory_budget=needed).close()
    sentence = refusal(path, memory_budget=needed - 1)
    assert f"needs {needed:,} bytes at a context of 2048 tokens (weights " in sentence
    assert f"over the memory budget of {needed - 1:,}" in sentence


def test_without_a_budget_a_model_is_held_against_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf")
    with open_model(path) as model:
        needed = model.memory()
    own = needed["total"] - needed["weights"]
    monkeypatch.setattr("prism_core.model.memory_bytes", lambda: own)
    open_model(path).close()
    assert f"over the machine's memory of {own:,}" in refusal(path, exact=True)
    monkeypatch.setattr("prism_core.model.memory_bytes", lambda: own - 1)
    sentence = refusal(path)
    assert f"needs {needed['total']:,} bytes at a context of 2048 tokens (weights " in sentence
    assert f"over the machine's memory, the weights aside, of {own - 1:,}" in sentence
    open_model(path, memory_budget=needed["total"]).close()
    monkeypatch.setattr("prism_core.model.memory_bytes", lambda: own)
    monkeypatch.setenv("PRISM_PACKED_BYTES", str(needed["weights"] - 1))  # they would be private, and count
    assert f"over the machine's memory of {own:,}" in refusal(path)
    monkeypatch.setattr("prism_core.model.memory_bytes", lambda: None)
    open_model(path).close()


def test_a_small_file_that_declares_a_huge_state_is_refused(tmp_path: Path) -> None:
    # 80 MB of file for 107 GB of recurrent state
    path = synthetic.qwen35(
        tmp_path / "model.gguf", layers=1, embd=1, ffn=1, heads=1, kv_heads=1, head_dim=4, vocab=300, type="F16",
        key_heads=1, value_heads=128, state=1024,
    )  # fmt: skip
    with open_gguf(path) as file:
        keys = {**file.metadata, "qwen35.block_count": 99, "qwen35.full_attention_interval": 100}
        shared = [(t.name, t.shape, t.type_id, np.array(t.data)) for t in file.tensors.values()]
    layers = [
        (name.replace("blk.0.", f"blk.{n}."), *rest) for name, *rest in shared for n in range(99) if "blk." in name
    ]
    head = [tensor for tensor in shared if "blk." not in tensor[0]]
    big = synthetic.write_gguf(tmp_path / "big.gguf", keys, [*head, *layers])
    assert f"recurrent_state {2 * 4 * 99 * (128 * 1024 * 1024 + 3 * 133120):,}" in refusal(big, memory_budget=1 << 30)


NEUTRAL: list[tuple[str, Any, Any]] = [
    ("expert_count", 0, 8),
    ("attention.causal", True, False),
    ("attention.scale", 0.0, 0.5),
    ("attn_logit_softcapping", 0.0, 50.0),
    ("final_logit_softcapping", 0.0, 30.0),
    ("logit_scale", 1.0, 8.0),
    ("residual_scale", 1.0, np.array([1.0], np.float32)),
    ("embedding_scale", 0.0, 12.0),
    ("attention.max_alibi_bias", 0.0, 8.0),
    ("attention.clamp_kqv", 0.0, "30"),
    ("use_parallel_residual", False, True),
]


@pytest.mark.parametrize(("key", "neutral", "other"), NEUTRAL, ids=lambda value: str(value)[:40])
def test_a_step_that_the_engine_does_not_take_is_refused_unless_it_does_nothing(
    tmp_path: Path, key: str, neutral: Any, other: Any
) -> None:
    open_model(synthetic.llama(tmp_path / "neutral.gguf", layers=1, extra={f"llama.{key}": neutral})).close()
    sentence = refusal(synthetic.llama(tmp_path / "model.gguf", layers=1, extra={f"llama.{key}": other}))
    assert f"llama.{key} asks for a step that this engine does not take" in sentence


def test_memory_that_the_system_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = synthetic.qwen3(tmp_path / "model.gguf", layers=1)

    def refuse(count: int) -> Any:
        raise MemoryError(f"{count}")

    monkeypatch.setattr("prism_core.models.assembly.aligned", refuse)
    with open_model(path) as model:
        wanted = rf"model\.gguf: the system refuses the memory that it needs, {model.memory()['total']:,} bytes at a"
        with pytest.raises(ModelError, match=wanted):
            model.decoder()


def test_memory_of_the_machine_is_the_smallest_known_limit(tmp_path: Path) -> None:
    whole = memory_bytes(())
    assert whole is not None
    assert whole > 1 << 28
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "limit").write_text("123456789\n")
    assert memory_bytes((tmp_path / "max", tmp_path / "none")) == whole
    assert memory_bytes((tmp_path / "max", tmp_path / "limit")) == 123456789
