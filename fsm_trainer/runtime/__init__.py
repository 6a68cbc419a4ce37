"""The world around the pure scheduler: clocks, threads, processes, signals and the event loop.

Import from the modules. This room knows commands and inputs; it decides nothing and knows nothing of models.
"""
