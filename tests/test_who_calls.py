"""What docstrings say about who has to call is what happens: each call is made, alone or by all."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_ref
from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref import checkpoint, optim_state, process_groups, replicas, timeline
from fsdp_ref.initialize import seeded as seeded_init
from fsdp_ref.rank_group import RankGroup
from fsdp_ref.recomputing import recompute
from tests.ranks import run_ranks
from tests.toy import mean_square, my_part, nested, seeded, whole_batch

REPOSITORY = Path(__file__).resolve().parents[1]
LATE = 0.2  # seconds by which one rank is late


class Scene:
    """A trained model, and everything that a call may want."""

    def __init__(self) -> None:
        self.x = my_part(whole_batch())
        self.model = nested(seeded(), use_orig_params=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        mean_square(self.model(self.x)).backward()
        self.optimizer.step()
        self.unused = FSDP(nn.Linear(3, 3))
        self.whole = self.model.state_dict()
        self.moments = FSDP.optim_state_dict(self.model, self.optimizer)
        self.cut = checkpoint.get_state_dict(self.model, self.optimizer)
        self.numbered = self.model.gather_full_optim_state_dict(self.optimizer)
        self.local = self.model.local_state_dict()
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        with timeline() as self.recorded:
            self.model(self.x)
        self.unsharding = self.model.unshard(async_op=True)

    def number(self) -> dict[str, Any]:
        """Return the moments by number."""
        kind = fsdp_ref.OptimStateKeyType.PARAM_ID
        return FSDP.rekey_optim_state_dict(self.moments, kind, self.model, optim=self.optimizer)


def opened(context: Any) -> None:
    with context:
        pass


def in_context(call: Callable[[], Any]) -> None:
    with fsdp_ref.enable_wrap(wrapper_cls=FSDP):
        call()


def gathered_and_cut(s: Scene) -> Any:
    state = FSDP.sharded_optim_state_dict(s.model, s.optimizer)
    return FSDP.flatten_sharded_optim_state_dict(state, s.model, s.optimizer)


def new_group() -> RankGroup:
    return RankGroup((0, 1), dist.get_rank(), asked="a test")


COLLECTIVE: dict[str, Callable[[Scene], Any]] = {
    "apply": lambda s: s.model.apply(lambda module: None),
    "check_replicas": lambda s: replicas.check_replicas(s.model),
    "clip_grad_norm_": lambda s: s.model.clip_grad_norm_(1.0),
    "create": lambda s: process_groups.create([new_group()]),
    "flatten_sharded_optim_state_dict": gathered_and_cut,
    "forward": lambda s: s.model(s.x),
    "full_optim_state_dict": lambda s: FSDP.full_optim_state_dict(s.model, s.optimizer),
    "gather_full_optim_state_dict": lambda s: s.model.gather_full_optim_state_dict(s.optimizer),
    "get_model_state_dict": lambda s: checkpoint.get_model_state_dict(s.model),
    "get_optimizer_state_dict": lambda s: checkpoint.get_optimizer_state_dict(s.model, s.optimizer),
    "get_state_dict": lambda s: checkpoint.get_state_dict(s.model, s.optimizer),
    "optim_state_dict": lambda s: FSDP.optim_state_dict(s.model, s.optimizer),
    "scatter_full_optim_state_dict": lambda s: FSDP.scatter_full_optim_state_dict(
        s.moments if dist.get_rank() == 0 else None, s.model, optim=s.optimizer
    ),
    "set_model_state_dict": lambda s: checkpoint.set_model_state_dict(s.model, s.cut[0]),
    "set_optimizer_state_dict": lambda s: checkpoint.set_optimizer_state_dict(
        s.model, s.optimizer, s.cut[1]
    ),
    "set_state_dict": lambda s: checkpoint.set_state_dict(
        s.model, s.optimizer, model_state_dict=s.cut[0], optim_state_dict=s.cut[1]
    ),
    "sharded_optim_state_dict": lambda s: FSDP.sharded_optim_state_dict(s.model, s.optimizer),
    "state_dict": lambda s: s.model.state_dict(),
    "summon_full_params": lambda s: opened(FSDP.summon_full_params(s.model)),
    "unshard": lambda s: (s.model.unshard(), s.model.reshard()),
}

ALONE: dict[str, Callable[[Scene], Any]] = {
    "Unsharding.wait": lambda s: s.unsharding.wait(),  # before others drop what it waits for
    # alike
    "auto_wrap": lambda s: in_context(
        lambda: fsdp_ref.auto_wrap(nn.Sequential(nn.Linear(3, 3)), min_num_params=1)
    ),
    "no_sync": lambda s: opened(s.model.no_sync()),
    "register_comm_hook": lambda s: s.unused.register_comm_hook(None, lambda *arguments: None),
    "register_fsdp_forward_method": lambda s: fsdp_ref.register_fsdp_forward_method(
        s.unused, "forward"
    ),
    "set_gradient_divide_factors": lambda s: s.model.set_gradient_divide_factors(2.0, 1.0),
    "set_state_dict_type": lambda s: FSDP.set_state_dict_type(s.model, "full"),
    "state_dict_type": lambda s: opened(FSDP.state_dict_type(s.model, "sharded")),
    "wrap": lambda s: in_context(lambda: fsdp_ref.wrap(nn.Linear(3, 3))),
    # local
    "attach": lambda s: optim_state.attach(s.model, torch.optim.SGD(s.model.parameters(), lr=0.1)),
    "check_is_root": lambda s: s.model.check_is_root(),
    "enable_wrap": lambda s: in_context(lambda: None),
    "explain": lambda s: fsdp_ref.explain(s.model),
    "extra_repr": lambda s: repr(s.model),
    "fsdp_modules": lambda s: FSDP.fsdp_modules(s.model),
    "get_shard_from_optim_state_dict": lambda s: s.model.get_shard_from_optim_state_dict(
        s.numbered
    ),
    "get_state_dict_type": lambda s: FSDP.get_state_dict_type(s.model),
    "group_of_mesh": lambda s: process_groups.group_of_mesh(s.mesh, 0, "a test"),
    "load_local_state_dict": lambda s: s.model.load_local_state_dict(s.local),
    "local_state_dict": lambda s: s.model.local_state_dict(),
    "named_buffers": lambda s: list(s.model.named_buffers()),
    "named_parameters": lambda s: list(s.model.named_parameters()),
    "rank_lists": lambda s: process_groups.rank_lists("set2"),
    "recompute": lambda s: recompute(nn.Linear(3, 3)),
    "rekey_optim_state_dict": Scene.number,
    "reshard": lambda s: s.model.reshard(),
    "resolve": lambda s: process_groups.resolve("self", where="a test"),
    "seeded": lambda s: seeded_init(nn.Linear(3, 3, device="meta")),
    "shard_full_optim_state_dict": lambda s: FSDP.shard_full_optim_state_dict(
        s.moments, s.model, optim=s.optimizer
    ),
    "strategy_of": lambda s: fsdp_ref.inspection.strategy_of(s.model._unit.placement),
    "table": lambda s: process_groups.table("set2"),
    "timeline": lambda s: opened(timeline()),
    "Timeline.bytes_sent": lambda s: s.recorded.bytes_sent(),
    "Timeline.chrome_trace": lambda s: s.recorded.chrome_trace(),
    "Timeline.lines": lambda s: s.recorded.lines(),
    "Timeline.save_chrome_trace": lambda s: s.recorded.save_chrome_trace("/dev/null"),
    "Timeline.summary": lambda s: s.recorded.summary(),
    "unit_tree": lambda s: fsdp_ref.unit_tree(s.model),
    # depends, where nothing is sent
    "load_state_dict": lambda s: s.model.load_state_dict(s.whole),
    "local_metadata_dict": lambda s: s.model.local_metadata_dict(),
    "optim_state_dict_to_load": lambda s: FSDP.optim_state_dict_to_load(
        s.model, s.optimizer, s.moments
    ),
}

DEPENDS: dict[str, Callable[[Scene], Any]] = {
    "load_state_dict": lambda s: s.model.load_state_dict(s.cut[0]),
    "optim_state_dict_to_load": lambda s: FSDP.optim_state_dict_to_load(
        s.model, s.optimizer, s.cut[1]
    ),
    "Unsharding.wait": lambda s: (s.model.reshard(), s.unsharding.wait()),
}


def alone() -> list[str]:
    """Make the calls on one rank only; return those that sent something."""
    scene, sent = Scene(), []
    if dist.get_rank() == 1:
        for name, call in ALONE.items():
            with timeline() as recorded:
                call(scene)
            if recorded.bytes_sent() or any(event.group for event in recorded.events):
                sent.append(name)
    return sent


def test_what_one_rank_can_call_alone_sends_nothing():
    assert run_ranks(2, alone, dist_timeout=15.0)[1] == []


def at_the_same_place() -> dict[str, list[float]]:
    """Let each rank be late in turn; return when it began, and when the other one was done."""
    scene, times, calls = (
        Scene(),
        {},
        {**COLLECTIVE, **{f"{n}, also": c for n, c in DEPENDS.items()}},
    )
    for name, call in calls.items():
        for late in (0, 1):
            dist.barrier()
            if dist.get_rank() == late:
                time.sleep(LATE)
            began = time.monotonic()
            call(scene)
            times.setdefault(name, []).append(
                began if dist.get_rank() == late else time.monotonic()
            )
    return times


def test_what_every_rank_has_to_call_waits_for_all():
    first, second = run_ranks(2, at_the_same_place)
    for name in first:
        late_began, other_done = first[name][0], second[name][0]
        waits = other_done >= late_began
        late_began, other_done = second[name][1], first[name][1]
        assert waits or other_done >= late_began, f"{name}: no rank waits for the other"


# ---------------------------------------------------------------- the table


@pytest.fixture(scope="module")
def found() -> list[Any]:
    from tools import docstrings
    from tools.prebuild.who_calls import calls

    return calls(REPOSITORY, docstrings.load(REPOSITORY))


def test_each_call_in_the_table_is_made_by_a_test(found):
    names = {
        kind: {call.name for call in found if call.kind == kind}
        for kind in ("collective", "depends", "alike", "local", "offline", None)
    }
    assert names[None] == set()
    assert names["collective"] == set(COLLECTIVE)
    assert names["alike"] | names["local"] | names["depends"] == set(ALONE)
    assert names["depends"] - set(DEPENDS) == {"local_metadata_dict"}  # at its first use only
    assert all("consolidat" in c.path for c in found if c.kind == "offline")  # test_consolidate.py


def test_a_public_docstring_that_does_not_say_who_calls_is_refused(tmp_path, monkeypatch):
    from tools.checks import who_calls
    from tools.prebuild import who_calls as read

    source = tmp_path / "fsdp_ref" / "__init__.py"
    source.parent.mkdir()
    (tmp_path / "site").mkdir()
    template = (
        '__all__ = ["f"]\n\n\ndef f(x):\n    """Do it.{}\n\n'
        '    Args:\n        x: Of every rank.\n    """\n'
    )
    kinds = {
        " Collective.": "collective", " Not collective.": "local", " Local.": "local",
        " Local as a rule.": "depends", "\n\n    Every rank does it.": "alike",
        " Needs no ranks.": "offline", "\n\n    Not collective: every rank does it.": "alike",
        "\n\n    Collective: every rank\n    does it.": "collective",
    }  # fmt: skip
    for text, kind in kinds.items():
        source.write_text(template.format(text))
        package = who_calls.docstrings.load(tmp_path)
        assert [call.kind for call in read.calls(tmp_path, package)] == [kind], text
        assert who_calls.check_who_calls(tmp_path).problems == []
    for text in ("", " Not so local.", " Called on all ranks."):
        source.write_text(template.format(text))
        (problem,) = who_calls.check_who_calls(tmp_path).problems
        assert "fsdp_ref.f does not say who must call it" in problem


def test_the_table_links_each_call_and_says_what_is_on_the_first_rank_alone(found):
    from tools.prebuild.who_calls import KINDS, written

    text = written(found)
    assert text.count("\n## ") == len(KINDS) - 1
    for call in found:
        assert f"][{call.path}]" in text
    alone = {call.name for call in found if call.first_alone}
    assert {"state_dict", "optim_state_dict", "get_state_dict", "set_state_dict"} <= alone
    assert "local_state_dict" not in alone
