"""The hosts of the rollout engines, by number; a restarted engine gets a new one.

A command keeps to the host that it began on: what is aborted or goes wrong there is never its successor's affair, and a
command from before a restart never reaches the new engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import structlog

from fsm_trainer.core.events import Command, Input, InputKind
from fsm_trainer.engines.base import Loaded, Snapshot
from fsm_trainer.engines.weight_sync.transport import WeightTransport
from fsm_trainer.runtime.failures import EngineDied, EngineError, HostClosed
from fsm_trainer.runtime.host import EngineHost
from fsm_trainer.runtime.threads import CallThreads

_CLOSE_TIMEOUT_S = 10.0
"""How long an engine of this process that failed may take to close; then it is abandoned."""
_log = structlog.get_logger("fsm_train")


class EngineHosts:
    """Used by the loop thread and by the worker threads of all engines at once."""

    def __init__(
        self,
        make: Callable[[int], EngineHost],
        post: Callable[[Input], None],
        transport: WeightTransport | None,
    ) -> None:
        """`make` starts an engine's host, `post` takes the news of a death; weights come by `transport`."""
        self._make = make
        self._post = post
        self._transport = transport
        self._deliveries = CallThreads("fsm-deliver")
        self._lock = threading.Lock()
        self._hosts: dict[int, tuple[int, EngineHost]] = {}
        """Of each engine the `op` of its start, and its host."""
        self._used: dict[int, EngineHost] = {}
        """`op` of each command that has begun -> the host it acts on."""

    def start(self, command: Command) -> EngineHost:
        """Make the host of the command's engine; one that was there before has ended when the new one begins."""
        engine = command.engine
        assert engine is not None, command
        with self._lock:
            _, before = self._hosts.pop(engine, (0, None))
        if before is not None:
            _end(before)
        host = self._make(engine)
        with self._lock:
            self._hosts[engine] = (command.op, host)
            self._used[command.op] = host
        host.on_death(partial(self._tell, engine, host, command.op))
        return host

    def of(self, command: Command) -> EngineHost:
        """The host that a command acts on. HostClosed if its engine was started anew since the command was given."""
        assert command.engine is not None, command
        with self._lock:
            started, host = self._hosts.get(command.engine, (command.op, None))
            if host is None or command.op < started:
                raise HostClosed(
                    f"engine-{command.engine} was started anew after this {command.kind.value} was ordered"
                )
            self._used[command.op] = host
        return host

    def used_by(self, command: Command) -> EngineHost | None:
        """The host that a running command acts on, once it does."""
        with self._lock:
            return self._used.get(command.op)

    def done(self, command: Command) -> None:
        """A command has ended."""
        with self._lock:
            self._used.pop(command.op, None)

    def load(self, host: EngineHost, snapshot: Snapshot, engine: int) -> Loaded:
        """Let an engine load while the trainer does its part, if it has one.

        Whichever fails first fails the load; of both, the engine's failure is told.
        """
        transport = self._transport
        if transport is None or (offered := transport.offer(snapshot, engine)) is snapshot:
            alone: Loaded = host.submit("load_weights", snapshot).result()
            return alone
        load: Future[Loaded] = host.submit("load_weights", offered)
        delivery: Future[None] = Future()
        self._deliveries.post(partial(_settle, delivery, partial(transport.deliver, offered, engine)))
        both: tuple[Future[Any], ...] = (load, delivery)
        wait(both, return_when=FIRST_EXCEPTION)
        for part in both:
            if part.done():
                part.result()
        return load.result()

    def close(self, timeout_s: float) -> None:
        """End every engine; one with a command that was given up is killed at once."""
        with self._lock:
            busy = list(self._used.values())
            hosts = [host for _, host in self._hosts.values()]
        with ExitStack() as stack:
            stack.callback(self._deliveries.end)
            for host in hosts:
                stack.callback(host.kill if host in busy else partial(host.close, timeout_s))

    def join(self, timeout_s: float) -> bool:
        """After `close`: whether every delivery has ended within the time."""
        return self._deliveries.join(timeout_s)

    def _tell(self, engine: int, host: EngineHost, start_op: int, death: EngineDied) -> None:
        with self._lock:
            current = engine in self._hosts and self._hosts[engine][1] is host
        if current:
            self._post(Input(InputKind.ENGINE_DIED, op=start_op, engine=engine, message=str(death)))


def _end(host: EngineHost) -> None:
    """End a host that is to be replaced: kill its process. Where it has none, only a close frees what it holds."""
    if host.pid is not None:
        host.kill()
        return
    try:
        host.close(_CLOSE_TIMEOUT_S)
    except (EngineError, EngineDied) as error:
        _log.warning("engine_close_failed", engine=host.name, message=str(error))


def _settle(future: Future[None], do: Callable[[], None]) -> None:
    try:
        do()
    except BaseException as error:  # whatever it is, it fails the load that waits for it
        future.set_exception(error)
    else:
        future.set_result(None)
