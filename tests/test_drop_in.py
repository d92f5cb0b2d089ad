"""Programs written for torch's FSDP1 run here when the package in their imports is changed.

Each program trains with another mix of arguments and leaves what it computed in `results`.
Torch's class needs to be told to stay on the CPU; nothing else is added for it.
"""

import inspect

import torch
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp.wrap as torchs_wrap
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

import fsdp_ref
from fsdp_ref import wrapping
from tests.ranks import run_ranks

BEGINNING = """
import functools

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, 11)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


tokens = torch.randint(11, (2, 4, 7), generator=torch.Generator().manual_seed(dist.get_rank()))
results = {"losses": []}


def step(model, optimizer, scaler=None):
    loss = nn.functional.cross_entropy(model(tokens[0]).float().flatten(0, 1), tokens[1].flatten())
    (loss if scaler is None else scaler.scale(loss)).backward()
    results["losses"].append(loss.item())
"""

PROGRAMS = {
    "mixed precision, transformer policy, clipping": """
model = FSDP(
    Net(),
    auto_wrap_policy=functools.partial(
        transformer_auto_wrap_policy, transformer_layer_cls={Block}
    ),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
    backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    device_id=torch.device("cpu"),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(3):
    optimizer.zero_grad()
    step(model, optimizer)
    results.setdefault("norms", []).append(model.clip_grad_norm_(0.5).item())
    optimizer.step()
with FSDP.summon_full_params(model):
    results["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
""",
    "original parameters, groups without decay, accumulation": """
model = FSDP(
    Net(), None, ShardingStrategy.FULL_SHARD, None, ModuleWrapPolicy({Block}),
    use_orig_params=True, forward_prefetch=True, limit_all_gathers=False,
    device_id=torch.device("cpu"),
)
decay = [p for n, p in model.named_parameters() if n.endswith("weight")]
rest = [p for n, p in model.named_parameters() if not n.endswith("weight")]
optimizer = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=1e-2)
for _ in range(2):
    with model.no_sync():
        step(model, optimizer)
    step(model, optimizer)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
results["names"] = [n for n, _ in model.named_parameters()]
with FSDP.summon_full_params(model, writeback=False, rank0_only=True):
    if dist.get_rank() == 0:
        results["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
""",
    "hybrid by policy, static graph of units, state dict": """
shard, replicate = dist.group.WORLD, dist.new_subgroups(1)[0]
model = FSDP(
    Net(), (shard, replicate), ShardingStrategy.HYBRID_SHARD,
    auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=200),
    backward_prefetch=None, device_id=torch.device("cpu"),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    step(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
results["weights"] = {n: v.clone() for n, v in model.state_dict().items()}
""",
    "meta device, ignored head, scaler, wrapping by hand": """
plain = Net()
with enable_wrap(wrapper_cls=FSDP, device_id=torch.device("cpu")):
    for index, block in enumerate(plain.blocks):
        plain.blocks[index] = wrap(block)
model = FSDP(plain, ignored_modules=[plain.head], device_id=torch.device("cpu"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = ShardedGradScaler(device="cpu", init_scale=4.0)
for _ in range(3):
    step(model, optimizer, scaler)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
with FSDP.summon_full_params(model):
    results["weights"] = {n: p.detach().clone() for n, p in model.named_parameters()}
""",
    "state dict types, whole and through a checkpoint, the run goes on": """
import tempfile
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, StateDictType

def build():
    model = FSDP(
        Net(), auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
    )
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

model, optimizer = build()
for _ in range(2):
    step(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
whole = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
    results["whole"] = {n: v.clone() for n, v in model.state_dict().items()}
    moments = FSDP.optim_state_dict(model, optimizer)
previous = FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
results["forms"] = [previous.state_dict_type.value]
results["forms"].append(FSDP.get_state_dict_type(model).state_dict_type.value)
path = [tempfile.mkdtemp()]
dist.broadcast_object_list(path)
state = model.state_dict()
results["keys"] = list(range(len(state)))
dcp.save(state, checkpoint_id=path[0])

model, optimizer = build()
FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
state = model.state_dict()
dcp.load(state, checkpoint_id=path[0])
model.load_state_dict(state)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *whole):
    optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, moments))
for _ in range(2):
    step(model, optimizer)
    optimizer.step()
    optimizer.zero_grad()
FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT)
results["weights"] = model.state_dict()
""",
}


def both(program: str) -> tuple[dict, dict]:
    """Run one program as it is, and with its imports changed; a fresh world of names for each."""
    theirs = {"__name__": "theirs"}
    exec(compile(BEGINNING + program, "theirs", "exec"), theirs)
    changed = (
        (BEGINNING + program)
        .replace("torch.distributed.fsdp.wrap", "fsdp_ref.wrapping")
        .replace("torch.distributed.fsdp.sharded_grad_scaler", "fsdp_ref")
        .replace("torch.distributed.fsdp", "fsdp_ref")
    )
    assert "distributed.fsdp" not in changed
    ours = {"__name__": "ours"}
    exec(compile(changed, "ours", "exec"), ours)
    assert ours["FSDP"] is fsdp_ref.FullyShardedDataParallel
    assert theirs["FSDP"] is not ours["FSDP"]
    return theirs["results"], ours["results"]


def every_program() -> dict[str, tuple[dict, dict]]:
    return {name: both(program) for name, program in PROGRAMS.items()}


def test_a_program_for_torchs_class_computes_the_same_with_one_import_changed():
    for outcome in run_ranks(2, every_program, timeout=100):
        assert outcome.keys() == PROGRAMS.keys()
        for name, (theirs, ours) in outcome.items():
            # Torch's class leaves the wrappers' names in between, except inside summon.
            names = [n.replace("_fsdp_wrapped_module.", "") for n in theirs.pop("names", [])]
            assert ours.pop("names", []) == names, name
            low = "mixed precision" in name
            torch.testing.assert_close(
                ours,
                theirs,
                rtol=2e-2 if low else 1e-5,
                atol=2e-3 if low else 1e-6,
            )
            assert ours["losses"][-1] < ours["losses"][0]


OF_FULLY_SHARD = {  # names of torch.distributed.fsdp that belong to its second FSDP
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "share_comm_ctx",
}


def test_every_name_that_such_a_program_imports_is_here():
    wanted = set(torchs.__all__) - OF_FULLY_SHARD
    assert {name for name in wanted if not hasattr(fsdp_ref, name)} == set()
    assert set(torchs.__all__) >= OF_FULLY_SHARD
    assert {name for name in torchs_wrap.__all__ if not hasattr(wrapping, name)} == set()
    assert fsdp_ref.OptimStateKeyType is OptimStateKeyType


def test_every_method_of_torchs_class_is_here_and_takes_the_same_arguments():
    theirs, ours = torchs.FullyShardedDataParallel, fsdp_ref.FullyShardedDataParallel
    methods = [n for n in vars(theirs) if not n.startswith("_") and callable(getattr(theirs, n))]
    assert len(methods) > 15
    for name in [*methods, "__init__"]:
        taken = list(inspect.signature(getattr(ours, name)).parameters)
        wanted = list(inspect.signature(getattr(theirs, name)).parameters)
        assert taken[: len(wanted)] == wanted, name
