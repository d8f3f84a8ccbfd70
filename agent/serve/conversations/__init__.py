"""What a conversation is, its reply, its feedback, its journal, and the episode it becomes."""
