"""How trained weights reach the rollout engines: one protocol, several transports, and which one when."""
