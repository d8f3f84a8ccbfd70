"""An OpenAI server whose conversations are episodes, up and down in order."""
