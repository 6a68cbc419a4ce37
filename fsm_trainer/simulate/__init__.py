"""Whole runs in virtual time: the live loop and scheduler over a world of durations and faults that a seed decides."""
