"""A run as one HTML file that works offline, and advice in words. docs/replay.md says what is in it.

Knows the log through `analysis`, and asks `simulate` what another setting would have given. `report.build` makes it.
"""
