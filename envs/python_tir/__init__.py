"""Math with a Python interpreter as the tool."""
