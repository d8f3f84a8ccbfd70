"""Watching a page, and a tiny model that has been taught to say one sentence and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import torch
from playwright.async_api import Browser, Page, expect
from serve_tools import TEXTS
from transformers import AutoModelForCausalLM

from agent.chat.renderer import ChatRenderer
from learner.config import TinyModelConfig
from learner.model.tiny import write_tiny_model

WAIT_MS = 90_000  # a busy machine: nothing waits so long where all is well


class Watched:
    """A page, and everything that went wrong in it or left its origin."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._said)

    def _said(self, message: Any) -> None:
        # Maps' style sheet, which plotly wants to add whether there is a map or not; the policy forbids it.
        maps = "Applying inline style" in message.text and message.location["url"].endswith("/static/plotly.min.js")
        if message.type in ("error", "warning") and not maps:
            self.complaints.append(message.text)


@contextlib.asynccontextmanager
async def opened(browser: Browser, url: str, **context: Any) -> AsyncIterator[Watched]:
    """The page at `url` in a fresh profile."""
    async with await browser.new_context(**context) as profile:
        profile.set_default_timeout(WAIT_MS)
        watched = Watched(await profile.new_page())
        await watched.page.goto(url)
        yield watched


async def ask(page: Page, text: str) -> Any:
    """Send `text`; the answer, once feedback can be given."""
    before = await page.locator(".message.model").count()
    await page.get_by_label("Message", exact=True).fill(text)
    await page.get_by_role("button", name="Send").click()
    answer = page.locator(".message.model").nth(before)
    await expect(answer.get_by_role("button", name="Good")).to_be_visible()
    return answer


class Relay:
    """A TCP port that passes everything on to `url`, until it is cut; then it refuses until it listens again."""

    def __init__(self, url: str) -> None:
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._target, self._port = int(port), 0
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    async def __aenter__(self) -> Relay:
        await self.listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cut()

    async def listen(self) -> None:
        """Take connections, always at the same port."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self._port)
        self._port = self._server.sockets[0].getsockname()[1]

    async def cut(self) -> None:
        """End all connections and take no more."""
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        there, back = await asyncio.open_connection(self._host, self._target)
        try:
            await asyncio.gather(_copy(reader, back), _copy(there, writer))
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(task)
            back.transport.abort()
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()


def write_parrot(folder: Path, sentence: str) -> None:
    """A tiny model in `folder` that answers whatever it is asked with `sentence`, when its best token is taken."""
    shape = TinyModelConfig(
        vocab_size=400, hidden_size=32, layers=1, heads=2, kv_heads=1, head_dim=16, experts=0, expert_width=32
    )
    write_tiny_model(folder, shape, [*TEXTS, sentence], 1)
    renderer = ChatRenderer.from_pretrained(folder)
    rows = []
    for asked in ("Hello", "a", "Write a short text.", "more"):
        prompt = renderer.start([{"role": "user", "content": asked}]).token_ids
        answer = renderer.encode_action(sentence)
        rows.append((torch.tensor([[*prompt, *answer]]), len(prompt)))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = torch.zeros(())
        for ids, start in rows:
            logits = model(ids).logits[0, start - 1 : -1]
            loss = loss + torch.nn.functional.cross_entropy(logits, ids[0, start:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.save_pretrained(folder)
