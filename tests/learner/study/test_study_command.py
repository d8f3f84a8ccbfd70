"""What a person types: wrong words are refused before anything runs, and a page needs no run."""

from __future__ import annotations

from pathlib import Path

import pytest

from learner.study.__main__ import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["main", "--arms", "soa"], "has no arm 'soa'"),
        (["main", "learner.lerning=3"], "learner.lerning"),
        (["lag", "--search", "store.max_lag=x"], "store.max_lag"),
    ],
)
def test_wrong_words_are_one_paragraph_and_leave_nothing(
    words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = ["--results", str(tmp_path / "results"), "--runs", str(tmp_path / "runs")]
    assert main([*words, *folders]) == 1
    assert says in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [["mian"], ["main", "--budget", "soon"]])
def test_what_the_parser_does_not_know_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "NAME" in capsys.readouterr().err


def test_a_page_is_written_without_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["granularity", "--page", "--results", str(tmp_path)]) == 0
    assert "Nothing yet" in (tmp_path / "granularity.md").read_text()
    assert "granularity.md" in capsys.readouterr().out


def test_help_has_an_example_and_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert "python -m learner.study main --seeds 1 --budget 30m" in said
    assert "value_data" in said
