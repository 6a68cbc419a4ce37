"""Device lists as users write them."""

from __future__ import annotations

import pytest

from fsm_trainer.config.devices import parse_devices
from fsm_trainer.config.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("cpu", ("cpu",)),
        ("0", ("cuda:0",)),
        ("0,1", ("cuda:0", "cuda:1")),
        (" 2 , 0 ", ("cuda:2", "cuda:0")),
        ("0..3", ("cuda:0", "cuda:1", "cuda:2", "cuda:3")),
        ("1..1", ("cuda:1",)),
        ("0,2..3", ("cuda:0", "cuda:2", "cuda:3")),
        ("cuda:1", ("cuda:1",)),
        ("cuda:0,cuda:1", ("cuda:0", "cuda:1")),
    ],
)
def test_lists(text: str, expected: tuple[str, ...]) -> None:
    assert parse_devices("--x", text) == expected


@pytest.mark.parametrize("text", ["gpu", "-1", "0,", "3..0", "0-3", "cpu,0", "0.5", "cuda"])
def test_what_is_no_list(text: str) -> None:
    with pytest.raises(ConfigError, match="^--x is .*, expected cpu, or CUDA numbers"):
        parse_devices("--x", text)


def test_a_device_named_twice() -> None:
    with pytest.raises(ConfigError, match="names a device twice"):
        parse_devices("--x", "0..2,1")
