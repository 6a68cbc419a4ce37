"""What a run learns from: datasets, the order of prompts, and rewards."""
