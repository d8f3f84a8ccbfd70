"""Harbor task folders, read without Harbor: a task in a container, and a test script that says what it was worth."""
