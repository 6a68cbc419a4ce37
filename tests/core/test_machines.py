"""Every edge of every machine, and nothing but the edges."""

from __future__ import annotations

import pytest
from transitions import MachineError

from fsm_trainer.core.machines import TABLES, TERMINAL, Edge, StateMachine

EDGES = [(name, edge) for name, (_, _, edges) in TABLES.items() for edge in edges]


@pytest.mark.parametrize(("name", "edge"), EDGES, ids=lambda v: v if isinstance(v, str) else f"{v.source}-{v.trigger}")
def test_edge_is_taken(name: str, edge: Edge) -> None:
    machine = StateMachine(name, "x")
    machine.state = edge.source
    assert machine.fire(edge.trigger, 7) == (edge.source, edge.dest)
    assert machine.state is edge.dest
    assert machine.since_ns == 7


@pytest.mark.parametrize("name", TABLES)
def test_what_is_no_edge_is_refused(name: str) -> None:
    states, _, edges = TABLES[name]
    allowed = {(e.trigger, e.source) for e in edges}
    for trigger in {e.trigger for e in edges}:
        for state in states:
            if (trigger, state) in allowed:
                continue
            machine = StateMachine(name, "x")
            machine.state = state  # type: ignore[assignment]
            with pytest.raises(MachineError):
                machine.fire(trigger, 0)
            assert machine.state is state


@pytest.mark.parametrize("name", TABLES)
def test_trigger_and_state_decide_the_next_state(name: str) -> None:
    edges = TABLES[name][2]
    assert len({(e.trigger, e.source) for e in edges}) == len(edges)


@pytest.mark.parametrize("name", TABLES)
def test_every_state_is_reachable_and_terminal_states_have_no_way_out(name: str) -> None:
    states, initial, edges = TABLES[name]
    reached = {initial}
    for _ in states:
        reached |= {e.dest for e in edges if e.source in reached}
    assert reached == set(states)
    assert {e.source for e in edges} == {s for s in states if s not in TERMINAL}


def test_machines_do_not_share_state() -> None:
    first, second = StateMachine("run", "run"), StateMachine("run", "run")
    first.fire("run", 1)
    assert (first.state.value, second.state.value) == ("running", "starting")
