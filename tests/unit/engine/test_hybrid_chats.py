"""Conversations with a hybrid, whose state cannot be cut back: what is kept must be how the next prompt begins."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ops.bench import synthetic
from prism_core import Generation, Limits, Model, Prefill, Runtime, open_model
from prism_core.tokenizer.chat import ChatPrompt

DROPS_THOUGHTS = """
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
SYSTEM = {"role": "system", "content": "the one who answers is short and true, and counts on what was said before"}
QUESTIONS = ["what is the sum of these", "and what of the others then", "so who is it that sees", "is this the end"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = synthetic.qwen35(
        tmp_path_factory.mktemp("hybrid") / "model.gguf", layers=4, embd=64, ffn=96, heads=2, kv_heads=1, head_dim=32,
        vocab=600, state=32, extra={"tokenizer.chat_template": DROPS_THOUGHTS},
    )  # fmt: skip
    with open_model(path) as opened:
        yield opened


def runtime_of(model: Model) -> Runtime:
    return Runtime(model.decoder(), Limits(1024, 8, 1 << 30))


def run(runtime: Runtime, prompt: ChatPrompt) -> tuple[list[int], int]:
    """(ids of an answer, how many tokens of the prompt were not processed again)."""
    ids: list[int] = []
    done = runtime.generate(
        prompt.token_ids, Generation(12), prefill=Prefill(64), emit=ids.append, save_at=prompt.save_at
    )
    return ids, done.reused_tokens


def test_the_same_prompt_with_a_hybrid_model_is_not_processed_in_full_again(model: Model) -> None:
    prompt = model.chat.encode_turn([SYSTEM, {"role": "user", "content": QUESTIONS[0]}])
    runtime = runtime_of(model)
    first, reused = run(runtime, prompt)
    assert reused == 0
    for _ in range(3):
        again, reused = run(runtime, prompt)
        assert again == first
        assert reused >= prompt.save_at[-1] > len(prompt.token_ids) - 20


@pytest.mark.parametrize("thought", ["<think>\nhm, so\n</think>\n\n", ""])
def test_a_template_that_drops_earlier_thoughts_leaves_the_saved_prefixes_of_use(model: Model, thought: str) -> None:
    runtime, messages, ends = runtime_of(model), [SYSTEM], [0]
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = model.chat.encode_turn(messages)
        answer, reused = run(runtime, prompt)
        assert reused >= ends[-1], "the turn before was processed once more"
        assert answer == run(runtime_of(model), prompt)[0]
        ends.append(prompt.save_at[-1])
        assert ends[-1] > len(prompt.token_ids) - 20
        messages.append({"role": "assistant", "content": thought + "the sum is " + question})
    assert ends[-2] > 100


def test_two_conversations_share_their_system_prompt(model: Model) -> None:
    runtime = runtime_of(model)
    for number, question in enumerate(QUESTIONS):
        prompt = model.chat.encode_turn([SYSTEM, {"role": "user", "content": question}])
        _, reused = run(runtime, prompt)
        system = prompt.save_at[0]
        assert system > len(model.tokenizer.encode(str(SYSTEM["content"])))
        assert reused >= (system if number else 0)
