"""The tasks: prompts for short texts, topics times forms, in English and Chinese, in a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Language = Literal["en", "zh"]

ENGLISH_TOPICS = (
    "rain", "a cat", "the moon", "tea", "autumn", "the sea", "friendship", "a train journey", "a library", "coffee",
    "a garden", "snow", "a bridge", "music", "a river", "bread", "a mountain", "a letter", "the night sky", "a clock",
    "a market", "childhood", "a lighthouse", "summer", "a forest", "a window", "homework", "an old house", "a bicycle",
    "the wind",
)  # fmt: skip
CHINESE_TOPICS = (
    "雨", "猫", "月亮", "茶", "秋天", "大海", "友谊", "火车旅行", "图书馆", "咖啡",
    "花园", "雪", "桥", "音乐", "河流", "面包", "高山", "书信", "夜空", "时钟",
    "集市", "童年", "灯塔", "夏天", "森林", "窗户", "作业", "老房子", "自行车", "风",
)  # fmt: skip
ENGLISH_FORMS = (
    "Write a short text about {topic}.",
    "Describe {topic} in one or two sentences.",
    "Say something about {topic}.",
    "Write a few lines about {topic}.",
)
CHINESE_FORMS = ("写一段关于{topic}的短文。", "用一两句话描述{topic}。", "说说{topic}。", "写几句关于{topic}的话。")

TINY_TOPICS = (
    "rain", "snow", "tea", "music", "winter", "summer", "the moon", "the sun", "the sea", "the sky", "the river",
    "the garden", "the cat", "the dog", "the bird", "the fish", "the clock", "the bridge", "the city", "the letter",
    "the tower", "the road", "the cloud", "the train",
)  # fmt: skip
TINY_FORMS = ("Write about {topic}.", "Tell me about {topic}.", "A line on {topic}.")


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt. `topic` is what it asks about, as it stands in `prompt`."""

    task_id: str
    prompt: str
    topic: str
    language: Language


def tasks(source: str | Sequence[str] = "all") -> tuple[Task, ...]:
    """The tasks of `source`: "english", "chinese", "all" (both), "tiny", or a list of prompts of one's own.

    The same source gives the same list in the same order. Raises `ValueError` for another name or an empty list.
    """
    if not isinstance(source, str):
        given = tuple(Task(f"own/{i}", prompt, "", language_of(prompt)) for i, prompt in enumerate(source))
        if not given or not all(task.prompt.strip() for task in given):
            raise ValueError("prompts: a list of prompts holds at least one, and none of them is empty")
        return given
    if source not in _SOURCES:
        raise ValueError(f"prompts must be {', '.join(map(repr, _SOURCES))} or a list of prompts, not {source!r}")
    return _SOURCES[source]


def language_of(text: str) -> Language:
    """Chinese if at least a third of the letters are Chinese characters, else English."""
    letters = sum(character.isalpha() for character in text)
    return "zh" if letters and 3 * sum(map(is_han, text)) >= letters else "en"


def is_han(character: str) -> bool:
    """Whether `character` is a Chinese one."""
    return "\u4e00" <= character <= "\u9fff" or "\u3400" <= character <= "\u4dbf"


def _cross(name: str, topics: Sequence[str], forms: Sequence[str], language: Language) -> tuple[Task, ...]:
    return tuple(
        Task(f"{name}/{number}.{form}", text.replace("{topic}", topic), topic, language)
        for number, topic in enumerate(topics)
        for form, text in enumerate(forms)
    )


_ENGLISH = _cross("en", ENGLISH_TOPICS, ENGLISH_FORMS, "en")
_CHINESE = _cross("zh", CHINESE_TOPICS, CHINESE_FORMS, "zh")
_TINY = _cross("tiny", TINY_TOPICS, TINY_FORMS, "en")
_SOURCES = {"all": _ENGLISH + _CHINESE, "english": _ENGLISH, "chinese": _CHINESE, "tiny": _TINY}
