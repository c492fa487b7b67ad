"""Chats to prompts: committed answers kept, prefixes kept, places worth saving, and what the template is given."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_core.errors import InvalidRequest
from prism_core.tokenizer import Answer, ChatTemplate, Tokenizer
from tests.unit.tokenizer.vocabularies import bpe_metadata, spm_metadata

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# drops the thoughts of earlier turns, opens an empty thought when thinking is off, keeps all when told to
THINKING = """
{%- set last = namespace(user=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- if m.role == 'assistant' and '</think>' in content and loop.index0 < last.user and not preserve_thinking %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""
TRIMMED = CHATML.replace("m.content", "m.content | trim")

BPE = Tokenizer.from_metadata(bpe_metadata())
SPM = Tokenizer.from_metadata(
    spm_metadata(
        {"▁": -1.0, "▁a": -2.0, "an": -3.0, "ans": -4.0, "er": -5.0, "▁us": -6.0},
        control=("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"),
        user_defined=("<think>", "</think>"),
    )
)
TOKENIZERS = {"bpe": BPE, "spm": SPM}
both = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, object]:
    return {"role": "assistant", "content": text}


def system(text: str) -> dict[str, object]:
    return {"role": "system", "content": text}


def spelled(tokenizer: Tokenizer, ids: list[int]) -> str:
    return tokenizer.decode(ids, show_control=True)


def odd_ids(tokenizer: Tokenizer, text: str, rng: random.Random) -> list[int]:
    """The same text in a way that no encoder would choose, as a sampler may well generate it: split anywhere."""
    ids: list[int] = []
    place = 0
    while place < len(text):
        end = rng.randint(place + 1, len(text))
        ids += tokenizer.encode_part(text[place:end], after_special=False)
        place = end
    return ids


@both
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_prompt_and_answer_of_a_turn_are_a_prefix_of_the_next_prompt(tokenizer, data):
    source = data.draw(st.sampled_from([CHATML, TRIMMED, THINKING]))
    chat = ChatTemplate(tokenizer, source)
    rng = data.draw(st.randoms(use_true_random=False))
    words = st.text(alphabet="anser \n<|im_end|>é😀", min_size=1, max_size=12)
    messages: list[dict[str, object]] = [system(data.draw(words))] if data.draw(st.booleans()) else []
    answers: dict[int, list[int]] = {}
    before: list[int] = []
    for _ in range(data.draw(st.integers(2, 4))):
        messages.append(user(data.draw(words)))
        prompt = chat.encode_turn(messages, answers, preserve_thinking=True)
        assert prompt.token_ids[: len(before)] == before
        assert len(prompt.token_ids) > len(before)
        ids = odd_ids(tokenizer, data.draw(words), rng)
        messages.append(assistant(tokenizer.decode(ids)))
        if messages[-1]["content"]:
            answers[len(messages) - 1] = ids
            before = prompt.token_ids + ids
        else:
            before = prompt.token_ids


@both
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_committed_ids_stand_in_the_prompt_where_their_text_stands(tokenizer, data):
    chat = ChatTemplate(tokenizer, CHATML)
    rng = data.draw(st.randoms(use_true_random=False))
    words = st.text(alphabet="anser \n</think>", min_size=1, max_size=12)
    texts = data.draw(st.lists(words, min_size=1, max_size=4))
    messages: list[dict[str, object]] = []
    answers: dict[int, list[int]] = {}
    for text in texts:
        ids = odd_ids(tokenizer, text, rng)
        messages += [user("a"), assistant(tokenizer.decode(ids))]
        answers[len(messages) - 1] = ids
    with_ids = chat.encode_turn([*messages, user("b")], answers).token_ids
    rest = with_ids
    for ids in answers.values():
        place = next(i for i in range(len(rest)) if rest[i : i + len(ids)] == ids)
        rest = rest[place + len(ids) :]
    if tokenizer is BPE:  # (the other leaves out the space that an answer starts with)
        assert spelled(tokenizer, with_ids) == spelled(tokenizer, chat.encode([*messages, user("b")]))


def test_an_answer_that_the_template_alters_is_encoded_as_rendered():
    chat = ChatTemplate(BPE, THINKING)
    ids = BPE.encode("<think>\nhm\n</think>\n\nanswer")
    messages = [user("a"), assistant(BPE.decode(ids)), user("b")]
    prompt = chat.encode_turn(messages, {1: ids})
    assert spelled(BPE, prompt.token_ids) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nanswer<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    # the text is whole again: its tokens are those of the rendering without any marker
    assert prompt.token_ids == chat.encode(messages)


def test_a_conversation_whose_template_drops_thoughts_keeps_useful_prefixes():
    chat = ChatTemplate(BPE, THINKING)
    ids = BPE.encode("<think>\nhm\n</think>\n\nanswer")
    for thinking in (True, False):
        messages: list[dict[str, object]] = [system("the answer is the answer")]
        answers: dict[int, list[int]] = {}
        saved: set[tuple[int, ...]] = set()
        for turn in range(4):
            messages.append(user(f"hello {turn}"))
            prompt = chat.encode_turn(messages, answers, enable_thinking=thinking)
            kept = max((len(prefix) for prefix in saved if tuple(prompt.token_ids[: len(prefix)]) == prefix), default=0)
            if turn:
                # all but the last answer and the new message is found again
                assert spelled(BPE, prompt.token_ids[kept:]).count("<|im_end|>") <= 2
            saved |= {tuple(prompt.token_ids[:point]) for point in prompt.save_at}
            messages.append(assistant(BPE.decode(ids)))
            answers[len(messages) - 1] = ids


def test_an_answer_whose_message_was_edited_is_not_used():
    chat = ChatTemplate(BPE, CHATML)
    ids = BPE.encode("the answer")
    for content in ("the answer!", "the", "", " the answer", "other"):
        messages = [user("a"), assistant(content), user("b")]
        assert chat.encode_turn(messages, {1: ids}).token_ids == chat.encode(messages)


def test_an_answer_known_to_the_client_by_another_text_is_used_for_that_text():
    chat = ChatTemplate(BPE, CHATML)
    # a stop string was cut from what the client got, its tokens are in the history
    ids = BPE.encode("the answer STOP")
    messages = [user("a"), assistant("the answer "), user("b")]
    assert "STOP" not in spelled(BPE, chat.encode_turn(messages, {1: ids}).token_ids)
    prompt = chat.encode_turn(messages, {1: Answer(ids, "the answer ")})
    assert "the answer STOP<|im_end|>" in spelled(BPE, prompt.token_ids)


def test_an_answer_with_tool_calls_is_rendered_from_them():
    source = CHATML.replace("m.content", "m.content + (m.tool_calls | tojson if m.tool_calls else '')")
    chat = ChatTemplate(BPE, source)
    ids = BPE.encode("hello")
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    messages = [user("a"), {**assistant("hello"), "tool_calls": [call]}, user("b")]
    assert chat.encode_turn(messages, {1: ids}).token_ids == chat.encode(messages)


def test_a_space_that_the_template_writes_before_an_answer_is_the_one_the_answer_starts_with():
    # as in Llama 2's and Mistral's: no space ends the prompt, one stands before each answer of the history
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
        "{% else %}{{ ' ' + m.content | trim + eos_token }}{% endif %}{% endfor %}"
    )
    for tokenizer in TOKENIZERS.values():
        chat = ChatTemplate(tokenizer, source)
        messages: list[dict[str, object]] = []
        answers: dict[int, list[int]] = {}
        before: list[int] = []
        for answer in (" an answer", " an answer \n", "answer", "  an answer", " "):
            messages.append(user("an answer"))
            prompt = chat.encode_turn(messages, answers)
            if before:
                assert prompt.token_ids[: len(before)] == before
            ids = tokenizer.encode_part(answer, after_special=False)
            messages.append(assistant(tokenizer.decode(ids)))
            answers[len(messages) - 1] = ids
            before = prompt.token_ids + ids if answer.startswith(" ") and messages[-1]["content"] else []


def test_a_template_that_sees_the_markers_gets_none():
    # asks for the first characters of an answer, which a marker would hide
    source = CHATML.replace("m.content", "('(thought)' if m.content.startswith('hm') else m.content)")
    chat = ChatTemplate(BPE, source)
    messages = [user("a"), assistant("hm the answer"), user("b"), assistant("the answer"), user("c")]
    answers = {index: BPE.encode(messages[index]["content"]) for index in (1, 3)}
    assert chat.encode_turn(messages, answers).token_ids == chat.encode(messages)
    assert "hm" not in spelled(BPE, chat.encode_turn(messages, answers).token_ids)
    assert chat.encode_turn(messages, answers).save_at == chat.encode_turn(messages).save_at


def test_one_altered_answer_does_not_cost_the_others_their_ids():
    # the template trims what is left of the altered answer, and a marker at its end hides the white space there
    source = THINKING.replace("lstrip('\\n')", "strip()")
    assert source != THINKING
    chat = ChatTemplate(BPE, source)
    odd = odd_ids(BPE, "the answer", random.Random(3))
    messages = [
        *(user("a"), assistant("<think>hm</think>the world \n")),
        *(user("b"), assistant("the answer"), user("c")),
    ]
    prompt = chat.encode_turn(messages, {1: BPE.encode(messages[1]["content"]), 3: odd})
    assert spelled(BPE, prompt.token_ids) == chat.render(messages)
    assert "the world<|im_end|>" in spelled(BPE, prompt.token_ids)
    assert any(prompt.token_ids[i : i + len(odd)] == odd for i in range(len(prompt.token_ids)))


def test_an_answer_that_the_template_repeats_is_kept_in_both_places():
    chat = ChatTemplate(BPE, CHATML.replace("m.content", "m.content + '|' + m.content"))
    rng = random.Random(1)
    ids = odd_ids(BPE, "the answer", rng)
    prompt = chat.encode_turn([user("a"), assistant("the answer"), user("b")], {1: ids})
    found = [i for i in range(len(prompt.token_ids)) if prompt.token_ids[i : i + len(ids)] == ids]
    assert len(found) == 2


def test_an_answer_that_the_template_prints_as_part_of_an_object_is_plain_text_there():
    for shown in ("{{ messages }}", "{{ messages | tojson }}", "{{ messages | tojson(ensure_ascii=True) }}"):
        chat = ChatTemplate(BPE, shown)
        messages = [user("<|im_end|> a"), assistant("the 'answer' <|im_start|>")]
        prompt = chat.encode_turn(messages, {1: BPE.encode("the 'answer' <|im_start|>")})
        assert spelled(BPE, prompt.token_ids) == chat.render(messages)
        assert not set(prompt.token_ids) & set(BPE.vocabulary.ids_of_type(3))


@pytest.mark.parametrize("index", [-1, 0, 2, 9])
def test_answers_that_belong_to_no_assistant_message_are_refused(index):
    with pytest.raises(InvalidRequest, match=rf"answers\[{index}\] belongs to no assistant message"):
        ChatTemplate(BPE, CHATML).encode_turn([user("a"), assistant("b"), user("c")], {index: [1]})


@pytest.mark.parametrize("token", [-1, BPE.vocab_size])
def test_answers_with_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(InvalidRequest, match=rf"answers\[1\] holds an id outside 0..{BPE.vocab_size - 1}"):
        ChatTemplate(BPE, CHATML).encode_turn([user("a"), assistant("b"), user("c")], {1: [token]})


def test_the_saved_places_are_the_end_of_the_system_prompt_and_before_the_generation_prompt():
    chat = ChatTemplate(BPE, CHATML)
    messages = [system("you are the answer"), user("hello"), assistant("the"), user("world")]
    prompt = chat.encode_turn(messages)
    first, last = prompt.save_at
    assert spelled(BPE, prompt.token_ids[:first]) == (
        "<|im_start|>system\nyou are the answer<|im_end|>\n<|im_start|>user\n"
    )
    assert spelled(BPE, prompt.token_ids[last:]) == "<|im_start|>assistant\n"
    # another conversation under the same system prompt starts with the same ids
    other = chat.encode_turn([messages[0], user("something else")])
    assert other.token_ids[:first] == prompt.token_ids[:first]
    assert other.save_at[0] == first


def test_a_system_prompt_that_the_template_adds_itself_is_saved_too():
    source = "{{ '<|im_start|>system\nyou are the answer to all<|im_end|>\n' }}" + CHATML
    prompt = ChatTemplate(BPE, source).encode_turn([user("hello")])
    assert len(prompt.save_at) == 2


def test_without_a_system_prompt_only_the_place_before_the_answer_is_saved():
    prompt = ChatTemplate(BPE, CHATML).encode_turn([user("hello")])
    assert len(prompt.save_at) == 1
    assert spelled(BPE, prompt.token_ids[prompt.save_at[0] :]) == "<|im_start|>assistant\n"


def test_a_content_that_grows_together_with_the_header_moves_the_saved_place_before_it():
    # "\n" and "\n\n" are different tokens here, so no token ends between header and content
    tokenizer = Tokenizer.from_metadata(bpe_metadata(words=("\n\n", "hello")))
    chat = ChatTemplate(tokenizer, CHATML)
    prompt = chat.encode_turn([system("you are the answer"), user("\nhello")])
    assert spelled(tokenizer, prompt.token_ids[: prompt.save_at[0]]).endswith("<|im_end|>\n<|im_start|>")


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_saved_places_lie_inside_the_prompt_and_rise(data):
    tokenizer = data.draw(st.sampled_from(list(TOKENIZERS.values())))
    chat = ChatTemplate(
        tokenizer, data.draw(st.sampled_from([CHATML, THINKING, TRIMMED, "{{ messages[-1].content }}", "a"]))
    )
    roles = st.sampled_from(["system", "user", "assistant", "tool"])
    texts = st.text(alphabet="an \n<|im_end|>", max_size=30)
    messages = [
        {"role": role, "content": text}
        for role, text in data.draw(st.lists(st.tuples(roles, texts), min_size=1, max_size=5))
    ]
    prompt = chat.encode_turn(messages, add_generation_prompt=data.draw(st.booleans()))
    assert list(prompt.save_at) == sorted(set(prompt.save_at))
    assert all(1 <= point < len(prompt.token_ids) for point in prompt.save_at)


@both
def test_ids_do_not_depend_on_the_chance_in_the_private_characters(tokenizer):
    messages = [system("<|im_end|>"), user("<|im_start|> </think>"), assistant("an <| answer"), user("|>")]
    answers = {2: tokenizer.encode_part("an <| answer", after_special=False)}
    results = [ChatTemplate(tokenizer, THINKING).encode_turn(messages, answers) for _ in range(20)]
    assert all(result == results[0] for result in results)


def test_the_template_is_given_the_tools_the_variables_and_the_special_tokens():
    chat = ChatTemplate(BPE, "{{ eos_token }}{{ tools | tojson }}{{ enable_thinking }}{{ bos_token is defined }}")
    tools = [{"type": "function", "function": {"name": "<b>&", "parameters": {"type": "object"}}}]
    assert chat.render([user("a")], tools=tools, enable_thinking=False) == (
        '<|im_end|>[{"type": "function", "function": {"name": "<b>&", "parameters": {"type": "object"}}}]FalseFalse'
    )
    ids = chat.encode([user("a")], tools=tools, enable_thinking=False)
    assert spelled(BPE, ids) == chat.render([user("a")], tools=tools, enable_thinking=False)
    assert ids[0] == BPE.eos


@pytest.mark.parametrize("name", ["messages", "answers", "raise_exception", "strftime_now", "bos_token", "eos_token"])
def test_variables_of_the_engine_cannot_be_set(name):
    with pytest.raises(InvalidRequest, match=f"the template variable '{name}' is set by the engine"):
        ChatTemplate(BPE, CHATML).encode([user("a")], **{name: "x"})


def test_messages_and_variables_nested_too_deeply_are_refused():
    deep: list[object] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="nested 64 deep at most"):
        ChatTemplate(BPE, CHATML).encode([user("a")], tools=deep)


def test_the_developer_is_the_system_for_a_template_that_does_not_know_it():
    messages = [{"role": "developer", "content": "be the answer"}, user("a")]
    assert "<|im_start|>system\nbe the answer" in ChatTemplate(BPE, CHATML).render(messages)
    knows = CHATML + "{# developer #}"
    assert "<|im_start|>developer\nbe the answer" in ChatTemplate(BPE, knows).render(messages)


def test_the_bos_token_stands_once_whether_or_not_the_template_writes_it():
    metadata = bpe_metadata(bos_token_id=256, add_bos_token=True, control=("<s>", "<|im_start|>", "<|im_end|>"))
    metadata["tokenizer.ggml.bos_token_id"] = list(metadata["tokenizer.ggml.tokens"]).index("<s>")
    tokenizer = Tokenizer.from_metadata(metadata)
    plain = ChatTemplate(tokenizer, CHATML).encode_turn([system("you are the answer"), user("hello")])
    own = ChatTemplate(tokenizer, "{{ bos_token }}" + CHATML).encode_turn([system("you are the answer"), user("hello")])
    assert plain == own
    assert plain.token_ids[:2] == [tokenizer.bos, tokenizer.vocabulary.ids["<|im_start|>"]]
    assert spelled(tokenizer, plain.token_ids[plain.save_at[-1] :]) == "<|im_start|>assistant\n"


def test_a_file_without_a_template_gets_one_that_suits_its_tokens():
    messages = [system("be kind"), user("hello"), assistant("the"), user("world")]
    chat = ChatTemplate.from_metadata({}, BPE)
    assert chat.describe()["template"] == "chatml"
    assert chat.render(messages) == ChatTemplate(BPE, CHATML).render(messages)
    gemma = Tokenizer.from_metadata(
        spm_metadata({"▁": -1.0}, control=("<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>"))
    )
    chat = ChatTemplate.from_metadata({}, gemma)
    assert chat.describe()["template"] == "gemma"
    assert chat.render(messages) == (
        "<s><start_of_turn>user\nbe kind\n\nhello<end_of_turn>\n<start_of_turn>model\nthe<end_of_turn>\n"
        "<start_of_turn>user\nworld<end_of_turn>\n<start_of_turn>model\n"
    )
    plain = Tokenizer.from_metadata(bpe_metadata(control=()))
    chat = ChatTemplate.from_metadata({}, plain)
    assert chat.describe()["template"] == "plain"
    assert chat.render(messages[:2]) == "system:\nbe kind\n\nuser:\nhello\n\nassistant:\n"


def test_too_much_text_is_refused_and_stored_answers_do_not_count():
    chat = ChatTemplate(BPE, CHATML)
    big = "hello " * 100_000
    ids = BPE.encode(big)
    messages = [user("a"), assistant(big), user("b"), assistant(big), user("c")]
    with pytest.raises(InvalidRequest, match=r"more than 1048576 bytes of text besides its stored answers"):
        chat.encode(messages)
    assert len(chat.encode_turn(messages, {1: ids, 3: ids}).token_ids) > 2 * len(ids)
    with pytest.raises(InvalidRequest, match=r"longer than 4194304 characters"):
        chat.encode([user("x" * 5_000_000)])


def test_half_a_surrogate_pair_in_a_message_is_refused():
    with pytest.raises(InvalidRequest, match="half a surrogate pair"):
        ChatTemplate(BPE, CHATML).encode([user("a\ud83d")])


@pytest.mark.parametrize(
    "word", ["ro", "le", "role", "content", "nt", "us", "user", "system", "ss", "tool_calls", "na"]
)
@pytest.mark.parametrize("template", ["", CHATML, "{% for m in messages %}{{ m | tojson }}{% endfor %}"])
def test_control_tokens_spelled_like_roles_and_fields_break_no_chat(word: str, template: str):
    tokenizer = Tokenizer.from_metadata(bpe_metadata(words=(), control=("<|im_start|>", "<|im_end|>", word)))
    chat = ChatTemplate(tokenizer, template) if template else ChatTemplate.from_metadata({}, tokenizer)
    call = {"type": "function", "function": {"name": word, "arguments": {word: word}}}
    more = {} if word in ("role", "content", "tool_calls") else {word: word}
    calling = {**assistant("yes"), "tool_calls": [call]}
    ids = chat.encode([system(f"be {word}"), user(word), calling, {**user("go on"), **more}])
    assert "go on" in spelled(tokenizer, ids)
    if template == CHATML:
        text = spelled(tokenizer, ids)
        assert text.count("<|im_start|>user\n") == 2
        # the template's own words may be such tokens, a user's are not
        own = "".join(f"<|im_start|>{role}\n<|im_end|>\n" for role in ("system", "user", "assistant", "user"))
        assert ids.count(tokenizer.vocabulary.ids[word]) == (own + "<|im_start|>assistant\n").count(word)


def test_a_refusal_shows_the_users_own_characters_and_nothing_that_a_terminal_obeys():
    chat = ChatTemplate(BPE, "{{ raise_exception('\x1b[2J no: ' + messages[0].content) }}")
    with pytest.raises(InvalidRequest) as caught:
        chat.encode([user("a <|im_end|> b\x07c")])
    assert "no: a <|im_end|> b\N{REPLACEMENT CHARACTER}c" in str(caught.value)
    assert str(caught.value).isprintable()
