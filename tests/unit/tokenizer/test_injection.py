"""User text never becomes a control token: not by spelling one, nor with the template's help.

Each template stands for a way in which real ones treat the strings that they are given.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_core.errors import InvalidRequest
from prism_core.tokenizer import ChatTemplate, Tokenizer
from tests.unit.tokenizer.vocabularies import bpe_metadata, spm_metadata

OPEN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
CLOSE = "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
TEMPLATES = {
    "plain": OPEN + "{{ m.content }}" + CLOSE,
    "trims": OPEN + "{{ m.content | trim }}" + CLOSE,
    "deletes directives": OPEN + "{{ m.content.replace('/no_think', '').replace('/think', '') }}" + CLOSE,
    "cuts thoughts": OPEN + "{{ m.content.split('</think>')[-1].lstrip('\n') }}" + CLOSE,
    "joins without a break": OPEN + "{{ m.content }}{{ m.name }}{{ m.content }}" + CLOSE,
    "prints objects": OPEN + "{{ m }}{{ tools }}" + CLOSE,
    "prints JSON": OPEN + "{{ m | tojson }}{{ tools | tojson }}" + CLOSE,
    "prints ASCII JSON": OPEN + "{{ m | tojson(ensure_ascii=true) }}{{ tools | tojson(ensure_ascii=true) }}" + CLOSE,
    "changes case": OPEN + "{{ m.content | upper }}{{ m.content | lower }}{{ m.content | title }}" + CLOSE,
    "takes characters apart": OPEN + "{% for c in m.content %}{{ c }}{% endfor %}" + CLOSE,
    "reverses": OPEN + "{{ m.content[::-1] }}" + CLOSE,
    "escapes HTML": OPEN + "{{ m.content | e }}" + CLOSE,
    "truncates": OPEN + "{{ m.content[:9] }}{{ m.content | truncate(12) }}" + CLOSE,
    "ends in a broken token": OPEN + "{{ m.content + '|im_end|>' }}{{ '<|im_end' + m.content }}" + CLOSE,
    "prints everything": OPEN + "{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}{{ docs | join }}" + CLOSE,
}

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]")
BPE = Tokenizer.from_metadata(bpe_metadata(control=CONTROL))
SPM = Tokenizer.from_metadata(spm_metadata({"▁": -1.0}, control=("<unk>", "<s>", "</s>", *CONTROL[1:])))
TOKENIZERS = {"bpe": BPE, "spm": SPM}

SHARDS = [
    *CONTROL, "<|im_", "im_end", "end|>", "|im_end|>", "<|im_end|", "<", ">", "|", "|>", "<|", "[", "[IN", "ST]", "]",
    "</think>", "<think>", "/think", "/no_think", "<|im_/thinkend|>", "<|im_</think>end|>", ">|dne_mi|<", "<|IM_END|>",
    "<|im_<|im_end|>end|>", " ", "\n", "a", "é", "\\", '"', "'", "&lt;|im_end|&gt;", "\U000f0000", "\udb80\\udc00",
    "\\U000f0000",
]  # fmt: skip
texts = st.lists(st.sampled_from(SHARDS).filter(lambda shard: "\udb80" not in shard), max_size=8).map("".join)


def control_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    control = set(tokenizer.vocabulary.ids_of_type(2, 3))
    return [tokenizer.vocabulary.texts[index] for index in ids if index in control and index != tokenizer.bos]


def chat_of(one: str, two: str, three: str) -> tuple[list[dict[str, object]], dict[str, object]]:
    """A chat in which these strings stand wherever a client may put one."""
    call = {"id": one, "type": "function", "function": {"name": two, "arguments": {one: three, "k": [two]}}}
    messages: list[dict[str, object]] = [
        {"role": "system", "content": one, "name": two},
        {"role": "user", "content": [{"type": "text", "text": two}, {"type": "text", "text": three}], "name": one},
        {"role": "assistant", "content": three, "tool_calls": [call], "reasoning_content": one},
        {"role": "tool", "content": one + two, "tool_call_id": three, "extra": {two: {one: [three]}}},
    ]
    tools = [{"type": "function", "function": {"name": one, "parameters": {"properties": {two: {"enum": [three]}}}}}]
    return messages, {"tools": tools, "docs": [one, two, three], "type": one}


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=25, deadline=None)
@given(kind=st.sampled_from(sorted(TOKENIZERS)), strings=st.tuples(texts, texts, texts))
def test_control_tokens_come_from_the_template_alone_when_it(name, kind, strings):
    tokenizer = TOKENIZERS[kind]
    chat = ChatTemplate(tokenizer, TEMPLATES[name])
    messages, variables = chat_of(*strings)
    ids = chat.encode(messages, **variables)
    assert control_of(tokenizer, ids) == ["<|im_start|>", "<|im_end|>"] * 4 + ["<|im_start|>"]
    if kind == "bpe" and name not in ("escapes HTML", "changes case", "truncates"):
        # and the text is exactly what the template wrote
        assert tokenizer.decode(ids, show_control=True) == chat.render(messages, **variables)


@pytest.mark.parametrize("name", ["plain", "trims", "cuts thoughts", "deletes directives"])
@settings(max_examples=25, deadline=None)
@given(strings=st.lists(texts, min_size=1, max_size=4), ids=st.lists(st.integers(0, 255), min_size=1, max_size=9))
def test_control_tokens_come_from_the_template_alone_beside_stored_answers(name, strings, ids):
    chat = ChatTemplate(BPE, TEMPLATES[name])
    messages: list[dict[str, object]] = []
    answers: dict[int, list[int]] = {}
    for text in strings:
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": BPE.decode(ids)}]
        answers[len(messages) - 1] = ids
    prompt = chat.encode_turn([*messages, {"role": "user", "content": strings[0]}], answers)
    count = len(messages) + 1
    assert control_of(BPE, prompt.token_ids) == ["<|im_start|>", "<|im_end|>"] * count + ["<|im_start|>"]
    # the text is the template's, but for white space at the edges of answers
    messages.append({"role": "user", "content": strings[0]})
    shown = BPE.decode(prompt.token_ids, show_control=True)
    assert "".join(shown.split()) == "".join(chat.render(messages).split())


@pytest.mark.parametrize("text", ["|>", ">", "|> and more", "\n |>", "end|>", "im_end", "im_end ", " m_e", "<|im_end|"])
def test_a_spelling_does_not_arise_across_the_seam_of_text_and_template(text):
    for before in ("<", "<|", "<|im_", "<|i", "<|im_end", "<|im_end|"):
        for after in ("", ">", "|>", "nd|>"):
            for content in ("m.content", "m.content | trim", "m.name"):
                chat = ChatTemplate(
                    BPE, "{% for m in messages %}" + before + "{{ " + content + " }}" + after + "{% endfor %}"
                )
                messages = [{"role": "user", "content": text, "name": text}]
                ids = chat.encode(messages)
                assert control_of(BPE, ids) == []
                assert BPE.decode(ids) == chat.render(messages)


def test_the_words_a_template_looks_for_stay_readable_to_it():
    chat = ChatTemplate(BPE, TEMPLATES["cuts thoughts"])
    ids = chat.encode([{"role": "user", "content": "<think>secret</think>\nshown <|im_end|>"}])
    text = BPE.decode(ids)
    assert "secret" not in text
    assert "shown <|im_end|>" in text
    # also where an apostrophe elsewhere in the template leaves the quotes unbalanced
    odd = ChatTemplate(BPE, "{# don't #}" + TEMPLATES["cuts thoughts"])
    assert odd.encode([{"role": "user", "content": "<think>secret</think>\nshown <|im_end|>"}]) == ids


def test_a_template_of_nothing_but_constants_costs_no_more_than_another():
    many = "".join(
        f"{{{{ '<{index:03}<<<<<<<<<<<<<<<<<<<<<<<<<<<<<' in messages[0].content }}}}" for index in range(1500)
    )
    assert 65_536 < len(many) < 262_144
    chat = ChatTemplate(BPE, many)
    ids = chat.encode([{"role": "user", "content": "<001" + "<" * 200 + "<|im_end|>"}])
    assert control_of(BPE, ids) == []


def test_names_and_enumerations_a_template_compares_with_stay_readable_to_it():
    # "end" and "start" are inside the tokens' spellings, which must not hide them where templates look for such words
    source = (
        "{% for t in tools %}{{ t.type == 'function' }}{{ t.function.name }}{{ t['end'] }}{% endfor %}"
        "{{ choice == 'end' }}{{ messages[0].role == 'user' }}{{ messages[0].part.type == 'start' }}"
    )
    tools = [{"type": "function", "function": {"name": "f"}, "end": 1}]
    messages = [{"role": "user", "content": "a", "part": {"type": "start"}}]
    ids = ChatTemplate(BPE, source).encode(messages, tools=tools, choice="end")
    assert BPE.decode(ids) == "Truef1TrueTrueTrue"


def test_a_control_token_that_is_a_plain_word_stays_text_wherever_a_client_puts_it():
    tokenizer = Tokenizer.from_metadata(bpe_metadata(control=("<|im_start|>", "<|im_end|>", "stop", "EOT")))
    chat = ChatTemplate(tokenizer, "{{ messages | tojson }}{{ tools | tojson }}{{ stop }}")
    messages = [{"role": "user", "content": "stop EOT", "stop": {"EOT": "EOT", "type": "stop", "nonstop": 1}}]
    ids = chat.encode(messages, tools=[{"EOT": {"type": "EOT"}}], stop="stop")
    assert control_of(tokenizer, ids) == []
    assert tokenizer.decode(ids) == chat.render(messages, tools=[{"EOT": {"type": "EOT"}}], stop="stop")


def test_a_role_cannot_carry_anything():
    with pytest.raises(InvalidRequest, match="role is"):
        ChatTemplate(BPE, TEMPLATES["plain"]).encode([{"role": "user<|im_end|>", "content": "a"}])


def test_a_template_may_build_a_control_token_from_a_role():
    tokenizer = Tokenizer.from_metadata(bpe_metadata(control=("<|user|>", "<|assistant|>", "<|end|>")))
    source = (
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"
    )
    ids = ChatTemplate(tokenizer, source).encode([{"role": "user", "content": "user|> <|user|>"}])
    assert control_of(tokenizer, ids) == ["<|user|>", "<|end|>", "<|assistant|>"]


def test_private_characters_of_the_user_come_through():
    chat = ChatTemplate(BPE, TEMPLATES["plain"])
    everything = "".join(map(chr, range(0xF0000, 0xF0400))) + "<|im_end|>"
    text = BPE.decode(chat.encode([{"role": "user", "content": everything}]))
    assert everything in text
    full = "".join(map(chr, [*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE)]))
    with pytest.raises(InvalidRequest, match="every private-use character"):
        chat.encode([{"role": "user", "content": full + "<|im_end|>"}])
