"""flint's own themes: dark slate and paper, both with one spark of orange."""

from __future__ import annotations

from textual.theme import Theme

DARK = Theme(
    name="flint-dark",
    dark=True,
    primary="#8fa3b8",
    secondary="#6f8296",
    accent="#ff9142",
    success="#86b98a",
    warning="#e0b25c",
    error="#ec6a6a",
    foreground="#d5dae1",
    background="#101419",
    surface="#161b22",
    panel="#1d242d",
    variables={
        "muted": "#8592a1",
        "faint": "#2a333e",
        "accepted": "#ffc08a",
        "single": "#8fb3d9",
        "border": "#2a333e",
        "border-blurred": "#2a333e",
        "footer-background": "#101419",
        "footer-key-foreground": "#ff9142",
        "footer-description-foreground": "#8592a1",
        "scrollbar": "#2a333e",
        "scrollbar-hover": "#3a4654",
        "scrollbar-active": "#ff9142",
        "scrollbar-background": "#101419",
        "scrollbar-background-hover": "#101419",
        "scrollbar-background-active": "#101419",
        "input-selection-background": "#ff9142 30%",
        "screen-selection-background": "#ff9142 35%",
        "screen-selection-foreground": "#ffffff",
        "block-cursor-background": "#2a333e",
        "block-cursor-foreground": "#ffffff",
        "block-cursor-text-style": "none",
    },
)

LIGHT = Theme(
    name="flint-light",
    dark=False,
    primary="#4d6278",
    secondary="#6b7d90",
    accent="#ad4500",
    success="#2c7a3f",
    warning="#8a5a00",
    error="#b3261e",
    foreground="#1c232b",
    background="#f7f6f3",
    surface="#efede8",
    panel="#e6e3dc",
    variables={
        "muted": "#5d6874",
        "faint": "#d3cfc6",
        "accepted": "#9a3f00",
        "single": "#24578f",
        "border": "#d3cfc6",
        "border-blurred": "#d3cfc6",
        "footer-background": "#f7f6f3",
        "footer-key-foreground": "#ad4500",
        "footer-description-foreground": "#5d6874",
        "scrollbar": "#d3cfc6",
        "scrollbar-hover": "#bdb8ad",
        "scrollbar-active": "#ad4500",
        "scrollbar-background": "#f7f6f3",
        "scrollbar-background-hover": "#f7f6f3",
        "scrollbar-background-active": "#f7f6f3",
        "input-selection-background": "#ad4500 25%",
        "screen-selection-background": "#ad4500 25%",
        "screen-selection-foreground": "#000000",
        "block-cursor-background": "#d3cfc6",
        "block-cursor-foreground": "#000000",
        "block-cursor-text-style": "none",
    },
)

# What the variables above are called in themes that are not ours.
DEFAULTS = {"muted": "$text-muted", "faint": "$panel-lighten-1", "accepted": "$accent", "single": "$primary"}
ANSI_DEFAULTS = {
    "muted": "ansi_bright_black",
    "faint": "ansi_bright_black",
    "accepted": "ansi_yellow",
    "single": "ansi_cyan",
}
NO_COLOR_THEME = "ansi-dark"
