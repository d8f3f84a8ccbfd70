"""A model small enough to learn a tool loop on two cores: its tokenizer, its chat template, its weights.

The classes and the configuration are transformers' own; only the sizes are ours. The folder written here is an
ordinary Hugging Face model folder, so every other part treats it as it would treat a 30B model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3MoeConfig

from learner.config import TinyModelConfig

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
SPECIAL_TOKENS = [END_OF_TEXT, "<|im_start|>", END_OF_TURN]
TAGS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

# ChatML with tool calls in Hermes' form. A tiny model has no use for the schema of a tool that it was trained on
# in every trace, so `tools` is not rendered.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts` with exactly `vocab_size` entries or fewer.

    Digits and operators stand alone, so that numbers are read digit by digit; there is no split at white space,
    so that the phrases of a problem and the frame of a tool call become single tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"[0-9]|[+*/(),=-]"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Tags and markers have tokens of their own; merges that cross them would never be used.
    markers = re.compile("|".join(map(re.escape, SPECIAL_TOKENS + TAGS)))
    tokenizer.train_from_iterator((piece for text in texts for piece in markers.split(text) if piece), trainer)
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TURN, pad_token=END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_config(config: TinyModelConfig, vocab_size: int, eos_token_id: int) -> Qwen3Config | Qwen3MoeConfig:
    """The transformers configuration of a tiny model (Qwen3-MoE, or dense Qwen3 if `experts` is 0)."""
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_context,
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
        "eos_token_id": eos_token_id,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    if config.experts == 0:
        return Qwen3Config(intermediate_size=config.expert_width * config.experts_per_token, **common)
    return Qwen3MoeConfig(
        num_experts=config.experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.expert_width,
        intermediate_size=config.expert_width,
        norm_topk_prob=True,
        **common,
    )


def write_tiny_model(folder: Path, config: TinyModelConfig, texts: Iterable[str], seed: int) -> None:
    """Make tokenizer and random weights from `seed` and save both to `folder`."""
    tokenizer = train_tokenizer(texts, config.vocab_size)
    torch.manual_seed(seed)
    end = tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(build_config(config, config.vocab_size, end))
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [end], "do_sample": True}))
