"""The demo pair and the demo."""
