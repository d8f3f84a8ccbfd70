"""`python -m agent.inspect` and the annotations it shows, on a real store's file."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from agent.episode import Episode, Segment, StopReason, encode
from agent.inspect.__main__ import main
from agent.inspect.annotations import (
    AnnotationWriter,
    TokenAnnotations,
    decode_annotations,
    encode_annotations,
    read_annotations,
)
from agent.inspect.html import episode_page
from agent.inspect.tokens import token_texts, token_views
from agent.store.config import StoreConfig
from agent.store.ledger import Ledger

TRICKY = '<|im_end|></div><script src="https://example.org/x.js">alert(1)</script> é €'


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


TOKENIZER = byte_tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text).ids)


def episode(episode_id: str, answer: str, reward: float, stop: StopReason = StopReason.TERMINATED) -> Episode:
    def action(text: str, version: int) -> Segment:
        n = len(ids(text))
        return Segment("action", ids(text), text, (-0.25,) * n, (version,) * n, "stop")

    segments = (
        Segment("prompt", ids("Q?"), "Q?"),
        action("call", 1),
        Segment("observation", ids(TRICKY), TRICKY),
        action(answer, 2),
    )
    return Episode(
        episode_id, "sao/PythonTIR-v0", f"task-{episode_id}", segments, (0.0, reward), stop, metrics={"turns": 2}
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three training episodes and one evaluation; the first training episode is annotated."""
    config = StoreConfig(tasks=3, batch=3)
    ledger = Ledger(tmp_path / "episodes.sqlite", config)
    [tickets] = ledger.apply([lambda: ledger.tickets.lease(3, "w")])
    ledger.apply([lambda: ledger.set_version(2)])
    ledger.apply([lambda: ledger.evaluations.start(2, [0], 1)])
    [held_out] = ledger.apply([lambda: ledger.tickets.lease(1, "w")])
    answers = [("yes", 1.0, StopReason.TERMINATED), ("no", 0.0, StopReason.TRUNCATED_TURNS), ("hm", 0.0, None)]
    delivered = []
    for ticket, (answer, reward, stop) in zip(tickets, answers, strict=True):
        delivered.append(episode(ticket.id, answer, reward, stop or StopReason.TERMINATED))
    one = episode(held_out[0].id, "ok", 1.0)
    pinned = [Segment(s.kind, s.token_ids, s.text, s.logprobs, (2,) * len(s.versions), "stop") for s in one.segments]
    delivered.append(
        Episode(one.id, one.env_id, one.task_id, tuple(pinned), one.turn_rewards, one.stop_reason, metrics={"turns": 2})
    )
    endings = ledger.apply([lambda e=e: ledger.tickets.deliver(e.id, e, encode(e)) for e in delivered])
    assert [ending.outcome for ending in endings] == ["accepted"] * 4
    ledger.close()
    (tmp_path / "model").mkdir()
    TOKENIZER.save(str(tmp_path / "model" / "tokenizer.json"))
    n = delivered[0].action_tokens
    with AnnotationWriter(tmp_path) as writer:
        advantages = [0.5 - 0.2 * i for i in range(n)]
        gated = [0, -1, 1, 2, *[0] * (n - 4)]
        writer.write([TokenAnnotations(tickets[0].id, 4, [-0.5] * n, [0.75] * n, advantages, gated)])
    return tmp_path


def inspect(*arguments: object) -> str:
    out = io.StringIO()
    assert main([str(a) for a in arguments], Console(file=out, width=200, color_system=None)) == 0
    return out.getvalue()


def first_id(run: Path, *arguments: object) -> str:
    return next(line.split()[0] for line in inspect(run, *arguments).splitlines() if "task-" in line)


def test_a_list_shows_every_kind_and_filters_narrow_it(run: Path) -> None:
    assert "4 of 4 episodes" in inspect(run)
    assert "1 of 1 episodes, mean reward 1.000" in inspect(run, "--kind", "evaluate")
    assert "2 of 2 episodes, mean reward 0.000" in inspect(run, "--reward", "0")
    assert "1 of 1" in inspect(run, "--stop-reason", "truncated_turns")
    assert "0 of 0" in inspect(run, "--kind", "evaluate", "--reward", "0")
    assert "1 of 4" in inspect(run, "--limit", "1")


def test_answers_are_told_with_how_often_they_came_and_what_they_earned(tmp_path: Path) -> None:
    """The box of the last action counts as grading counts it: not in thinking; an equal text is the same answer."""
    told = [
        (r"so \boxed{42}", 1.0),
        (r"\boxed{41}, no: \boxed{42}.", 0.0),
        (r"<think>\boxed{42}</think> \boxed{[bold]7}", 0.0),
        (r"<think>\boxed{42}</think> I give up.", 0.0),
        (r"\boxed{42}", 1.0),
        (r"\boxed{" + "9" * 300 + "}", 0.0),
    ]
    ledger = Ledger(tmp_path / "episodes.sqlite", StoreConfig(tasks=len(told), batch=len(told)))
    [tickets] = ledger.apply([lambda: ledger.tickets.lease(len(told), "w")])
    ledger.apply([lambda: ledger.set_version(2)])
    made = [episode(ticket.id, text, reward) for ticket, (text, reward) in zip(tickets, told, strict=True)]
    endings = ledger.apply([lambda e=e: ledger.tickets.deliver(e.id, e, encode(e)) for e in made])
    assert [ending.outcome for ending in endings] == ["accepted"] * len(told)
    ledger.close()
    shown = inspect(tmp_path, "--answers")
    rows = [line.split() for line in shown.splitlines() if re.search(r"\d\.\d{3}$", line)]
    assert rows == [
        ["42", "3", "0.667"],
        ["(nothing", "boxed)", "1", "0.000"],
        ["9" * 120 + "…", "1", "0.000"],
        ["[bold]7", "1", "0.000"],
    ]
    assert "4 of 4 distinct answers in 6 episodes" in shown
    assert "1 of 4 distinct answers in 6 episodes" in inspect(tmp_path, "--answers", "--limit", "1")
    assert "1 of 1 distinct answers in 2 episodes" in inspect(tmp_path, "--answers", "--reward", "1")


def test_sorting_puts_the_largest_first_unless_told_otherwise(run: Path) -> None:
    assert first_id(run, "--kind", "train", "--sort", "tokens") == first_id(run, "--kind", "train", "--reward", "1")
    smallest = inspect(run, "--kind", "train", "--sort", "reward", "--ascending").splitlines()[1]
    assert " 0 " in smallest


def test_an_episode_shows_every_token_with_its_figures(run: Path) -> None:
    text = inspect(run, first_id(run, "--kind", "train", "--reward", "1"))
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+action ", line)]
    assert len(rows) == len("call") + len("yes")
    #           #    role      id  token log-prob  version lag learner  gate  value    advantage
    assert rows[0][3:] == ["c", "-0.250", "1", "3", "-0.500", "-", "0.750", "+0.500"]
    assert rows[1][3:] == ["a", "-0.250", "1", "3", "-0.500", "low", "0.750", "+0.300"]
    assert rows[2][8] == "high"
    assert rows[-1][3:6] == ["s", "-0.250", "2"]
    assert "trained from version 4" in text


def test_an_untrained_episode_shows_what_was_sampled_and_nothing_made_up(run: Path) -> None:
    text = inspect(run, first_id(run, "--kind", "evaluate"))
    rows = [line.split() for line in text.splitlines() if re.match(r"\s*\d+\s+action ", line)]
    assert rows[0][3:] == ["c", "-0.250", "2"]
    assert "not trained" in text


def test_without_a_tokenizer_ids_stand_for_the_text(run: Path) -> None:
    (run / "model" / "tokenizer.json").unlink()
    assert f"⟨{ids('c')[0]}⟩" in inspect(run, first_id(run))


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_is_self_contained_and_runs_nothing_of_the_episode(run: Path) -> None:
    """Case B9's sibling: tool output that looks like markup stays text."""
    page = run / "episode.html"
    inspect(run, first_id(run, "--kind", "train", "--reward", "1"), "--html", page)
    text = page.read_text(encoding="utf-8")
    parsed = _Page()
    parsed.feed(text)
    assert parsed.addresses == []
    assert parsed.tags.count("script") == 1
    assert not re.search(r"url\(|@import", text)
    assert "alert(1)" in parsed.text
    assert 'name="viewport"' in text
    assert text.count("data-f=") == sum(len(ids(part)) for part in ("Q?", "call", TRICKY, "yes")), (
        "every token can be pointed at"
    )


def test_a_page_colours_by_sign_and_marks_the_gate() -> None:
    one = episode("e", "yes", 1.0)
    n = one.action_tokens
    advantages = [1.0, -1.0, *[0.0] * (n - 2)]
    views = token_views(
        one, TokenAnnotations("e", 3, [-0.25] * n, [0.0] * n, advantages, [0, 1, *[0] * (n - 2)]), TOKENIZER
    )
    page = episode_page(one, views, "header")
    assert page.count("data-c style") == 2
    plus, minus = re.findall(r'data-c style="background:(#\w+)"', page)
    assert plus != minus
    assert page.count('class="gated"') == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "no episode store at"),
        (["{run}", "no-such-episode"], "no episode no-such-episode"),
        (["{run}", "--html", "x.html"], "--html needs an episode"),
        (["{run}", "{id}", "--answers"], "--answers is about all episodes"),
        (["{run}", "{id}", "--model", "/nowhere"], "no tokenizer.json"),
    ],
)
def test_bad_input_is_one_line_and_status_2(run: Path, arguments: list[str], message: str, capsys) -> None:
    filled = [a.format(run=run, id=first_id(run)) for a in arguments]
    assert main(filled) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_module_runs_without_torch(run: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        f"from agent.inspect.__main__ import main; raise SystemExit(main([{str(run)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "4 of 4 episodes" in done.stdout


@given(st.text(max_size=40))
def test_token_texts_join_to_the_text(text: str) -> None:
    assert "".join(token_texts(ids(text), TOKENIZER)) == text


@given(st.lists(st.integers(0, 255), max_size=30))
def test_token_texts_have_one_entry_a_token_whatever_the_bytes(tokens: list[int]) -> None:
    assert len(token_texts(tokens, TOKENIZER)) == len(tokens)


finite32 = st.floats(width=32, allow_nan=False)


@given(st.lists(st.tuples(finite32, finite32, finite32, st.integers(-1, 2)), max_size=20), st.integers(0, 2**40))
def test_annotations_come_back_as_they_were_written(rows: list, version: int) -> None:
    columns = [tuple(column) for column in zip(*rows, strict=True)] if rows else [()] * 4
    annotations = TokenAnnotations("e", version, *columns)
    assert decode_annotations(encode_annotations(annotations)) == annotations


def test_annotations_of_unequal_length_are_refused_and_nothing_is_written(tmp_path: Path) -> None:
    good = TokenAnnotations("good", 1, [0.0], [0.0], [0.0], [0])
    bad = TokenAnnotations("bad", 1, [0.0], [0.0], [0.0, 1.0], [0])
    with AnnotationWriter(tmp_path) as writer, pytest.raises(ValueError, match="differ in length"):
        writer.write([good, bad])
    assert read_annotations(tmp_path, "good") is None


def test_an_episode_that_is_annotated_again_replaces_the_first(tmp_path: Path) -> None:
    with AnnotationWriter(tmp_path) as writer:
        for version in (1, 2):
            writer.write([TokenAnnotations("e", version, [0.0], [0.0], [0.0], [0])])
    found = read_annotations(tmp_path, "e")
    assert found is not None
    assert found.trained_version == 2


def test_annotations_of_another_episode_are_an_error() -> None:
    with pytest.raises(ValueError, match="7 action tokens and 1 annotations"):
        token_views(episode("e", "yes", 1.0), TokenAnnotations("e", 1, [0.0], [0.0], [0.0], [0]), TOKENIZER)
