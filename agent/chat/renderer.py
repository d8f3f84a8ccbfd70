"""Chat rendering that only ever appends.

The sampled ids are the record: they are never decoded and encoded again. What the environment says after an action is
rendered as the tokens that the model's own chat template would put there, so that

    prompt + action + observation + action + ...  ==  the template applied once to the whole conversation

except for thinking that the template strips from earlier turns. `docs/chat.md` has the reasoning.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from agent.chat.recent import dropped_range, is_check, probes
from agent.chat.template import ChatTemplate, ChatTemplateError, normalise, read_json
from agent.chat.tokenizer import SURROGATES, ChatTokenizer, load_tokenizer
from agent.chat.tool_manners import learn_tool_manners
from envs.core import Message
from envs.tool_calls import FamilyFormat, parse_calls
from envs.tool_formats.reading import THINK_CLOSE

log = logging.getLogger(__name__)

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_SAMPLE_CONTENT = "\uf8ff"  # content that no template writes
_TRUSTED_ROLES = ("system", "developer", "assistant")


class Rendering(msgspec.Struct, frozen=True):
    """Tokens that nobody sampled (a prompt or an observation) and the text that they spell."""

    token_ids: tuple[int, ...]
    text: str


class ChatRenderer:
    """Renders conversations for one model folder, and extends them by appending.

    Use:
        renderer = ChatRenderer.from_pretrained(folder)
        prompt = renderer.start(info["messages"], info["tools"])
        completion = await engine.generate(prompt.token_ids, sampling)        # stop_token_ids=renderer.stop_token_ids
        action = renderer.decode(completion.token_ids)                        # goes to env.step
        transcript = [*info["messages"], {"role": "assistant", "content": action}]
        observation = renderer.extend(transcript, completion.token_ids, step_info["messages"], info["tools"])
        # the next prompt: prompt.token_ids + completion.token_ids + observation.token_ids

    Special tokens are parsed where the template writes them. In content they are text: all control tokens in user and
    tool messages; in system and assistant messages and in tool schemas, which may show `<tool_call>` on purpose, only
    the tokens that open and close turns.

    `tool_format` is the form in which the model's family writes tool calls, as its template shows (`hermes` where the
    template shows none). A template that can't show what a tool answered is refused where there are tools, unless
    `tool_answers="user"` says that answers are the user's.
    """

    def __init__(
        self,
        template: ChatTemplate,
        tokenizer: ChatTokenizer,
        eos_ids: Sequence[int],
        *,
        tool_format: FamilyFormat | None = None,
        tool_answers: Literal["tool", "user"] = "tool",
    ) -> None:
        """Prefer `from_pretrained`. `eos_ids` are the end tokens that the model's configuration names."""
        self._manners = learn_tool_manners(template, tool_format)
        self._answers_as_user = tool_answers == "user"
        self.tool_format: FamilyFormat = self._manners.tool_format or "hermes"
        self._template = template
        self._tokenizer = tokenizer
        self.looks_back = True
        """Whether what stands behind an action depends on turns of long ago, so that all are rendered each time."""
        self._turn_markers = frozenset[str]()
        self._turn_ends = frozenset[int]()
        self.turn_end_id: int | None = None
        """The token with which the template ends an assistant turn; None where it writes no single token."""
        self._learn_turn_frames()
        ends: list[int] = [] if self.turn_end_id is None else [self.turn_end_id]
        ends += self._learn_call_end()
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *eos_ids]))
        """Tokens that end an action: the template's turn end first, then the model's eos tokens."""
        self._turn_markers |= {self._token(index) for index in self.stop_token_ids} & self._tokenizer.control
        self.looks_back = any(self._looks_back(*probe) for probe in probes())

    @classmethod
    def from_pretrained(
        cls,
        path: Path,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_format: FamilyFormat | None = None,
        tool_answers: Literal["tool", "user"] = "tool",
    ) -> ChatRenderer:
        """Load the tokenizer and the chat template of the model folder `path` (Hugging Face layout).

        `template_kwargs` reach the template in every rendering (such as `enable_thinking`); `tool_format` None: the
        one that the template writes. Raises `ChatTemplateError` if a file is missing or unreadable, or the template
        reads no such variable.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ChatTemplateError(f"no such model folder: {folder}")
        config = read_json(folder / "tokenizer_config.json")
        specials = {key: _content(config[key]) for key in _SPECIAL_TOKEN_KEYS if config.get(key) is not None}
        template = ChatTemplate(folder, config, specials)
        template.set_variables(template_kwargs or {})
        tokenizer = load_tokenizer(folder, config)
        generation = read_json(folder / "generation_config.json") or read_json(folder / "config.json")
        eos = generation.get("eos_token_id")
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        if "eos_token" in specials:
            index = tokenizer.token_to_id(specials["eos_token"])
            if index is None:
                raise ChatTemplateError(f"{folder}: eos_token {specials['eos_token']!r} is not in tokenizer.json")
            eos_ids.append(index)
        return cls(template, ChatTokenizer(tokenizer), eos_ids, tool_format=tool_format, tool_answers=tool_answers)

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> Rendering:
        """The prompt: `messages` and the tool schemas, up to and including the generation prompt.

        Raises `ChatTemplateError` if there are tools and the template can't show what they answer, or writes calls in
        a form that is not known.
        """
        if tools:
            self._require_tools()
        return self.render(messages, tools, add_generation_prompt=True)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendering:
        """The template applied once to the whole conversation (what `extend` agrees with)."""
        mark = self._tokenizer.choose_mark([list(messages), tools])
        text = self._template.render(
            self._marked(self._normalised(messages), mark),
            self._marked_tools(tools, mark),
            add_generation_prompt=add_generation_prompt,
        )
        return Rendering(self._tokenizer.encode(text, mark), self._tokenizer.strip_marks(text, mark))

    def extend(
        self,
        transcript: Sequence[Message],
        action_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Rendering:
        """The tokens to append after an action: the end of its turn, `messages`, and the next generation prompt.

        `transcript` is the conversation up to and including the action's assistant message (or up to it), and
        `action_ids` the action as sampled. If its last token is a stop token, that token ended the turn and the
        template's own end is not added again; if not (cut by length), the end is the observation's first token.
        """
        ids, text = self._after_action(transcript, messages, tools, add_generation_prompt=True)
        if action_ids and action_ids[-1] in self.stop_token_ids:
            ids, text = self._without_turn_end(ids, text, action_ids[-1])
        return Rendering(ids, text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of an action for the environment: without its stop token, with other special tokens as text.

        Bytes that are no whole character (an action cut by length) become replacement characters.
        """
        kept = ids[:-1] if ids and ids[-1] in self.stop_token_ids else ids
        return self._tokenizer.tokenizer.decode(list(kept), skip_special_tokens=False)

    @property
    def reasoning_form(self) -> Literal["think", "harmony", "none"]:
        """How models of this template's family keep thinking apart: between tags, in a channel, or not at all."""
        if self.tool_format == "harmony":
            return "harmony"
        return "think" if self._template.knows_thinking or THINK_CLOSE in self._tokenizer.control else "none"

    @property
    def vocabulary(self) -> int:
        """How many tokens the tokenizer has, special ones too."""
        return self._tokenizer.tokenizer.get_vocab_size(with_added_tokens=True)

    def piece(self, token_id: int) -> str:
        """What one token spells, special ones too; bytes that are no whole character are replacement characters."""
        return self._tokenizer.tokenizer.decode([token_id], skip_special_tokens=False)

    def text_of(self, token_ids: Sequence[int]) -> str:
        """What tokens spell together, special ones too."""
        return self._tokenizer.tokenizer.decode(list(token_ids), skip_special_tokens=False)

    def encode_text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a bare text, as the tokenizer itself has it: special tokens in it are parsed."""
        encoded = self._tokenizer.tokenizer.encode_batch_fast(
            [SURROGATES.sub("\ufffd", text)], add_special_tokens=add_special_tokens
        )
        return tuple(encoded[0].ids)

    def encode_action(self, text: str, *, closed: bool = True) -> tuple[int, ...]:
        """Token ids of an action that was written and not sampled (a demonstration), ending in the turn's end token."""
        end = "" if self.turn_end_id is None else self._token(self.turn_end_id)
        # Encoded behind a special token, because some tokenizers put a blank before the first word of a text.
        ids = self._tokenizer.encode(end + text)[1 if end else 0 :]
        return (*ids, self.turn_end_id) if closed and self.turn_end_id is not None else ids

    def _after_action(
        self,
        transcript: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool,
    ) -> tuple[tuple[int, ...], str]:
        """Ids and text of everything behind the action's content.

        The template renders the real conversation with a placeholder for the action: only what follows the
        placeholder is taken, so nothing that the template does to earlier turns can reach the record.
        """
        before = list(transcript)
        action: Message | None = None
        if before and before[-1].get("role") == "assistant":
            action = before.pop()
        start, stop = (0, 0) if self.looks_back else dropped_range(before)
        if start == stop:
            return self._behind(before, action, messages, tools, add_generation_prompt)
        recent = [*before[:start], *before[stop:]]
        found: tuple[tuple[int, ...], str] | None = None
        try:
            found = self._behind(recent, action, messages, tools, add_generation_prompt)
            if not is_check(stop - start, 1 + len(messages)):
                return found
            whole = self._behind(before, action, messages, tools, add_generation_prompt)
        except ChatTemplateError:
            if found is not None:  # it refuses a turn of long ago, which is in the record as it was
                return found
            return self._behind(before, action, messages, tools, add_generation_prompt)
        if found != whole:
            log.warning("the chat template looks far back: from now on all turns are rendered each time")
            self.looks_back = True
        return whole

    def _looks_back(self, before: list[Message], messages: list[Message], tools: list[dict[str, Any]] | None) -> bool:
        """Whether the template writes something else behind an action where turns of long ago are left out."""
        start, stop = dropped_range(before)
        found: list[tuple[tuple[int, ...], str] | None] = []
        for shown in (before, [*before[:start], *before[stop:]]):
            try:
                found.append(self._behind(shown, None, messages, tools, True))
            except ChatTemplateError:
                found.append(None)
        return found[0] is not None and found[0] != found[1]

    def _behind(
        self,
        before: list[Message],
        action: Message | None,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> tuple[tuple[int, ...], str]:
        """As `_after_action`, of the messages `before` the action."""
        mark = self._tokenizer.choose_mark([before, list(messages), tools])
        placeholder = f"{mark}action{mark}"
        turn: Message = {"role": "assistant", "content": placeholder}
        before, after = self._normalised(before), self._normalised(messages)
        answers = [message for message in after if message["role"] == "tool"]
        structured = self._manners.answers == "structured"
        if structured:
            before = self._with_calls(before, tools)
        if structured and answers:
            names = self._called_names(action, len(answers), tools)
            turn = {"role": "assistant", "content": "", "tool_calls": self._manners.called(names, placeholder)}
            after = _answering(after, turn["tool_calls"])
        text = self._template.render(
            [*before, turn, *self._marked(after, mark)], tools, add_generation_prompt=add_generation_prompt
        )
        if text.count(placeholder) != 1:
            raise ChatTemplateError(
                f"the chat template writes the content of an assistant turn {text.count(placeholder)} times, not once; "
                "such a template cannot be extended by appending"
            )
        text = text.partition(placeholder)[2]
        if structured and answers:
            text = self._manners.behind_call(text) or ""
        plain = self._tokenizer.strip_marks(text, mark)
        for message in messages:
            _require_shown(message, plain)
        return self._tokenizer.encode(text, mark), plain

    def _normalised(self, messages: Sequence[Message]) -> list[Message]:
        plain = normalise(messages, text_arguments=self._manners.text_arguments)
        if self._answers_as_user:
            return [{"role": "user", "content": m["content"]} if m.get("role") == "tool" else m for m in plain]
        return plain

    def _require_tools(self) -> None:
        """Refuse a template with which a model can't use tools."""
        if self._manners.answers == "never" and not self._answers_as_user:
            raise ChatTemplateError(
                "the chat template does not show what a tool answers (messages of role `tool`), so a model behind it "
                "can't use tools: take a template that does, or set runtime.chat.tool_answers=user"
            )
        if self._manners.writes_calls and self._manners.tool_format is None:
            raise ChatTemplateError(
                "the chat template writes tool calls in a form that is not known here: set runtime.chat.tool_format "
                "to the one that the model is to use"
            )

    def _with_calls(self, messages: list[Message], tools: Sequence[dict[str, Any]] | None) -> list[Message]:
        """Earlier turns, for a template that shows answers only behind calls.

        What they say is not rendered any more, and a template may refuse it (as sampled, it holds markers): all that
        counts is which of them were followed by answers.
        """
        result: list[Message] = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant" and not message.get("tool_calls"):
                following = itertools.takewhile(lambda m: m["role"] == "tool", messages[i + 1 :])
                names = self._called_names(None, sum(1 for _ in following), tools)
                message = {"role": "assistant", "content": "" if names else "said"}
                if names:
                    message["tool_calls"] = self._manners.called(names, "")
            result.append(message)
        return result

    def _called_names(self, action: Message | None, count: int, tools: Sequence[dict[str, Any]] | None) -> list[str]:
        """The tools that `count` answers are of: those that the action called, as far as it can be read."""
        calls = (action or {}).get("tool_calls")
        if calls:
            names = [call.get("function", call)["name"] for call in calls]
        else:
            read = parse_calls(str((action or {}).get("content") or ""), tools or [], self.tool_format)
            names = [call.name for call in read.calls]
        default = names[0] if names else tools[0]["function"]["name"] if tools else "tool"
        names = [*names[:count], *[default] * (count - len(names))]
        return names[:1] if self.tool_format == "harmony" else names  # its template shows the first call only

    def _learn_call_end(self) -> list[int]:
        """The token that ends a turn of calls, where it is another than a turn's end; with it the model waits."""
        if self._manners.answers != "structured":
            return []
        user, answer = ({"role": role, "content": _SAMPLE_CONTENT} for role in ("user", "tool"))
        text = self._after_action([user], [answer], None, add_generation_prompt=True)[1]
        ends = self._tokenizer.leading_controls(text)[:1]
        if self.tool_format == "harmony":  # it ends the turn; Gemma's opens the answer, which needs it
            self._turn_ends |= frozenset(ends)
        return ends

    def _without_turn_end(self, ids: tuple[int, ...], text: str, sampled: int) -> tuple[tuple[int, ...], str]:
        """`ids` and `text` without what ends the turn, if that is the first thing in them (blanks aside)."""
        for position, index in enumerate(ids):
            if index in self._turn_ends or index == sampled:
                return ids[position + 1 :], text.partition(self._token(index))[2]
            if self._tokenizer.tokenizer.decode([index], skip_special_tokens=False).strip():
                break
        return ids, text

    def _learn_turn_frames(self) -> None:
        """Learn from three small renderings which tokens frame a turn, and how an assistant's is ended."""
        user = {"role": "user", "content": _SAMPLE_CONTENT}
        framed = self._template.render([user], None, add_generation_prompt=False)
        self._turn_markers = frozenset(token for token in self._tokenizer.control if token in framed)
        last = self._tokenizer.leading_controls(self._after_action([user], [], None, add_generation_prompt=False)[1])
        self.turn_end_id = last[0] if last else None
        # An earlier turn may end in another token than the last one. Some templates end no turn: there the first
        # token is the one that opens the next, and it is alone before the content.
        earlier = self._after_action([user], [user], None, add_generation_prompt=False)[1]
        between = self._tokenizer.leading_controls(earlier.partition(_SAMPLE_CONTENT)[0])
        self._turn_ends = frozenset([*last[:1], *(between[:1] if len(between) > 1 else [])])

    def _marked(self, messages: Sequence[Message], mark: str) -> list[Message]:
        return [
            self._tokenizer.mark_content(
                message,
                mark,
                self._turn_markers if message.get("role") in _TRUSTED_ROLES else self._tokenizer.control,
            )
            for message in messages
        ]

    def _marked_tools(self, tools: Sequence[dict[str, Any]] | None, mark: str) -> list[dict[str, Any]] | None:
        return self._tokenizer.mark_content(list(tools), mark, self._turn_markers) if tools else None

    def _token(self, index: int) -> str:
        token = self._tokenizer.tokenizer.id_to_token(index)
        if token is None:
            raise ChatTemplateError(f"token id {index} (an end token of the model's configuration) has no token")
        return token


def _answering(messages: list[Message], calls: list[dict[str, Any]]) -> list[Message]:
    """`messages` with their tool answers naming the calls that they are of, in order."""
    waiting = iter(calls)
    result, call = [], calls[-1]
    for message in messages:
        if message["role"] == "tool":
            call = next(waiting, call)
            message = {**message, "tool_call_id": call["id"], "name": call["function"]["name"]}
        result.append(message)
    return result


def _require_shown(message: Message, text: str) -> None:
    """Refuse a rendering that has lost what a message says. Blanks may go, and quoting as JSON is no loss."""
    content = message.get("content")
    if not isinstance(content, str) or content.strip() in text:
        return
    content = SURROGATES.sub("\ufffd", content)
    shown = "".join(text.split())
    quoted = (json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
    if not any("".join(form.split()) in shown for form in (content, *quoted)):
        raise ChatTemplateError(
            f"the chat template does not show the content of a message of role {message.get('role')!r} in full; "
            "what a model can't see must not be in its episode: take another template, or set "
            "runtime.chat.tool_answers=user"
        )


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
