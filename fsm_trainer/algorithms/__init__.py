"""Algorithms: what is learnt from a batch of rollouts. Advantages, materialising, losses, a registry by name."""
