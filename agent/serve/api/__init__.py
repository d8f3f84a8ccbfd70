"""What is asked over HTTP: chats, events, limits, figures, the page."""
