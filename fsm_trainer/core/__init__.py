"""The pure scheduler: states, rules and decisions. No torch, no threads, no clock, no files."""
