"""Settings of all tests: no property is about how fast the machine is just now."""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("hypothesis") is not None:  # an environment for a few tests may lack it
    from hypothesis import HealthCheck, settings

    settings.register_profile("any-speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any-speed")
