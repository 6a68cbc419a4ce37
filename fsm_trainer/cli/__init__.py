"""The commands `fsm-train` and `fsm-replay`."""
