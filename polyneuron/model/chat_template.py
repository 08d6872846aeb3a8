"""A conversation as the prompt its model was trained on, by the template in the model's file."""

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError

from polyneuron.errors import ConfigError
from polyneuron.model.template_sandbox import (
    SOURCE_CHARS_MAX,
    LimitedEnvironment,
    Meter,
    render_limited,
)
from polyneuron.model.tokenizer import Tokenizer

Message = Mapping[str, Any]
_PRIVATE_USE = range(0xF0000, 0xFFFFE)
_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """The compiled template of one model; usable from several threads."""

    def __init__(
        self, text: str, source: str = "", now: Callable[[], datetime] = datetime.now
    ) -> None:
        self._place = f"{source}: " if source else ""
        self._lock = threading.Lock()  # one rendering at a time: the environment has one meter
        self._environment = LimitedEnvironment()
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: now().strftime(form)
        if len(text) > SOURCE_CHARS_MAX:
            raise ConfigError(
                f"{self._place}{_KEY} has {len(text)} characters, "
                f"at most {SOURCE_CHARS_MAX} are taken"
            )
        self._text = text
        try:
            self._template = self._environment.from_string(text)
        except Exception as error:  # a template can break the compiler in many ways
            raise ConfigError(f"{self._place}{_KEY}: {_message(error)}") from error

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], source: str = "") -> "ChatTemplate":
        """Take the template of a GGUF; `source` is the file's name, for error messages."""
        text = metadata.get(_KEY)
        if not isinstance(text, str) or not text:
            place = f"{source}: " if source else ""
            raise ConfigError(
                f"{place}{_KEY} is missing: this model has no chat template; "
                f"give it raw text with `polyneuron run -p`"
            )
        return cls(text, source)

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        bos_token: str = "",
        eos_token: str = "",
    ) -> str:
        """The conversation as text."""
        with self._lock:
            self._environment.meter = Meter()
            try:
                pieces = self._template.generate(
                    messages=[_plain_message(message) for message in messages],
                    add_generation_prompt=add_generation_prompt,
                    bos_token=bos_token,
                    eos_token=eos_token,
                )
                return render_limited(self._environment, pieces)
            except ConfigError:
                raise
            except Exception as error:  # whatever the template's expressions raise
                raise ConfigError(f"{self._place}chat template: {_message(error)}") from error

    def encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the conversation; control tokens come from the template alone.

        Where a message has the text of a control token, its first character is swapped for a
        private one while the template runs, and back once the control tokens are split off.
        """
        controls = tokenizer.control_texts
        swaps = _choose_swaps(controls, [self._text, *_strings(messages)])
        guarded = _map_strings(messages, lambda text: _guard(text, controls, swaps))
        rendered = self.render(
            guarded,
            add_generation_prompt,
            _token_text(tokenizer, tokenizer.bos_id),
            _token_text(tokenizer, tokenizer.eos_id),
        )
        back = {ord(private): first for first, private in swaps.items()}
        parts = [
            part if isinstance(part, int) else part.translate(back)
            for part in tokenizer.split_special(rendered)
        ]
        add_bos = tokenizer.add_bos and parts[:1] != [tokenizer.bos_id]
        return tokenizer.encode_parts(parts, add_bos)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _message(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split()) or type(error).__name__


def _token_text(tokenizer: Tokenizer, token_id: int | None) -> str:
    return "" if token_id is None else tokenizer.token_text(token_id)


def _plain_message(message: Message) -> dict[str, Any]:
    """The message with its content as one text; templates differ in whether they take a list."""
    if "role" not in message:
        raise ConfigError("messages: a message has no role")
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = "\n".join(_part_text(part) for part in content)
    return {**message, "content": "" if content is None else content}


def _part_text(part: Any) -> str:
    if (
        isinstance(part, Mapping)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
    ):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise ConfigError(f"messages: content of type {kind!r} is not supported; only text is")


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for part in value.values() for text in _strings(part))
    elif isinstance(value, list | tuple):
        yield from (text for part in value for text in _strings(part))


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(part, change) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(part, change) for part in value]
    return value


def _choose_swaps(controls: Iterable[str], texts: Sequence[str]) -> dict[str, str]:
    """First character of a control token -> a private character that occurs in no text."""
    firsts = sorted({text[0] for text in controls})
    used = {char for text in texts for char in text if ord(char) in _PRIVATE_USE}
    free = (chr(code) for code in _PRIVATE_USE if chr(code) not in used)
    return dict(zip(firsts, free, strict=False))


def _guard(text: str, controls: Iterable[str], swaps: Mapping[str, str]) -> str:
    """Swap the first character of each control text; all others stay."""
    starts: set[int] = set()
    for control in controls:
        at = text.find(control)
        while at >= 0:
            starts.add(at)
            at = text.find(control, at + 1)
    if not starts:
        return text
    return "".join(swaps[char] if i in starts else char for i, char in enumerate(text))
