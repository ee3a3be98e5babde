"""Measuring: rows of prefill and decode, arms side by side, and archives that a stranger can read."""
