"""Plug-ins as a team would write them, good and bad."""
