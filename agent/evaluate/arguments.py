"""The command line of `python -m agent.evaluate`, and the `Evaluation` that it asks for."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from agent.evaluate.config import Endpoint, Evaluation, Pacing, RolloutEngine, WrongArgument
from envs import ENVIRONMENTS
from envs.key_values import WrongWord, key_values
from envs.tool_calls import FAMILY_FORMATS


def parser(description: str) -> argparse.ArgumentParser:
    """The command line."""
    pacing = Pacing()
    command = argparse.ArgumentParser(
        prog="python -m agent.evaluate", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "env",
        metavar="ENV",
        help=f"{', '.join(sorted(ENVIRONMENTS))}, package.module:Class, or any id that Gymnasium knows",
    )
    command.add_argument(
        "--env-arg",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="an argument of the environment, its value as YAML; may be given several times",
    )
    command.add_argument("--env-file", type=Path, metavar="FILE", help="a YAML file with arguments of the environment")
    command.add_argument(
        "--out", type=Path, metavar="FOLDER", help="results; the same command goes on there (default: evaluations/...)"
    )

    chat = command.add_argument_group("a chat endpoint")
    chat.add_argument("--url", help="its base, as OpenAI's clients take it: https://host/v1")
    chat.add_argument("--model", metavar="NAME", help="the model's name there")
    chat.add_argument(
        "--api-key-env",
        default="OPENAI_API_KEY",
        metavar="NAME",
        help="the environment variable with the key; unset: no key is sent (default: OPENAI_API_KEY)",
    )
    chat.add_argument(
        "--calls",
        choices=("structured", "text"),
        default="structured",
        help="tool calls: from `tool_calls` (and from the text where there are none), or from the text alone, for a "
        "server that has no parser (default: structured)",
    )
    chat.add_argument(
        "--return-reasoning", action="store_true", help="send reasoning_content back with the turn it came with"
    )
    chat.add_argument(
        "--body", action="append", default=[], metavar="KEY=VALUE", help="one more key of every request, as YAML"
    )

    engine = command.add_argument_group("or rollout engines of ours (token ids in and out; see docs/engines.md)")
    engine.add_argument("--engine", nargs="+", metavar="URL", help="engines that run, with the same weights")
    engine.add_argument("--model-folder", type=Path, metavar="FOLDER", help="their tokenizer and chat template")
    engine.add_argument("--max-context-tokens", type=int, metavar="N", help="default: the engine's context")
    engine.add_argument(
        "--template-arg", action="append", default=[], metavar="KEY=VALUE", help="a variable of the chat template"
    )

    work = command.add_argument_group("how much")
    work.add_argument("--samples", type=int, default=1, metavar="N", help="of each task (default: 1)")
    work.add_argument("--tasks", nargs="+", metavar="ID", help="these tasks (default: all)")
    work.add_argument("--limit", type=int, metavar="N", help="the first N tasks")
    work.add_argument(
        "--passes-at", type=float, metavar="REWARD", help="a sample passes with this reward (default: any above 0)"
    )

    turns = command.add_argument_group("how turns are sampled (not given: not sent)")
    turns.add_argument("--temperature", type=float)
    turns.add_argument("--top-p", type=float)
    turns.add_argument("--max-tokens", type=int, metavar="N", help="of one turn, thinking included")
    turns.add_argument("--seed", type=int, help="seeds of requests and episodes follow from it")
    turns.add_argument("--max-turns", type=int, metavar="N", help="beside the environment's own limit")
    turns.add_argument(
        "--tool-format",
        choices=FAMILY_FORMATS,
        help="the form of calls in text (default: hermes at an endpoint, the chat template's at an engine)",
    )

    pace = command.add_argument_group("how fast, and how patiently")
    pace.add_argument("--concurrency", type=int, default=pacing.concurrency, metavar="N", help="samples at once (8)")
    pace.add_argument("--rpm", type=int, metavar="N", help="most requests a minute")
    pace.add_argument("--tpm", type=int, metavar="N", help="most tokens a minute")
    pace.add_argument(
        "--request-timeout", type=float, default=pacing.request_s, metavar="S", help="one request (600 s)"
    )
    pace.add_argument(
        "--patience",
        type=float,
        default=pacing.patience_s,
        metavar="S",
        help="how long a turn waits for an endpoint that is away or busy (600 s)",
    )
    pace.add_argument(
        "--episode-timeout",
        type=float,
        default=pacing.episode_s,
        metavar="S",
        help="one sample; past it, it is graded as it stands (3600 s)",
    )
    return command


def evaluation_of(options: argparse.Namespace) -> Evaluation:
    """The evaluation that the command line asks for; raises `WrongArgument` that names the option."""
    sampling = {name: getattr(options, name) for name in ("temperature", "top_p", "max_tokens", "seed")}
    workload = {name: getattr(options, name) for name in ("samples", "tasks", "limit", "passes_at")}
    pacing = {
        **{name: getattr(options, name) for name in ("concurrency", "rpm", "tpm")},
        "request_s": options.request_timeout,
        "patience_s": options.patience,
        "episode_s": options.episode_timeout,
    }
    wanted = {
        "env": {"id": options.env, "kwargs": _environment(options)},
        "sampling": sampling,
        "max_turns": options.max_turns,
        "workload": workload,
        "pacing": pacing,
    }
    try:
        return Evaluation.model_validate({**wanted, "policy": _policy(options)})
    except ValidationError as error:
        raise WrongArgument(_by_option(error)) from error


def folder_of(options: argparse.Namespace, evaluation: Evaluation) -> Path:
    """Where the results go: `--out`, or a folder named after environment and model."""
    if options.out is not None:
        return Path(options.out)
    name = f"{evaluation.env.id}-{Path(evaluation.policy_name).name or evaluation.policy_name}"
    return Path("evaluations") / re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")


def read_words(words: Sequence[str], option: str) -> dict[str, Any]:
    """`key=value` words with YAML values; raises `WrongArgument` that names `option`."""
    try:
        return key_values(words, f"{option} key=value")
    except WrongWord as error:
        raise WrongArgument(f"{option}: {error}") from error


def _environment(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if options.env_file is not None:
        try:
            found = yaml.safe_load(options.env_file.read_text(encoding="utf-8")) or {}
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise WrongArgument(f"--env-file: cannot read {options.env_file}: {error}") from error
        if not isinstance(found, dict):
            raise WrongArgument(f"--env-file: {options.env_file} must be a mapping of the environment's arguments")
    return found | read_words(options.env_arg, "--env-arg")


def _policy(options: argparse.Namespace) -> Endpoint | RolloutEngine:
    """Of an endpoint or of engines; raises `WrongArgument` for both, neither, or an option of the other,
    and `ValidationError`."""
    of_chat = {
        "--url": options.url,
        "--model": options.model,
        "--body": options.body,
        "--return-reasoning": options.return_reasoning,
        "--calls text": options.calls == "text",
    }
    of_engine = {
        "--engine": options.engine,
        "--model-folder": options.model_folder,
        "--max-context-tokens": options.max_context_tokens,
        "--template-arg": options.template_arg,
    }
    chat, engine = [[name for name, value in one.items() if value] for one in (of_chat, of_engine)]
    if chat and engine:
        raise WrongArgument(f"{chat[0]} is for a chat endpoint and {engine[0]} for rollout engines: give one of them")
    if engine:
        if not options.engine or not options.model_folder:
            raise WrongArgument("--engine and --model-folder go together: addresses, and tokenizer and chat template")
        variables = read_words(options.template_arg, "--template-arg")
        given = {"template_kwargs": variables, "tool_format": options.tool_format or "auto"}
        return RolloutEngine.model_validate(
            {
                "urls": options.engine,
                "model": options.model_folder,
                "chat": given,
                "max_context_tokens": options.max_context_tokens,
            }
        )
    if not options.url or not options.model:
        raise WrongArgument(
            "--url and --model say which chat endpoint is evaluated (or --engine and --model-folder, for rollout "
            "engines); see --help for an example"
        )
    return Endpoint.model_validate(
        {
            "url": options.url,
            "model": options.model,
            "api_key_env": options.api_key_env,
            "calls": options.calls,
            "tool_format": options.tool_format or "hermes",
            "return_reasoning": options.return_reasoning,
            "body": read_words(options.body, "--body"),
        }
    )


_OPTIONS = {
    "request_s": "--request-timeout",
    "patience_s": "--patience",
    "episode_s": "--episode-timeout",
    "urls": "--engine",
    "template_kwargs": "--template-arg",
}
_SECTIONS = ("policy", "sampling", "workload", "pacing")


def _by_option(error: ValidationError) -> str:
    """What is wrong, with each key called by the option that sets it."""
    found = []
    for item in error.errors():
        key = str(item["loc"][-1]) if item["loc"] else ""
        option = "" if key in ("", *_SECTIONS) else _OPTIONS.get(key, f"--{key.replace('_', '-')}") + ": "
        found.append(option + item["msg"].removeprefix("Value error, "))
    return "; ".join(found)
