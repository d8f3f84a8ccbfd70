"""What all runtimes render and sample: a tokenizer with a chat template that all of them know, and a script of turns.

The template is Qwen3-Instruct-2507's, from TRL's files. The tokenizer is a byte-level BPE over made-up words, so that a
token is about as long as in a real vocabulary. An episode is a prompt of 200 tokens (tool schema included), then turns
of 50 sampled tokens (a tool call) and about 50 of observation; the last action calls no tool. A long episode has turns
of 150 and about 277 tokens: 300 of them are 128K. Prompts and observations are of the same words in another order each
time, as no two tasks or answers are the same: what remembers whole texts gains nothing by it.
"""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
WHERE = {"type": "object", "properties": {"where": {"type": "string"}}, "required": ["where"]}
TOOL = {"type": "function", "function": {"name": "look", "description": "Look around.", "parameters": WHERE}}
CALL = '<tool_call>\n{{"name": "look", "arguments": {{"where": "{}"}}}}\n</tool_call><|im_end|>'
VARIANTS = 509
"""How many prompts and observations there are; then they come again."""
PROMPT_TOKENS_WITHOUT_QUESTION = 140
"""About what the template says of the tool; the question fills up to 200."""


def _template() -> str:
    spec = importlib.util.find_spec("trl")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("trl is missing: it is installed with the tests' dependencies (make install)")
    folder = Path(spec.submodule_search_locations[0]) / "chat_templates"
    return (folder / "qwen3_instruct_2507.jinja").read_text(encoding="utf-8")


def _tokenizer(rng: random.Random, words: list[str], template: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    texts = [" ".join(rng.choice(words) for _ in range(50)) for _ in range(4000)]
    texts += [json.dumps(TOOL)] * 400 + [template] * 100  # their words are in the vocabulary, as in a real one
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return tokenizer


def prepare(folder: Path) -> None:
    """Write the tokenizer's files to `folder`, and `script.json`: see `read`."""
    rng, template = random.Random(0), _template()
    letters = "abcdefghijklmnoprstuvwy"
    words = sorted({"".join(rng.choice(letters) for _ in range(rng.randint(4, 7))) for _ in range(1500)})
    tokenizer = _tokenizer(rng, words, template)
    end = tokenizer.token_to_id("<|im_end|>")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end]}))
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")

    def said(count: int, frame: str = "{}") -> str:
        """`frame` filled with words until it has `count` tokens."""
        text = ""
        while len(tokenizer.encode(frame.format(text.strip()), add_special_tokens=False).ids) < count:
            text += " " + rng.choice(words)
        return frame.format(text.strip())

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def shuffled(text: str) -> list[str]:
        """Of as many tokens each: the first word has no blank before it, which may make it another one."""
        words, count, found = text.split(), len(ids(text)), list[str]()
        while len(found) < VARIANTS:
            other = " ".join(rng.sample(words, len(words)))
            if len(ids(other)) == count:
                found.append(other)
        return found

    turns = {
        "short": {"call_ids": ids(said(50, CALL)), "observations": shuffled(said(37))},
        "long": {"call_ids": ids(said(150, CALL)), "observations": shuffled(said(264))},
    }
    script = {
        "prompts": shuffled(said(200 - PROMPT_TOKENS_WITHOUT_QUESTION)),
        "tool": TOOL,
        "turns": turns,
        "final_ids": ids(said(50, "{}<|im_end|>")),
        "tool_response_id": tokenizer.token_to_id("<tool_response>"),
    }
    (folder / "script.json").write_text(json.dumps(script))


def read(folder: Path, length: str) -> dict[str, Any]:
    """`prompts`, `tool`, `call_ids`, `observations`, `final_ids`, `tool_response_id`; turns as `length` ("short",
    "long") says."""
    script: dict[str, Any] = json.loads((folder / "script.json").read_text())
    return script | script.pop("turns")[length]
