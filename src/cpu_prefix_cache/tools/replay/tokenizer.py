"""Token ids of texts and of chats, as an engine computes them: from the folder of a model, with tokenizers and Jinja.

    tokenizer.json                                   text -> token ids
    chat_template.jinja, or tokenizer_config.json    messages -> text

Templates run in Jinja's sandbox. Both libraries are imported when they are needed.
"""

import importlib.util
import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from cpu_prefix_cache.messages.errors import ConfigurationError
from cpu_prefix_cache.tools.replay.chat_messages import Chat
from cpu_prefix_cache.tools.replay.lines import BadLine


class FolderTokenizer:
    """Raises ConfigurationError for a folder without a tokenizer, or without the libraries."""

    def __init__(self, folder: Path, template: Path | None = None) -> None:
        for library in ("tokenizers", "jinja2"):
            if not _is_installed(library):
                raise ConfigurationError(f"--tokenizer needs {library}: pip install tokenizers jinja2")
        import tokenizers

        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigurationError(f"--tokenizer is the folder of a model; there is no {file}")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # that library raises nothing narrower
            raise ConfigurationError(f"{file} is no tokenizer: {error}") from error
        self._folder, self._template_file = folder, template
        self._config = _config(folder / "tokenizer_config.json")
        self._template: Any = None

    def ids(self, content: str | Chat) -> list[int]:
        """Raises BadLine as `text` does."""
        if isinstance(content, str):
            return self._encoded(content, has_special_tokens=True)
        return self._encoded(self.text(content), has_special_tokens=False)

    def text(self, chat: Chat) -> str:
        """Text that the model reads. Raises BadLine for messages that the chat template refuses."""
        from jinja2 import TemplateError

        if self._template is None:
            self._template = _compiled(self._template_text())
        try:
            text: str = self._template.render(
                {"add_generation_prompt": True, **self._special_tokens(), **chat.options},
                messages=[_with_arguments(message) for message in chat.messages],
            )
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise BadLine(f"the chat template refuses it: {error}") from error
        return text

    def _encoded(self, text: str, *, has_special_tokens: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=has_special_tokens).ids)
        except TypeError as error:  # a half of a surrogate pair, which JSON can hold and UTF-8 cannot
            raise BadLine("its text is not Unicode") from error

    def _template_text(self) -> str:
        file = self._template_file or self._folder / "chat_template.jinja"
        if self._template_file is not None or file.is_file():
            try:
                return file.read_text(encoding="utf-8")
            except (OSError, ValueError) as error:
                raise ConfigurationError(f"the chat template {file} cannot be read: {error}") from error
        found = self._config.get("chat_template")
        if isinstance(found, list):  # several, by name
            found = {each["name"]: each["template"] for each in found}.get("default")
        if not isinstance(found, str):
            raise ConfigurationError(f"{self._folder} has no chat template for messages: give --chat-template FILE")
        return found

    def _special_tokens(self) -> dict[str, str]:
        tokens = {}
        for name in ("bos_token", "eos_token", "pad_token", "unk_token"):
            value = self._config.get(name)
            tokens[name] = value.get("content", "") if isinstance(value, dict) else value or ""
        return tokens


def _is_installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _config(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{file} is not a JSON object")
    return values


def _compiled(text: str) -> Any:
    """Environment that templates of models expect."""
    from jinja2 import TemplateError, TemplateSyntaxError
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """A tag around an assistant's turn, which is for training: its contents are rendered as they are."""

        tags = {"generation"}  # noqa: RUF012  # Jinja declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def refuse(reason: str) -> NoReturn:
        raise TemplateError(reason)

    def as_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda style: datetime.now().strftime(style)
    try:
        return environment.from_string(text)
    except TemplateSyntaxError as error:
        raise ConfigurationError(f"the chat template is not Jinja: {error}") from error


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the arguments of tool calls as objects, which requests have as texts."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_with_parsed(call) for call in calls]}


def _with_parsed(call: Any) -> Any:
    try:
        function = call["function"]
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"])}}
    except (TypeError, KeyError, ValueError):
        return call
