"""A model folder's chat template, compiled without transformers: messages in, text out.

The environment is the one Hugging Face documents for chat templates: a sandboxed Jinja with `trim_blocks` and
`lstrip_blocks`, loop controls, a `tojson` that leaves HTML and Unicode alone, `raise_exception`, `strftime_now`
and the `{% generation %}` tag.
"""

from __future__ import annotations

import functools
import json
import marshal
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from envs.core import Message
from envs.tool_formats.reading import THINK_CLOSE

_OWN_VARIABLES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range")
)
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """A model folder or a conversation that cannot be rendered; the message says what is wrong and what to do."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for loss masks; here segments do, so it is plain."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's own interface)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which looks for a dict's key sooner: messages are dicts, and templates look into them often."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        # As the sandbox does it, without the exception that it has to catch first, or the look at what is forbidden.
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind in _JINJA_OWN and not attribute.startswith("_"):
            try:
                return getattr(obj, attribute)
            except AttributeError:
                pass
        return super().getattr(obj, attribute)


_OF_DICTS = frozenset(dir(dict))
_JINJA_OWN = frozenset((jinja2.runtime.LoopContext, jinja2.utils.Namespace))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    if indent is None and separators is None and not ensure_ascii and not sort_keys:
        try:
            known = marshal.dumps(value, 2)
        except ValueError:  # no plain value
            known = b""
        if 0 < len(known) <= _LONGEST_VALUE:
            return _json_of(known)
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_LONGEST_VALUE = 16_384


@functools.lru_cache(256)
def _json_of(value: bytes) -> str:
    """The JSON of a marshalled value: tools are written into every rendering, and are the same each time."""
    return json.dumps(marshal.loads(value), ensure_ascii=False)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def read_json(path: Path) -> dict[str, Any]:
    """The object in `path`, or `{}` if there is no such file; raises `ChatTemplateError` if it is no JSON object."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ChatTemplateError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise ChatTemplateError(f"{path} must hold a JSON object")
    return value


def _template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template text by name, from whichever of the three places a model folder may keep it in."""
    single = folder / "chat_template.jinja"
    sources: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        sources["default"] = inline
    elif isinstance(inline, list):
        sources.update({entry["name"]: entry["template"] for entry in inline})
    if single.is_file():
        sources["default"] = single.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = path.read_text(encoding="utf-8")
    if "default" not in sources:
        raise ChatTemplateError(
            f"{folder} has no chat template (looked for chat_template.jinja and `chat_template` in "
            "tokenizer_config.json). A base model needs one: put a chat_template.jinja beside its tokenizer.json."
        )
    return sources


def normalise(messages: Sequence[Message], *, text_arguments: bool = False) -> list[Message]:
    """Copies of `messages` as templates expect them.

    Keys that are None are dropped, reasoning is found under any of its names, and the arguments of tool calls,
    which the OpenAI format sends as a JSON string, are objects (a string that is no JSON object stays a string), or
    JSON text if the template wants `text_arguments`.
    """
    result = []
    for message in messages:
        copy = {key: value for key, value in message.items() if value is not None}
        reasoning = next((copy[key] for key in _REASONING_KEYS if key in copy), None)
        if reasoning is not None:
            copy["reasoning_content"] = reasoning
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_call(call, text_arguments) for call in copy["tool_calls"]]
        result.append(copy)
    return result


def _call(call: dict[str, Any], text_arguments: bool) -> dict[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if text_arguments:
        if isinstance(arguments, str):
            return call
        arguments = json.dumps(arguments, ensure_ascii=False)
    else:
        if not isinstance(arguments, str):
            return call
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return call
        if not isinstance(arguments, dict):
            return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


class ChatTemplate:
    """The compiled template (or named templates) of one model folder."""

    def __init__(self, folder: Path, config: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        """`config` is tokenizer_config.json; `variables` reach every rendering (special tokens, `enable_thinking`)."""
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        sources = _template_sources(folder, config)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template of {folder} does not compile: {error}") from error
        for template in self._templates.values():
            # In one layer: each rendering copies them, name by name through every layer that there is.
            template.globals = dict(template.globals)
        self._folder = folder
        self.knows_thinking = any(THINK_CLOSE in source for source in sources.values())
        """Whether it puts thinking between tags, or takes it out."""
        self._names: frozenset[str] = frozenset().union(
            *(jinja2.meta.find_undeclared_variables(environment.parse(s)) for s in sources.values())
        )
        self._variables = dict(variables)

    def set_variables(self, values: Mapping[str, Any]) -> None:
        """Let `values` reach every rendering. Raises `ChatTemplateError` for one that the template does not read."""
        for name in values:
            if name in _OWN_VARIABLES or name not in self._names:
                known = ", ".join(sorted(self._names - _OWN_VARIABLES)) or "none"
                raise ChatTemplateError(
                    f"template_kwargs: the chat template of {self._folder} reads no variable {name!r} that may be set; "
                    f"those that it reads: {known}"
                )
        self._variables.update(values)

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> str:
        """The template applied once to `messages` (see `normalise`). Raises `ChatTemplateError` if it refuses them."""
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        values = {
            **self._variables,
            "messages": list(messages),
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._templates[name].render(values)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            roles = [message.get("role") for message in messages[-4:]]
            raise ChatTemplateError(
                f"the chat template of {self._folder} refuses a conversation ending in roles {roles}: {error}"
            ) from error
