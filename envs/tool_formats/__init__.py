"""How models of each family write tool calls: one reader and one writer for each form."""
