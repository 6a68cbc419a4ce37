"""Re-derives a run's decisions from its event log. See `replay.verify`."""
