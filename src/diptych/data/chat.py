"""Messages as text: one way to write a conversation, for training, scoring and serving alike.

A processor's folder flows in (chat template, tokenizer); rendered text and token ids flow out.
Images, pixels, torch and transformers are unknown here, so that the nodes that only count tokens
stay quick. That the text equals what transformers renders is tested.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from diptych.core.errors import FormatError
from diptych.core.records import IMAGE_PLACEHOLDER, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token")

_UNREADABLE = (
    jinja2.TemplateError,
    SyntaxError,
    RecursionError,
    ArithmeticError,
    MemoryError,
    TypeError,
    ValueError,
)
"""What a template raises that is wrong, or is meant to do harm."""
_MAX_CHARS = 10_000_000
_MAX_POWER_BITS = 4096


def to_chat(messages: Sequence[Message]) -> list[dict[str, Any]]:
    r"""Write messages as transformers' chat content, each `<image>` as an image item.

    One line break on each side of a placeholder is dropped, because LLaVA's data write
    '<image>\nquestion' for what users of a release write as an image item and a text item.

    Returns:
        One `{"role", "content": [{"type": "image"} | {"type": "text", "text"}, ...]}` a message.
    """
    return [{"role": message.role, "content": _content(message.text)} for message in messages]


def _content(text: str) -> list[dict[str, str]]:
    pieces = text.split(IMAGE_PLACEHOLDER)
    content: list[dict[str, str]] = []
    for index, piece in enumerate(pieces):
        if index > 0:
            content.append({"type": "image"})
            piece = piece.removeprefix("\n")
        if index < len(pieces) - 1:
            piece = piece.removesuffix("\n")
        if piece or len(pieces) == 1:
            content.append({"type": "text", "text": piece})
    return content


class ChatTokenizer:
    """The chat template and the tokenizer of a processor's folder, without transformers."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        self.folder = folder
        template = _read(folder / "chat_template.jinja")
        config = json.loads(_read(folder / "tokenizer_config.json"))
        self._tokenizer: Tokenizer = Tokenizer.from_str(_read(folder / "tokenizer.json"))
        self._names = {
            name: _content_of(config[name])
            for name in _NAMED_TOKENS
            if config.get(name) is not None
        }
        self.end_of_turn = self._names.get("eos_token", "")
        environment = _environment()
        self._marks: _Generation = environment.extensions[_Generation.identifier]  # pyright: ignore[reportAttributeAccessIssue]
        try:
            self._template = environment.from_string(template)
        except _UNREADABLE as error:
            raise FormatError(
                f"The chat template in '{folder}' cannot be read: {error}",
                cure="Load a processor whose chat template transformers can render",
            ) from error

    def render(self, chat: Sequence[dict[str, Any]], *, answer_next: bool = False) -> str:
        """Render a chat; with `answer_next` up to where the assistant's next answer begins.

        Raises:
            FormatError: the template refuses this chat.
        """
        try:
            return self._template.render(
                messages=chat, add_generation_prompt=answer_next, **self._names
            )
        except _UNREADABLE as error:
            raise FormatError(
                f"The chat template in '{self.folder}' refuses a conversation: {error}",
                cure="Load a processor whose chat template takes these roles and images",
            ) from error

    def marked_answers(self, chat: Sequence[dict[str, Any]]) -> list[tuple[int, int]]:
        """Return the characters [start, end) of a rendered chat that `{% generation %}` marks.

        Source: `AssistantTracker` of transformers.utils.chat_template_utils.
        """
        return self._marks.collect(self._template.generate(messages=chat, **self._names))

    def tokenize(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return token ids, and for each token the characters [start, end) it stands for."""
        # A tokenizer may put it in front itself, which transformers asks it not to do twice.
        begins = self._names.get("bos_token", "")
        encoding = self._tokenizer.encode(
            text, add_special_tokens=not (begins and text.startswith(begins))
        )
        return encoding.ids, encoding.offsets

    def __reduce__(self) -> tuple[type[ChatTokenizer], tuple[Path]]:
        """Travel to loader workers as the folder's path: a compiled template cannot travel."""
        return (ChatTokenizer, (self.folder,))


class _Generation(jinja2.ext.Extension):
    """Read transformers' `{% generation %}` marks, and say where they are when asked."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance's set

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self._num_chars = 0
        self._found: list[tuple[int, int]] | None = None

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_mark", lineno=line)
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def collect(self, pieces: Iterable[str]) -> list[tuple[int, int]]:
        """Render piece by piece, and return the characters [start, end) of each mark."""
        self._num_chars, self._found = 0, []
        try:
            for piece in pieces:
                self._num_chars += len(piece)
            return self._found
        finally:
            self._found = None

    def _mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        if self._found is not None:
            self._found.append((self._num_chars, self._num_chars + len(text)))
        return text


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which no single operation takes all the memory."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        """Multiply or raise to a power, within bounds."""
        if operator == "**":
            large = isinstance(left, int) and isinstance(right, int)
            if large and left.bit_length() * right > _MAX_POWER_BITS:
                raise jinja2.exceptions.SecurityError("a power has too many digits")
        else:
            for text, times in ((left, right), (right, left)):
                is_repeated = isinstance(text, str | list | tuple) and isinstance(times, int)
                if is_repeated and len(text) * times > _MAX_CHARS:
                    raise jinja2.exceptions.SecurityError("a text is repeated too often")
        return super().call_binop(context, operator, left, right)


def _environment() -> ImmutableSandboxedEnvironment:
    """Build the sandbox that transformers renders with.

    Source: `transformers.utils.chat_template_utils._compile_jinja_template`.
    Differs: no clock, for a template that writes the date would give other tokens tomorrow;
    bounds on what is multiplied; none of Jinja's own functions but the harmless.
    """
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.globals.pop("lipsum")
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _refuse_clock
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _refuse_clock(_: str) -> NoReturn:
    raise jinja2.TemplateError("it writes today's date")


def _content_of(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise FormatError(
            f"The processor has no file '{path}'",
            cure="Run `kedro run --pipelines=prepare`, which writes the processor's folder",
        ) from error
