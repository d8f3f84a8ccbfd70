"""Agents that exist already: each is given an address that speaks as OpenAI and Anthropic do, and makes an episode."""
