"""Files that are sent into containers. Nothing here is imported by the host: they are read as text."""
