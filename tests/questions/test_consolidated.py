"""What ranks have saved, put together afterwards."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from fsdp_ref import FullyShardedDataParallel as FSDP
from fsdp_ref.checkpoint_files import open_checkpoint
from fsdp_ref.consolidate import chosen_tensors, consolidate_shard_weights
from tests.models import CASES
from tests.parity.training import as_one_unit
from tests.ranks import run_ranks
from tests.toy import nested, seeded


def saved_shards() -> tuple[bytes, dict[str, Any]]:
    """One file per rank, and what it holds."""
    model = as_one_unit(CASES["tied"].model(torch.float32), CASES["tied"])
    file = io.BytesIO()
    torch.save(model.local_state_dict(), file)
    return file.getvalue(), model.local_metadata_dict()


# facebookresearch/fairscale#815
def test_shards_of_a_tied_model_become_a_dict_with_every_name_and_equal_values():
    files, metadata = zip(*run_ranks(2, saved_shards), strict=True)
    weights = [torch.load(io.BytesIO(file), weights_only=True) for file in files]
    whole = consolidate_shard_weights(weights, metadata)
    plain = CASES["tied"].model(torch.float32, seed=5)
    assert whole.keys() == plain.state_dict().keys()
    assert torch.equal(whole["embedding.weight"], whole["head.weight"])
    plain.load_state_dict(whole)
    built = CASES["tied"].model(torch.float32).state_dict()
    assert all(torch.equal(value, built[name]) for name, value in plain.state_dict().items())
    assert FSDP.consolidate_shard_weights(weights, metadata).keys() == whole.keys()


def save_copies(folder: str) -> None:
    pair = ("set2", "mod2")
    model = nested(seeded(), sharding_strategy="HYBRID_SHARD", process_group=pair)
    with FSDP.state_dict_type(model, "sharded"):
        dcp.save({"model": model.state_dict()}, checkpoint_id=folder)


# pytorch/torchtitan#709
def test_of_several_copies_each_piece_is_written_once_and_each_file_by_one_rank(tmp_path):
    run_ranks(4, save_copies, str(tmp_path))
    checkpoint = open_checkpoint(tmp_path)
    pieces = [piece for tensor in checkpoint.tensors for piece in tensor.pieces]
    assert len({(piece.file, piece.start) for piece in pieces}) == len(pieces)
    writers = [path.name.split("_")[2] for path in tmp_path.glob("*.distcp")]
    assert len(writers) == len(set(writers)) <= 4
    plain = seeded().state_dict()
    found = {name: tensor.read() for name, tensor in chosen_tensors(checkpoint).items()}
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], value) for name, value in plain.items())
