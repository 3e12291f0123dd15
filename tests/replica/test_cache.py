"""What becomes of an engine's cache at a load, by how requests live across it and by what prefixes may outlive."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest

from stitch.core.ids import ReplicaId
from stitch.core.lineage import PolicyLineage
from stitch.engines.port import Engine, EngineReport, PauseMode
from stitch.replica.activate import Activation
from stitch.replica.config import KvScope, Mode, ReplicaConfig
from stitch.replica.gate import Gate
from tests.replica.test_gate import serving
from tests.replica.world import POLICY

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("mode", "scope", "carries", "pause", "flush"),
    [
        (Mode.IN_PLACE, KvScope.SESSION, PauseMode.RETRACT, PauseMode.RETRACT, False),
        (Mode.IN_PLACE, KvScope.SESSION, PauseMode.IN_PLACE, PauseMode.IN_PLACE, False),
        (Mode.IN_PLACE, KvScope.VERSION, PauseMode.RETRACT, PauseMode.RETRACT, True),
        (Mode.IN_PLACE, KvScope.VERSION, PauseMode.IN_PLACE, PauseMode.RETRACT, True),
        (Mode.IN_PLACE, KvScope.NONE, PauseMode.IN_PLACE, PauseMode.IN_PLACE, False),
        (Mode.QUIESCE, KvScope.SESSION, PauseMode.IN_PLACE, PauseMode.ABORT, True),
        (Mode.IN_PLACE, KvScope.SESSION, None, PauseMode.ABORT, True),
    ],
)
async def test_a_prefix_lives_on_only_where_it_may(
    mode: Mode, scope: KvScope, carries: PauseMode | None, pause: PauseMode, flush: bool, tmp_path: Path
) -> None:
    engine = mock.create_autospec(Engine, instance=True, carry_mode=carries, pause_modes=frozenset(PauseMode))
    gate = Gate(lambda: PolicyLineage(policy=POLICY), capacity=1, wait_seconds=1.0)
    old, new = serving(1), serving(2)
    gate.flip(old)
    gate.open()
    engine.report.return_value = EngineReport(label=new.label, model_path=new.model_path)
    config = ReplicaConfig(
        log="memory://", store="memory://", policy=POLICY, replica=ReplicaId("a"), workdir=tmp_path, mode=mode, kv_scope=scope
    )
    swap = await Activation(engine, gate, config).change(Path(new.model_path), new.target, None)
    assert swap.refused is None
    engine.pause.assert_awaited_once_with(pause)
    engine.load.assert_awaited_once_with(Path(new.model_path), new.label, flush_cache=flush)
    engine.resume.assert_awaited_once_with()
