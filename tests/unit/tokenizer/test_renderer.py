"""Chat templates are untrusted: they run confined, are stopped in time, and leave the next rendering unharmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from prism_core.errors import InvalidRequest, PrismError
from prism_core.tokenizer.renderer import Renderer

VARIABLES = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": True}


@pytest.fixture(scope="module")
def renderer():
    made = Renderer()
    yield made
    made.close()


def render(renderer: Renderer, source: str, **more: object) -> str:
    result = renderer.render(source, VARIABLES | more, [{}], 0.0)[0]
    if isinstance(result, InvalidRequest):
        raise result
    return result


ENDLESS = {
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a huge power": "{{ 9 ** (9 ** 9) }}",
    "doubling text": "{% set n = namespace(x='aaaa') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "a long product": "{{ 'x' * 10 ** 10 }}",
    "a wide format": "{{ '%9999999999d' % 1 }}",
    "a wide center": "{{ 'x' | center(10 ** 10) }}",
    "a long output": "{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "a long output in one piece": "{{ 'x' * (4194304 + 1) }}",
    "a wide range": "{% for i in range(10 ** 9) %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5_000 + "{% endif %}" * 5_000,
    "a slow pattern": "{{ ('a' * 3000000) | replace('a', 'a' * 50) }}",
    "lipsum": "{% for i in range(9999) %}{{ lipsum(n=99) }}{% endfor %}",
}


def test_renderings_too_long_together_are_refused_at_once(renderer):
    # each is within the limit of characters, but as JSON in ASCII three are more than one reply may have
    with pytest.raises(InvalidRequest, match="the renderings of the chat take 144000042 bytes together; 134217728 are"):
        renderer.render("{{ '\U0001f600' * 4000000 }}", VARIABLES, [{}, {}, {}], 0.0)
    assert render(renderer, "{{ 1 }}") == "1"


@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_that_would_never_end_is_stopped(renderer, name):
    began = time.process_time()
    with pytest.raises(InvalidRequest) as caught:
        render(renderer, ENDLESS[name])
    assert "chat" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
    # the work was the child's: this process has hardly computed, whatever the clock on the wall says
    assert time.process_time() - began < 1.0
    assert render(renderer, "{{ messages[0].content }}") == "hi"


ESCAPES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a function": "{{ raise_exception.__globals__ }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}",
    "code of a generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "attr filter": "{{ '' | attr('__class__') }}",
    "attribute by map": "{{ [''] | map(attribute='__class__') | list }}",
    "format string": "{{ '{0.__class__}'.format(1) }}",
    "format map": "{{ '{a.__class__}'.format_map({'a': 1}) }}",
    "self": "{{ self.__init__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "joiner": "{{ joiner.__init__.__globals__ }}",
    "namespace": "{{ namespace.__init__.__globals__ }}",
    "lipsum": "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "config": "{{ config.items() }}",
    "import": "{% import 'os' as os %}{{ os.name }}",
    "include": "{% include '/etc/passwd' %}",
    "extends": "{% extends '/etc/passwd' %}",
    "changing a list": "{{ messages.append(1) }}",
    "changing a dict": "{{ messages[0].update({'a': 1}) }}",
    "time zone objects": "{{ strftime_now.__closure__ }}",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_cannot_reach_python_builtins(renderer, name):
    try:
        text = render(renderer, ESCAPES[name])
    except InvalidRequest:
        text = ""
    assert text in ("", "[Undefined]")


def test_the_templates_own_refusal_reaches_the_user(renderer):
    with pytest.raises(InvalidRequest, match=r"refuses these messages: roles must alternate$"):
        render(renderer, "{{ raise_exception('roles must\n  alternate') }}")


def test_a_syntax_error_names_its_line(renderer):
    with pytest.raises(InvalidRequest, match=r"syntax error in line 2: "):
        render(renderer, "a\n{% endfor %}")


def test_an_error_in_the_template_is_told_in_one_sentence(renderer):
    with pytest.raises(InvalidRequest, match=r"failed: 'dict object' has no attribute 'x'$"):
        render(renderer, "{{ messages[0].x.y }}")


def test_templates_have_what_templates_expect(renderer):
    assert render(renderer, "{{ {'b': '<é>\\'&', 'a': [1, none]} | tojson }}") == '{"b": "<é>\'&", "a": [1, null]}'
    assert render(renderer, "{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render(renderer, "{{ strftime_now('%Y') }}") == time.strftime("%Y", time.localtime(0))
    assert (
        render(renderer, "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}") == "13"
    )
    assert render(renderer, "{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert render(renderer, "{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
    # blocks take their line with them
    assert render(renderer, "a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert render(renderer, "{{ tools is defined }} {{ enable_thinking }}", enable_thinking=False) == "False False"


def test_each_rendering_of_a_request_has_its_own_outcome(renderer):
    source = "{{ raise_exception('no') if n == 1 else n }}"
    results = renderer.render(source, {"n": 0}, [{}, {"n": 1}, {"n": 2}], 0.0)
    assert [str(result) for result in results] == ["0", "the model's chat template refuses these messages: no", "2"]
    assert isinstance(results[1], InvalidRequest)


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", {("a",): 1}])
def test_variables_that_are_no_json_are_refused(renderer, value):
    with pytest.raises(InvalidRequest, match="must be JSON values"):
        render(renderer, "x", value=value)


def test_a_child_that_was_killed_is_replaced(renderer):
    assert render(renderer, "a") == "a"
    first = renderer._child.pid
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert render(renderer, "b") == "b"
    assert renderer._child.pid != first


def test_a_child_that_stands_still_is_given_up(renderer, monkeypatch):
    monkeypatch.setattr("prism_core.tokenizer.renderer.WALL_SECONDS", 0.2)
    assert render(renderer, "a") == "a"
    os.kill(renderer._child.pid, signal.SIGSTOP)
    with pytest.raises(InvalidRequest, match=r"ran for more than 0.2 s"):
        render(renderer, "a")
    monkeypatch.undo()
    assert render(renderer, "b") == "b"


def test_a_child_that_cannot_start_is_an_error_of_ours(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(PrismError, match="the template process did not start"):
        Renderer().render("a", {}, [{}], 0.0)


def test_the_child_gets_no_secrets_and_ends_with_its_parent():
    script = (
        "import sys, time\n"
        "from prism_core.tokenizer.renderer import Renderer\n"
        "r = Renderer(); r.render('a', {}, [{}], 0.0)\n"
        "print(r._child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = os.environ | {"PRISM_API_KEYS": "secret"}
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=environment, text=True)
    child = int(parent.stdout.readline())
    with open(f"/proc/{child}/environ") as stream:
        assert "secret" not in stream.read()
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while _lives(child):
        assert time.monotonic() < deadline, "the child outlived its parent"
        os.sched_yield()


def _lives(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
