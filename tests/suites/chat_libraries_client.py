"""Run by the interpreter of `.venv-clients`: LangChain and LiteLLM on a server of ours. Prints what they were told."""

from __future__ import annotations

import json
import sys
from typing import Any


def with_langchain(url: str, model: str) -> dict[str, Any]:
    from langchain_core.messages import AIMessage, HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    @tool
    def look(at: str) -> str:
        """Look at something."""
        return at

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_retries=0, max_tokens=8)  # type: ignore
    whole = chat.invoke([HumanMessage("Hi")])
    assert isinstance(whole, AIMessage)
    streamed = "".join(str(chunk.content) for chunk in chat.stream("Hi"))
    called = chat.bind_tools([look]).invoke("Look there.")
    several = chat.generate([[HumanMessage("Hi")]], n=2)
    likely = chat.bind(logprobs=True).invoke("Hi")
    older = OpenAI(model=model, base_url=f"{url}/v1", api_key="none", max_tokens=4).invoke("Once")  # type: ignore
    responses = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", use_responses_api=True)  # type: ignore
    return {
        "id": whole.response_metadata.get("id") or whole.id,
        "tokens": (whole.usage_metadata or {}).get("output_tokens"),
        "streamed": streamed,
        "tool_calls": called.tool_calls,
        "choices": len(several.generations[0]),
        "logprobs": len(likely.response_metadata["logprobs"]["content"]),
        "older": older,
        "responses": responses.invoke("Hi").response_metadata["status"],
    }


def with_litellm(url: str, model: str) -> dict[str, Any]:
    import litellm

    options: Any = {"api_base": f"{url}/v1", "api_key": "none", "max_tokens": 8, "num_retries": 0}
    messages = [{"role": "user", "content": "Hi"}]
    whole: Any = litellm.completion(model=f"openai/{model}", messages=messages, **options)
    stream: Any = litellm.completion(model=f"openai/{model}", messages=messages, stream=True, **options)
    theirs: Any = litellm.completion(
        model=f"anthropic/{model}", messages=messages, api_base=url, api_key="none", max_tokens=8, num_retries=0
    )
    refused = ""
    try:
        litellm.completion(model=f"openai/{model}", messages=messages, n=1000, **options)
    except litellm.exceptions.BadRequestError as error:
        refused = str(error)
    return {
        "id": whole.id,
        "tokens": whole.usage.completion_tokens,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices),
        "anthropic": theirs.usage.completion_tokens,
        "refused": refused,
    }


if __name__ == "__main__":
    print(json.dumps({"langchain": with_langchain, "litellm": with_litellm}[sys.argv[1]](*sys.argv[2:])))
