"""Looking at episodes, token by token."""
