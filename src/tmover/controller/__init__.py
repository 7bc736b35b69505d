"""The process that decides, and the way to speak to it."""
