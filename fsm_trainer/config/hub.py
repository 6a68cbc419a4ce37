"""Is a hub name usable: from the local cache, or from a hub that answers soon. Never waits longer than it says.

Knows nothing of models or datasets beyond the names of their files.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import urllib.error
import urllib.request

_NAME = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_TRUE = {"1", "on", "yes", "true"}


def is_hub_name(text: str) -> bool:
    """Whether a text can be a hub name at all: NAME or OWNER/NAME."""
    return _NAME.fullmatch(text) is not None


def is_offline() -> bool:
    """Whether the user, or `settle`, has switched the hub off."""
    return any(os.environ.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def settle(timeout_s: float = 5.0) -> None:
    """Switch the hub off for this process and its children when it does not answer within `timeout_s`.

    The hub's own libraries would retry for minutes at every file otherwise; switched off they use their cache.
    """
    # Hub calls that are made all the same must not wait long.
    os.environ.setdefault("HF_HUB_ETAG_TIMEOUT", "10")
    os.environ.setdefault("HF_HUB_DOWNLOAD_TIMEOUT", "30")
    if is_offline() or not reachable(timeout_s):
        os.environ["HF_HUB_OFFLINE"] = "1"
        # Read once at import, so libraries imported before this have to be told.
        for name in ("huggingface_hub.constants", "datasets.config"):
            module = sys.modules.get(name)
            if module is not None:
                vars(module)["HF_HUB_OFFLINE"] = True


def reachable(timeout_s: float) -> bool:
    """Whether the hub answers at all; its address is HF_ENDPOINT, through the usual proxies."""
    url = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=timeout_s).close()
        except urllib.error.HTTPError:
            pass
        except (OSError, ValueError):
            return
        answered.set()

    # A thread because the look-up of a name has no time limit of its own.
    thread = threading.Thread(target=ask, name="hub-probe", daemon=True)
    thread.start()
    thread.join(timeout_s + 1.0)
    return answered.is_set()


def find_file(repo: str, filename: str) -> str | None:
    """Local path of a model's file, fetched if the hub is on; None when it cannot be had."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(repo, filename)
    if isinstance(cached, str):
        return cached
    if is_offline():
        return None
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return str(hf_hub_download(repo, filename))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError):
        return None
