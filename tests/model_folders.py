"""Model folders without weights: a tokenizer that is trained here, and any chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CORPUS = [
    "You are a helpful assistant. Think, then call the python tool. system user assistant tool ipython",
    'What is 12 * 7? {"name": "python", "arguments": {"code": "print(12 * 7)"}} <tools> </tools> <|im_end|>',
    "The answer is \\boxed{84}.\n\nTraceback (most recent call last):\n  File x, line 1\n" * 3,
]


def write_model(
    folder: Path,
    template: str,
    *,
    special: list[str],
    added: list[str],
    tokens: dict[str, str],
    eos: list[str],
    ignore_merges: bool = False,
    normalizer: normalizers.Normalizer | None = None,
) -> Path:
    """A model folder with tokenizer, template and generation config; no weights."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    ids = [tokenizer.token_to_id(text) for text in eos]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return folder
