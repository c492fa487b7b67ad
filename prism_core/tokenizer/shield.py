"""Keeps a user's text text on its way through a chat template.

A template's output is searched for control tokens, and the template mixes the user's strings into that output. So
before rendering, the characters with which a user's string could start or continue the spelling of a control token are
replaced, one for one, by private-use characters that occur nowhere in the request or the template; afterwards they are
put back, in text that is then encoded literally. Cutting, joining, trimming or quoting by the template does not undo
this.

Invariant: no control token's spelling in the rendered text contains a character that came from a user's string.
Strings that the template compares with (`</think>`, say) stay readable to it in the user's text; none of them starts a
spelling. Not promised: the same where a template builds a control token around part of a user's string, or cuts into
one of the readable strings.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from prism_core.errors import InvalidRequest

MAX_DEPTH: Final = 64
MAX_READABLE: Final = 256
"""Constants of a template that are searched for at every anchor of a user's text; real ones have a dozen."""
_PRIVATE: Final = re.compile("[\U000f0000-\U0010ffff]")
_RANGES: Final = ((0xF0000, 0xFFFFE), (0x100000, 0x10FFFE))
_TRUSTED_FIELDS: Final = frozenset(("role", "type"))
_PLAIN_WORD: Final = re.compile(r"[\w$.-]+")
# every quote may open a constant: a stray apostrophe in the template then hides none, it only adds odd ones
_QUOTED: Final = re.compile(r"""(?=(['"])((?:(?!\1).){2,200}?)\1)""", re.DOTALL)
_ESCAPES: Final = {"\\n": "\n", "\\t": "\t", "\\r": "\r", "\\\\": "\\"}
_ESCAPE: Final = re.compile("|".join(map(re.escape, _ESCAPES)))


class ControlSpellings:
    """What must not arise from user text, for one vocabulary and one template."""

    def __init__(self, spellings: Iterable[str], template: str) -> None:
        self.spellings = tuple(spellings)
        self.longest = max(map(len, self.spellings), default=0)
        self.joined = "\0".join(self.spellings)
        self.endings = {text[place:] for text in self.spellings for place in range(1, len(text))}
        self.plain = [text for text in self.spellings if _PLAIN_WORD.fullmatch(text)]
        anchors = sorted({(text.lstrip() or text)[0] for text in self.spellings})
        self.anchors = None
        if anchors:
            readable = sorted(self._compared(template, anchors), key=len, reverse=True)
            ahead = f"(?!{'|'.join(map(re.escape, readable))})" if readable else ""
            self.anchors = re.compile(ahead + "[" + "".join(map(re.escape, anchors)) + "]")

    def _compared(self, template: str, anchors: Sequence[str]) -> set[str]:
        """What the template's own string constants have from an anchor on: a user's text may hold it to be found."""
        starts = {text[:length] for text in self.spellings for length in range(1, len(text) + 1)}
        whole = set(self.spellings)
        found: set[str] = set()
        for _, quoted in _QUOTED.findall(template):
            constant = _ESCAPE.sub(lambda match: _ESCAPES[match.group()], quoted)
            for place, char in enumerate(constant):
                text = constant[place:]
                if char not in anchors or len(text) < 2 or text in starts:
                    continue
                if not any(text[:length] in whole for length in range(1, min(len(text), self.longest) + 1)):
                    found.add(text)
            if len(found) >= MAX_READABLE:
                break
        return found


class Shield:
    """The private characters of one request: stand-ins for characters of user text, and markers."""

    def __init__(self, spellings: ControlSpellings, template: str, values: object) -> None:
        self._spellings = spellings
        self._taken = set(_PRIVATE.findall(template))
        for text in _strings(values, 0):
            self._taken.update(_PRIVATE.findall(text))
        self._next = 0xF0000 + secrets.randbelow(0xFFFE)
        self._given: list[str] = []
        self._stand_ins: dict[str, str] = {}
        self._back: dict[int, str] = {}

    def fresh(self) -> str:
        """A character that is nowhere in this request."""
        for _ in range(0x20000):
            code = self._next
            self._next = 0xF0000 if code >= 0x10FFFD else code + 1
            if any(low <= code < high for low, high in _RANGES) and chr(code) not in self._taken:
                self._taken.add(chr(code))
                self._given.append(chr(code))
                return chr(code)
        raise InvalidRequest("the messages use every private-use character of Unicode; none is left to mark them with")

    def text(self, text: str, *, whole_word: bool = False) -> str:
        """A user's string with its dangerous characters replaced; `whole_word`: also if it is the inside of a token."""
        spellings = self._spellings
        if spellings.anchors is None or not text:
            return text
        covered = spellings.anchors.sub(lambda found: self._stand_in(found.group()), text)
        start = len(text) - len(text.lstrip())
        head = text[start : start + spellings.longest]
        if head and covered[start] == text[start]:
            continues = any(head[:length] in spellings.endings for length in range(1, len(head) + 1))
            inside = whole_word and text.strip() in spellings.joined
            if continues or inside:
                covered = covered[:start] + self._stand_in(text[start]) + covered[start + 1 :]
        return covered

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A checked message, covered but for its role and the two field names that every message has.

        Those are known words and not a user's: they stay, whatever the vocabulary's control tokens are called.
        """
        own = {"role": message["role"], "content": self.text(message["content"], whole_word=True)}
        rest = {name: value for name, value in message.items() if name not in own}
        others = iter(self.value(rest, whole_word=True).items())
        return dict((name, own[name]) if name in own else next(others) for name in message)

    def value(self, value: Any, *, whole_word: bool = False, depth: int = 0) -> Any:
        """A JSON value with every string in it covered, but for roles and types and plain field names."""
        if depth > MAX_DEPTH:
            raise InvalidRequest(f"messages and template variables may be nested {MAX_DEPTH} deep at most")
        if isinstance(value, str):
            return self.text(value, whole_word=whole_word)
        if isinstance(value, Mapping):
            return {
                self._key(name): item
                if name in _TRUSTED_FIELDS and isinstance(item, str) and self._is_plain(item)
                else self.value(item, whole_word=whole_word, depth=depth + 1)
                for name, item in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [self.value(item, whole_word=whole_word, depth=depth + 1) for item in value]
        return value

    def restore(self, text: str) -> str:
        """The user's own characters again."""
        return text.translate(self._back) if self._back else text

    def unescaped(self, text: str) -> str:
        """A rendering in which this request's private characters stand for themselves again.

        A template that prints a whole object, or JSON in ASCII, spells them as escapes.
        """
        if "\\U000" in text or "\\U0010" in text or "\\ud" in text:
            for char in self._given:
                text = text.replace(repr(char)[1:-1], char).replace(json.dumps(char)[1:-1], char)
        return text

    def _key(self, name: Any) -> Any:
        return self.text(name) if isinstance(name, str) and not self._is_plain(name) else name

    def _is_plain(self, word: str) -> bool:
        """A word that templates look up or compare with, and that spells no token."""
        return _PLAIN_WORD.fullmatch(word) is not None and not any(text in word for text in self._spellings.plain)

    def _stand_in(self, char: str) -> str:
        known = self._stand_ins.get(char)
        if known is None:
            known = self._stand_ins[char] = self.fresh()
            self._back[ord(known)] = char
        return known


def _strings(value: object, depth: int) -> Iterable[str]:
    if depth > MAX_DEPTH:
        raise InvalidRequest(f"messages and template variables may be nested {MAX_DEPTH} deep at most")
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from _strings(name, depth + 1)
            yield from _strings(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item, depth + 1)
