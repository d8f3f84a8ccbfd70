"""Tools of MCP servers, for any environment. The client is the official SDK (the extra `mcp`)."""
