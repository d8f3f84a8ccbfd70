"""What a method is made of: its row, its baseline, its ratio rule, and the numbers of it that a recipe may set."""
