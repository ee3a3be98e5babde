"""What opens over the chat, one screen a file."""
