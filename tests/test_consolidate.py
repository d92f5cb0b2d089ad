"""What ranks have saved is put together without them; what is missing or mixed up is named."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.__main__ import main
from fsdp_ref.checkpoint_files import StoredTensor, open_checkpoint
from fsdp_ref.consolidate import (
    chosen_tensors,
    consolidate_checkpoint,
    consolidate_shard_weights,
    parse_size,
)
from fsdp_ref.errors import ConsolidationError
from fsdp_ref.safetensors_file import DTYPES, Kind, SafetensorsFile, refuse_dtype
from tests.models import CASES
from tests.parity.training import WRAPPINGS as CASE_WRAPPINGS
from tests.provoked import provokes
from tests.ranks import run_ranks
from tests.toy import Layer, Stack, nested, seeded

ROOT = Path(__file__).parents[1]


WORDS = {word: dtype for dtype, word in DTYPES.items()}


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Read the format by its description: a length, a header in JSON, and values."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    assert header.pop("__metadata__") == {"format": "pt"}
    found = {}
    for name, entry in header.items():
        first, last = (start + at for at in entry["data_offsets"])
        dtype = WORDS[entry["dtype"]]
        values = bytearray(raw[first:last])
        flat = torch.frombuffer(values, dtype=dtype) if values else torch.empty(0, dtype=dtype)
        found[name] = flat.view(entry["shape"])
    return found


# ---------------------------------------------------------------- checkpoints


def save_sharded(folder: str, wrapping: str = "nested") -> None:
    """A model and its optimizer, cut by rows, as one would save them."""
    model = nested(seeded())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with FSDP.state_dict_type(model, "sharded"):
        state = {
            "model": model.state_dict(),
            "optimizer": FSDP.optim_state_dict(model, optimizer),
            "epoch": 3,
        }
        dcp.save(state, checkpoint_id=folder)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    run_ranks(3, save_sharded, str(folder))
    return folder


def test_a_checkpoint_becomes_one_file_with_the_plain_models_weights(saved, tmp_path, capsys):
    out = tmp_path / "new" / "model.safetensors"
    assert main(["consolidate", str(saved), str(out)]) == 0
    printed = capsys.readouterr()
    assert printed.out.split() == [str(out)]
    assert printed.err.splitlines()[0] == "1 of 11: head.bias"
    assert len(printed.err.splitlines()) == 11
    found, plain = read_safetensors(out), seeded().state_dict()
    assert found.keys() == plain.keys()
    for name, value in plain.items():
        assert torch.equal(found[name], value), name
    seeded().load_state_dict(found)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_the_formats_own_package_reads_it(saved, tmp_path):
    package = pytest.importorskip("safetensors.torch", reason="the extra 'safetensors' is missing")
    (path,) = consolidate_checkpoint(saved, tmp_path / "model.safetensors")
    found = package.load_file(path)
    assert found.keys() == seeded().state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in seeded().state_dict().items())


def test_above_a_size_it_becomes_several_files_with_an_index(saved, tmp_path):
    seen: list[tuple[str, int]] = []
    paths = consolidate_checkpoint(
        saved, tmp_path / "model.safetensors", max_shard_size=300,
        progress=lambda name, nbytes: seen.append((name, nbytes)),
    )  # fmt: skip
    *parts, index = paths
    assert [path.name for path in parts] == [
        f"model-0000{n}-of-00004.safetensors" for n in (1, 2, 3, 4)
    ]
    text = json.loads(index.read_text())
    plain = seeded().state_dict()
    assert text["metadata"]["total_size"] == sum(value.nbytes for value in plain.values())
    assert dict(seen) == {name: value.nbytes for name, value in plain.items()}
    assert text["weight_map"].keys() == plain.keys()
    for name, file in text["weight_map"].items():
        assert torch.equal(read_safetensors(tmp_path / file)[name], plain[name])
    sizes = [sum(v.nbytes for v in read_safetensors(path).values()) for path in parts]
    assert max(sizes) <= 300
    assert index.name == "model.safetensors.index.json"


def test_one_file_and_several_are_never_written_beside_each_other(saved, tmp_path):
    one, many = tmp_path / "one" / "model.safetensors", tmp_path / "many" / "model.safetensors"
    consolidate_checkpoint(saved, one)
    consolidate_checkpoint(saved, many, max_shard_size=300)
    with provokes(consolidate_checkpoint, ConsolidationError, match="model.safetensors, which"):
        consolidate_checkpoint(saved, one, max_shard_size=300)
    with provokes(consolidate_checkpoint, ConsolidationError, match="index.json, which"):
        consolidate_checkpoint(saved, many)
    consolidate_checkpoint(saved, one)  # the same again is fine
    assert len(list(one.parent.iterdir())) == 1
    assert len(list(many.parent.iterdir())) == 5


def save_versions(folder: str) -> None:
    model = seeded(Grouped)
    with torch.no_grad():
        model.layers[0].scale.add_(dist.get_rank())
    model.layers[0] = FSDP(model.layers[0], process_group="self")
    model = FSDP(model)
    with FSDP.state_dict_type(model, "sharded"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def test_every_version_of_a_weight_in_small_groups_is_kept_under_its_name(tmp_path):
    run_ranks(2, save_versions, str(tmp_path / "versions"))
    (path,) = consolidate_checkpoint(tmp_path / "versions", tmp_path / "model.safetensors")
    found, plain = read_safetensors(path), seeded(Grouped).state_dict()
    for rank in (0, 1):
        assert torch.equal(found[f"layers.0.scale@rank{rank}"], plain["layers.0.scale"] + rank)
    assert torch.equal(found["head.weight"], plain["head.weight"])


def save_plainly(folder: str) -> None:
    dcp.save({"weight": torch.arange(6.0).view(2, 3), "b": torch.tensor(2)}, checkpoint_id=folder)


def save_other_things(folder: str) -> None:
    dcp.save({"net": {"w": torch.ones(2)}, "old": {"w": torch.ones(2)}}, checkpoint_id=folder)


def save_local(folder: str) -> None:
    model = nested(seeded())
    with FSDP.state_dict_type(model, "local"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


def save_odd(folder: str) -> None:
    dcp.save({"model": {"w": torch.ones(2, dtype=torch.complex64)}}, checkpoint_id=folder)


def test_the_model_is_found_in_what_was_saved_or_asked_for(tmp_path):
    plain, other, local = (str(tmp_path / name) for name in ("plain", "other", "local"))
    run_ranks(1, save_plainly, plain)
    run_ranks(1, save_other_things, other)
    run_ranks(2, save_local, local)
    run_ranks(1, save_odd, str(tmp_path / "odd"))
    (path,) = consolidate_checkpoint(plain, tmp_path / "plain.safetensors")
    assert torch.equal(read_safetensors(path)["weight"], torch.arange(6.0).view(2, 3))
    assert read_safetensors(path)["b"] == 2
    with provokes(chosen_tensors, ConsolidationError, match="the keys 'net', 'old'.*--key"):
        chosen_tensors(open_checkpoint(Path(other)))
    assert list(chosen_tensors(open_checkpoint(Path(other)), "net")) == ["w"]
    with provokes(chosen_tensors, ConsolidationError, match="key 'new'"):
        chosen_tensors(open_checkpoint(Path(other)), "new")
    with provokes(chosen_tensors, ConsolidationError, match="flat shards, such as"):
        chosen_tensors(open_checkpoint(Path(local)))
    with provokes(consolidate_checkpoint, ConsolidationError, match="'w'.*complex64"):
        consolidate_checkpoint(tmp_path / "odd", tmp_path / "odd.safetensors")
    with provokes(refuse_dtype, ConsolidationError):
        refuse_dtype("w", Kind(torch.complex64, (2,)))
    for wrong in ("much", "0", "-1GB", 0):
        with provokes(parse_size, ConsolidationError, match="5GB"):
            parse_size(wrong)
    assert [parse_size(size) for size in ("1.5 KB", "2mb", 7, "3G")] == [
        1500,
        2 * 10**6,
        7,
        3 * 10**9,
    ]


# ---------------------------------------------------------------- damage


def damaged(saved: Path, folder: Path) -> Path:
    import shutil

    return Path(shutil.copytree(saved, folder))


def test_an_incomplete_checkpoint_is_refused_by_name_and_nothing_is_written(
    saved, tmp_path, capsys
):
    out = tmp_path / "model.safetensors"

    gone = damaged(saved, tmp_path / "gone")
    (gone / "__1_0.distcp").unlink()
    with provokes(consolidate_checkpoint, ConsolidationError, match="no file __1_0.distcp"):
        consolidate_checkpoint(gone, out)
    with provokes(open_checkpoint, ConsolidationError, match="'model.head.weight'|'model"):
        open_checkpoint(gone)
    short = damaged(saved, tmp_path / "short")
    data = (short / "__0_0.distcp").read_bytes()
    (short / "__0_0.distcp").write_bytes(data[: len(data) // 2])
    with provokes(open_checkpoint, ConsolidationError, match="__0_0.distcp ends before"):
        open_checkpoint(short)
    unfinished = damaged(saved, tmp_path / "unfinished")
    (unfinished / ".metadata").unlink()
    with provokes(open_checkpoint, ConsolidationError, match="never finished"):
        open_checkpoint(unfinished)
    with provokes(open_checkpoint, ConsolidationError, match="no such folder"):
        open_checkpoint(tmp_path / "nowhere")
    assert main(["consolidate", str(unfinished), str(out)]) == 1
    assert "never finished" in capsys.readouterr().err
    assert not out.exists()


def test_damaged_and_mixed_up_files_are_found_while_reading(saved, tmp_path):
    out = tmp_path / "model.safetensors"
    out.write_bytes(b"from before")
    flipped = damaged(saved, tmp_path / "flipped")
    for file in flipped.glob("*.distcp"):
        file.write_bytes(bytes(len(file.read_bytes())))
    with provokes(StoredTensor.read, ConsolidationError, match=r"in .*distcp.*belongs to another"):
        chosen_tensors(open_checkpoint(flipped))["head.weight"].read()
    with provokes(consolidate_checkpoint, ConsolidationError, match="'model.head.bias'"):
        consolidate_checkpoint(flipped, out)
    assert out.read_bytes() == b"from before"
    mixed = damaged(saved, tmp_path / "mixed")
    first, second = (mixed / f"__{rank}_0.distcp" for rank in (0, 1))
    one, other = first.read_bytes(), second.read_bytes()
    length = max(len(one), len(other))
    first.write_bytes(other.ljust(length, b"\0"))
    second.write_bytes(one.ljust(length, b"\0"))
    with provokes(consolidate_checkpoint, ConsolidationError):
        consolidate_checkpoint(mixed, out)
    assert out.read_bytes() == b"from before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["flipped", "mixed", out.name]


class Harmful:
    """Would make a file if it were unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def changed_metadata(saved: Path, folder: Path, change: Any) -> Path:
    result = damaged(saved, folder)
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (result / ".metadata").write_bytes(pickle.dumps(metadata))
    return result


def test_metadata_that_says_something_else_is_refused(saved, tmp_path):
    harmful = damaged(saved, tmp_path / "harmful")
    (harmful / ".metadata").write_bytes(pickle.dumps(Harmful(tmp_path / "proof")))
    with provokes(open_checkpoint, ConsolidationError, match="system has no place"):
        open_checkpoint(harmful)
    assert not (tmp_path / "proof").exists()
    (harmful / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with provokes(open_checkpoint, ConsolidationError, match="a dict"):
        open_checkpoint(harmful)
    (harmful / ".metadata").write_bytes(b"\x80")
    with provokes(open_checkpoint, ConsolidationError, match="damaged"):
        open_checkpoint(harmful)

    def chunks(metadata: Any) -> Any:
        return metadata.state_dict_metadata["model.head.weight"].chunks

    def stored(metadata: Any) -> Any:
        found = metadata.storage_data
        return [found[index] for index in found if index.fqn == "model.head.weight"]

    def one_gone(metadata: Any) -> None:
        del chunks(metadata)[0]

    def one_twice(metadata: Any) -> None:
        chunks(metadata)[1] = chunks(metadata)[0]

    def one_outside(metadata: Any) -> None:
        chunks(metadata)[0].sizes = torch.Size([9, 5])

    def nowhere(metadata: Any) -> None:
        for index in [i for i in metadata.storage_data if i.fqn == "model.head.weight"]:
            del metadata.storage_data[index]

    def elsewhere(metadata: Any) -> None:
        stored(metadata)[0].relative_path = "../checkpoint/__0_0.distcp"

    def packed(metadata: Any) -> None:
        stored(metadata)[0].transform_descriptors = ["zstd"]

    for change, match in (
        (one_gone, "pieces with 5 of 10 elements"),
        (one_twice, "two pieces with the same elements"),
        (one_outside, r"a piece of shape \(9, 5\)"),
        (nowhere, "nowhere the piece"),
        (elsewhere, "outside of the folder"),
        (packed, "zstd"),
    ):
        folder = changed_metadata(saved, tmp_path / change.__name__, change)
        with provokes(open_checkpoint, ConsolidationError, match=match):
            open_checkpoint(folder)


def test_a_file_takes_what_was_announced_and_has_no_name_before_all_is_there(tmp_path):
    path = tmp_path / "one.safetensors"
    with (
        provokes(SafetensorsFile.add, ConsolidationError, match="expected 'a'"),
        SafetensorsFile(path, {"a": Kind(torch.float32, (2,))}) as file,
    ):
        file.add("a", torch.zeros(3))
    assert list(tmp_path.iterdir()) == []
    with SafetensorsFile(
        path, {"a": Kind(torch.float32, (2,)), "b": Kind(torch.int8, (0,))}
    ) as file:
        file.add("a", torch.tensor([1.0, 2.0]))
        assert not path.exists()
        file.add("b", torch.zeros(0, dtype=torch.int8))
    assert read_safetensors(path)["a"].tolist() == [1, 2]


# ---------------------------------------------------------------- memory, and the command line

NUMEL, COUNT = 2**20, 24

MEASURE = """
import resource, sys
import torch.distributed.checkpoint
from fsdp_ref.__main__ import main
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert main(["consolidate", *sys.argv[1:]]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def save_much(folder: str) -> None:
    """Several times the memory that is allowed for it."""
    weights = {f"w{n}": torch.full((NUMEL,), float(n)) for n in range(COUNT)}
    dcp.save({"model": weights}, checkpoint_id=folder)


def test_memory_stays_near_the_largest_tensor(tmp_path):
    run_ranks(1, save_much, str(tmp_path / "much"))
    command = [
        sys.executable,
        "-c",
        MEASURE,
        str(tmp_path / "much"),
        str(tmp_path / "o.safetensors"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    grown = int(done.stdout.split()[-1]) * 1024
    assert grown < 8 * 4 * NUMEL < COUNT * 4 * NUMEL / 2, grown
    assert read_safetensors(tmp_path / "o.safetensors")["w5"][-1] == 5


def test_the_command_line_says_what_it_wants():
    command = [sys.executable, "-m", "fsdp_ref", "consolidate", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0
    assert "--max-shard-size" in done.stdout


def test_a_bar_shows_how_far_it_is_where_rich_is_installed(saved, tmp_path, monkeypatch, capsys):
    pytest.importorskip("rich", reason="the extra 'rich' is missing")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["consolidate", str(saved), str(tmp_path / "model.safetensors")]) == 0
    assert "1 of 11" not in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)  # as if it were not installed
    assert main(["consolidate", str(saved), str(tmp_path / "model.safetensors")]) == 0
    assert "1 of 11" in capsys.readouterr().err


# ---------------------------------------------------------------- local dicts


def local_dicts(case_name: str, wrapping: str) -> tuple[Any, Any, Any]:
    case = CASES[case_name]
    model = CASE_WRAPPINGS[wrapping](case.model(torch.float32), case)
    return model.local_state_dict(), model.local_metadata_dict(), model.state_dict()


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.unit_classes])
def test_local_dicts_become_the_plain_models_state_dict(case):
    weights, metadata, full = zip(*run_ranks(3, local_dicts, case, "by class"), strict=True)
    backwards = [json.loads(json.dumps(one)) for one in metadata[::-1]]
    found = consolidate_shard_weights(weights[::-1], backwards)
    assert found.keys() == full[0].keys()
    for name, value in full[0].items():
        assert torch.equal(found[name], value), name
    plain = CASES[case].model(torch.float32, seed=7)
    plain.load_state_dict(found)
    buffers = [name for name, _ in plain.named_buffers()]
    without = FSDP.consolidate_shard_weights(weights, metadata, with_module_buffers=False)
    assert set(found) - set(without) == set(buffers)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in without.values())


class Grouped(Stack):
    """Its first layer will differ from group to group."""


def in_groups(strategy: str | None) -> tuple[Any, Any, Any]:
    model = seeded(Grouped)
    if strategy is None:
        with torch.no_grad():
            model.layers[0].scale.add_(dist.get_rank() // 2)
        model.layers[0] = FSDP(model.layers[0], process_group="set2")
        model.layers[1] = FSDP(model.layers[1], process_group="set2")
        model = FSDP(model)
    else:
        model = nested(model, sharding_strategy=strategy, process_group=("set2", "mod2"))
    return model.local_state_dict(), model.local_metadata_dict(), None


def test_copies_and_versions_of_small_groups_are_told_apart():
    plain = seeded(Grouped).state_dict()
    weights, metadata, _ = zip(*run_ranks(4, in_groups, "HYBRID_SHARD"), strict=True)
    found = consolidate_shard_weights(weights, metadata)
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
    weights, metadata, _ = zip(*run_ranks(4, in_groups, None), strict=True)
    found = consolidate_shard_weights(weights, metadata)
    assert torch.equal(found["layers.0.scale@rank0"], plain["layers.0.scale"])
    assert torch.equal(found["layers.0.scale@rank2"], plain["layers.0.scale"] + 1)
    assert torch.equal(found["layers.1.scale"], plain["layers.1.scale"])  # its versions are equal
    with_rank = {name for name in found if "@" in name}
    assert {name.partition("@")[0] for name in with_rank} == {n for n in plain if "layers.0" in n}


def plain_dicts() -> tuple[Any, Any]:
    model = nested(seeded())
    return model.local_state_dict(), model.local_metadata_dict()


def test_what_does_not_belong_together_is_refused_by_name():
    (one, one_meta), (two, two_meta) = run_ranks(2, plain_dicts)
    three = run_ranks(3, plain_dicts)
    key = next(name for name in two if "head" not in name and "layers.1" in name)
    without = {name: value for name, value in two.items() if name != key}
    short, other = dict(two), dict(two)
    short[key], other[key] = two[key][:-1], two[key].float()
    unit = copy.deepcopy(two_meta)
    unit["units"][1]["flat_parameters"][0]["slots"][0]["name"] = "layers.0.shift"
    for weights, metadata, match in (
        ([one, two], [one_meta], "1 for 2"),
        ([], [], "0 for 0"),
        ([one], [one_meta], "none of rank 1"),
        ([one, one], [one_meta, one_meta], "rank 0 twice"),
        ([one, three[1][0]], [one_meta, three[1][1]], r"such of \[2, 3\] ranks"),
        ([one, two], [two_meta, one_meta], "in the local dict of rank 0"),
        ([one, without], [one_meta, two_meta], f"'{key}' in the local dict of rank 1"),
        ([one, short], [one_meta, two_meta], r"18 elements.*shape \(17,\)"),
        ([one, other], [one_meta, two_meta], "float64.*float32"),
        ([one, {**two, key: 3}], [one_meta, two_meta], "a int"),
        ([one, two], [one_meta, unit], "rank 1 with others"),
        ([one, two], [one_meta, {}], "the format"),
    ):
        with provokes(consolidate_shard_weights, ConsolidationError, match=match):
            consolidate_shard_weights(weights, metadata)
    with provokes(FSDP.consolidate_shard_weights, ConsolidationError, match="none of rank 0"):
        FSDP.consolidate_shard_weights([two], [two_meta])
    found = consolidate_shard_weights([one, without], [one_meta, two_meta], strict=False)
    full = consolidate_shard_weights([one, two], [one_meta, two_meta])
    assert set(full) - set(found) == {n for n in full if n.startswith("layers.1")}
    assert consolidate_shard_weights([one], [one_meta], strict=False) == {}


class WithExtras(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.ignored = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.tensor(4))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 2}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 2}


def with_extras() -> tuple[Any, Any]:
    module = WithExtras()
    model = FSDP(module, ignored_states=[module.ignored])
    return model.local_state_dict(), model.local_metadata_dict()


def test_buffers_extra_state_and_ignored_parameters_are_the_lowest_ranks():
    weights, metadata = zip(*run_ranks(2, with_extras), strict=True)
    found = consolidate_shard_weights(weights, metadata)
    assert found["_extra_state"] == {"version": 2}
    WithExtras().load_state_dict(found)
