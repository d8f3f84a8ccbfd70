"""Chat rendering that only ever appends.

The sampled ids are the record: they are never decoded and encoded again. What the environment says after an action is
rendered as the tokens that the model's own chat template would put there, so that

    prompt + action + observation + action + ...  ==  the template applied once to the whole conversation

except for thinking that the template strips from earlier turns. `docs/chat.md` has the reasoning.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from agent.chat_template import ChatTemplate, ChatTemplateError, Message, normalise, read_json
from agent.chat_tokens import ChatTokenizer, load_tokenizer

__all__ = ["ChatRenderer", "ChatTemplateError", "Message", "Rendering"]

_SPECIAL_TOKEN_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PROBE = "\uf8ff"  # content that no template writes
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
    """

    def __init__(self, template: ChatTemplate, tokenizer: ChatTokenizer, eos_ids: Sequence[int]) -> None:
        """Prefer `from_pretrained`. `eos_ids` are the end tokens that the model's configuration names."""
        self._template = template
        self._tokenizer = tokenizer
        self._turn_markers = frozenset[str]()
        self._turn_ends = frozenset[int]()
        self.turn_end_id: int | None = None
        """The token with which the template ends an assistant turn; None where it writes no single token."""
        self._probe()
        ends: list[int] = [] if self.turn_end_id is None else [self.turn_end_id]
        self.stop_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*ends, *eos_ids]))
        """Tokens that end an action: the template's turn end first, then the model's eos tokens."""
        self._turn_markers |= {self._token(index) for index in self.stop_token_ids} & self._tokenizer.control

    @classmethod
    def from_pretrained(cls, path: Path, *, template_kwargs: dict[str, Any] | None = None) -> ChatRenderer:
        """Load the tokenizer and the chat template of the model folder `path` (Hugging Face layout).

        `template_kwargs` reach the template in every rendering (such as `enable_thinking`). Raises
        `ChatTemplateError` if a file is missing or unreadable.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise ChatTemplateError(f"no such model folder: {folder}")
        config = read_json(folder / "tokenizer_config.json")
        specials = {key: _content(config[key]) for key in _SPECIAL_TOKEN_KEYS if config.get(key) is not None}
        template = ChatTemplate(folder, config, {**specials, **(template_kwargs or {})})
        tokenizer = load_tokenizer(folder, config)
        generation = read_json(folder / "generation_config.json") or read_json(folder / "config.json")
        eos = generation.get("eos_token_id")
        eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        if "eos_token" in specials:
            index = tokenizer.token_to_id(specials["eos_token"])
            if index is None:
                raise ChatTemplateError(f"{folder}: eos_token {specials['eos_token']!r} is not in tokenizer.json")
            eos_ids.append(index)
        return cls(template, ChatTokenizer(tokenizer), eos_ids)

    def start(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None) -> Rendering:
        """The prompt: `messages` and the tool schemas, up to and including the generation prompt."""
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
            self._marked(normalise(messages), mark),
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
        if before and before[-1].get("role") == "assistant":
            before.pop()
        mark = self._tokenizer.choose_mark([before, list(messages), tools])
        placeholder = f"{mark}action{mark}"
        turn = {"role": "assistant", "content": placeholder}
        conversation = [*normalise(before), turn, *self._marked(normalise(messages), mark)]
        text = self._template.render(conversation, tools, add_generation_prompt=add_generation_prompt)
        if text.count(placeholder) != 1:
            raise ChatTemplateError(
                f"the chat template writes the content of an assistant turn {text.count(placeholder)} times, not once; "
                "such a template cannot be extended by appending"
            )
        text = text.partition(placeholder)[2]
        return self._tokenizer.encode(text, mark), self._tokenizer.strip_marks(text, mark)

    def _without_turn_end(self, ids: tuple[int, ...], text: str, sampled: int) -> tuple[tuple[int, ...], str]:
        """`ids` and `text` without what ends the turn, if that is the first thing in them (blanks aside)."""
        for position, index in enumerate(ids):
            if index in self._turn_ends or index == sampled:
                return ids[position + 1 :], text.partition(self._token(index))[2]
            if self._tokenizer.tokenizer.decode([index], skip_special_tokens=False).strip():
                break
        return ids, text

    def _probe(self) -> None:
        """Learn from three small renderings which tokens frame a turn, and how an assistant's is ended."""
        user = {"role": "user", "content": _PROBE}
        framed = self._template.render([user], None, add_generation_prompt=False)
        self._turn_markers = frozenset(token for token in self._tokenizer.control if token in framed)
        last = self._tokenizer.leading_controls(self._after_action([user], [], None, add_generation_prompt=False)[1])
        self.turn_end_id = last[0] if last else None
        # An earlier turn may end in another token than the last one. Some templates end no turn: there the first
        # token is the one that opens the next, and it is alone before the content.
        earlier = self._after_action([user], [user], None, add_generation_prompt=False)[1]
        between = self._tokenizer.leading_controls(earlier.partition(_PROBE)[0])
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


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
