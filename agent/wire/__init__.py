"""The wires that chat clients speak, OpenAI's and Anthropic's: requests read, replies, streams and errors written."""
